"""The hub as a source, against the loopback hub and together with the real huggingface_hub."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import WeakFileLock

from localrun.errors import BadRequest, DownloadFailed, LocalrunError, NotFound, SourceRefused, Unavailable
from localrun.models import quant_choice
from localrun.models.download import huggingface
from localrun.models.download import huggingface as hub_module
from localrun.models.download.fetch import new_client
from localrun.models.download.huggingface import MAX_AT_ONCE, HubName
from localrun.models.download.partial import find_stale, remove_stale
from localrun.models.download.plan import FetchLimits, RemotePlan
from localrun.models.storage.manifest import Place, Role
from tests.hub.hanging import HangingHub
from tests.hub.repository import Repository
from tests.hub.server import TOKEN, Hub
from tests.server.waiting import until

REPO = "acme/Fox-GGUF"
SHARDED = "acme/Elephant-GGUF"
GATED = "acme/Gated-GGUF"
PRIVATE = "acme/Private-GGUF"
LIMITS = FetchLimits(
    connections=4, part_bytes=64 * 1024, record_bytes=16 * 1024, retries=3, backoff_base_s=0.001, reserve_bytes=0
)


def content(seed: int, size_bytes: int = 300_000) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


Q4, Q8, PROJECTOR = content(1), content(2, 500_000), content(3, 100_000)


@pytest.fixture
def server() -> Iterator[Hub]:
    fox = {"fox-Q4_K_M.gguf": Q4, "fox-Q8_0.gguf": Q8, "mmproj-fox-F16.gguf": PROJECTOR, "README.md": b"# Fox\n"}
    shards = {f"Q8_0/elephant-Q8_0-0000{n}-of-00003.gguf": content(10 + n, 90_000) for n in (1, 2, 3)}
    with Hub(
        Repository(REPO, fox, branches=("main", "v2", "refs/pr/1")),
        Repository(SHARDED, {**shards, "small.gguf": content(20, 5_000)}, lfs=frozenset(shards), n_downloads=5000),
        Repository(GATED, {"gated-Q4_K_M.gguf": Q4}, gated=True, licence="acme-community"),
        Repository(PRIVATE, {"private-Q4_K_M.gguf": Q4}, private=True),
        Repository("acme/Weights", {"model.safetensors": b"x"}, tags=["safetensors"]),
    ) as running:
        yield running


@pytest.fixture
def hub(server: Hub, tmp_path: Path) -> huggingface.Hub:
    return huggingface.Hub(endpoint=server.endpoint, token=None, cache_folder=tmp_path / "hub")


def planned(hub: huggingface.Hub, repo: str = REPO, tag: str | None = "Q4_K_M", revision: str = "main") -> RemotePlan:
    choose = partial(quant_choice.choose, tag=tag, memory_bytes=16 * 10**9, repo=repo)
    return asyncio.run(huggingface.plan(HubName(repo, revision), hub=hub, choose=choose))


def downloaded(hub: huggingface.Hub, plan: RemotePlan) -> tuple[Path, ...]:
    async def run() -> tuple[Path, ...]:
        async with new_client() as client:
            return await huggingface.download(plan, hub=hub, client=client, limits=LIMITS)

    return asyncio.run(run())


def pulled(hub: huggingface.Hub, **asked: str) -> tuple[Path, ...]:
    return downloaded(hub, planned(hub, **asked))


def theirs(hub: huggingface.Hub, file: str, repo: str = REPO, **options: object) -> str:
    """What the real client downloads into, or finds in, the same cache."""
    return huggingface_hub.hf_hub_download(
        repo, file, endpoint=hub.endpoint, cache_dir=hub.cache_folder, token=hub.token or False, **options
    )


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_the_plan_says_what_the_manifest_needs(server, hub):
    plan = planned(hub)
    assert [(file.stored.role, file.stored.place) for file in plan.files] == [(Role.MODEL, Place.HUB)]
    model = plan.files[0]
    assert model.stored.digest == f"sha256:{hashlib.sha256(Q4).hexdigest()}"
    assert model.stored.size_bytes == model.item.size_bytes == len(Q4)
    commit = server.repositories[REPO].commit
    assert model.stored.path == f"models--acme--Fox-GGUF/snapshots/{commit}/fox-Q4_K_M.gguf"
    assert (plan.quant, plan.revision, plan.licence) == ("Q4_K_M", commit, "apache-2.0")
    assert not hub.cache_folder.exists()


def test_a_download_is_found_by_the_real_client(server, hub):
    (model,) = pulled(hub)
    assert model.read_bytes() == Q4
    assert huggingface_hub.try_to_load_from_cache(REPO, "fox-Q4_K_M.gguf", cache_dir=hub.cache_folder) == str(model)
    assert theirs(hub, "fox-Q4_K_M.gguf", local_files_only=True) == str(model)
    server.record.clear()
    assert theirs(hub, "fox-Q4_K_M.gguf") == str(model)
    assert server.record.content_bytes == 0
    scan = huggingface_hub.scan_cache_dir(hub.cache_folder)
    assert scan.warnings == []
    [repo] = scan.repos
    assert (repo.repo_id, repo.size_on_disk, sorted(repo.refs)) == (REPO, len(Q4), ["main"])


def test_what_the_real_client_downloaded_is_not_transferred_again(server, hub):
    path = theirs(hub, "fox-Q4_K_M.gguf")
    server.record.clear()
    assert pulled(hub)[0] == Path(path)
    assert server.record.content_bytes == 0
    assert server.record.of("storage") == []


def test_the_same_layout_as_the_real_client_writes(server, hub, tmp_path):
    pulled(hub)
    other = replace(hub, cache_folder=tmp_path / "theirs")
    theirs(other, "fox-Q4_K_M.gguf")
    ours, real = (
        {name for name in everything_in(folder) if "/trees/" not in name}
        for folder in (hub.cache_folder, other.cache_folder)
    )
    assert ours == real
    link = Path("models--acme--Fox-GGUF/snapshots", server.repositories[REPO].commit, "fox-Q4_K_M.gguf")
    assert os.readlink(hub.cache_folder / link) == os.readlink(other.cache_folder / link)


def test_the_loopback_hub_is_one_for_the_real_client(server, hub):
    api = huggingface_hub.HfApi(endpoint=hub.endpoint, token=False)
    assert sorted(api.list_repo_files(SHARDED))[-1] == "small.gguf"
    assert [branch.name for branch in api.list_repo_refs(REPO).branches] == ["main", "v2", "refs/pr/1"]
    server.faults.drop_after = lambda n: 70_000 if n == 0 else None
    folder = huggingface_hub.snapshot_download(
        SHARDED, endpoint=hub.endpoint, cache_dir=hub.cache_folder, token=False, max_workers=1
    )
    assert Path(folder, "small.gguf").read_bytes() == content(20, 5_000)
    server.record.clear()
    assert [path.parent.parent == Path(folder) for path in pulled(hub, repo=SHARDED, tag="Q8_0")] == [True] * 3
    assert server.record.content_bytes == 0


def test_shards_come_all_and_in_order(server, hub):
    plan = planned(hub, repo=SHARDED, tag="Q8_0")
    assert [file.item.name[-19:] for file in plan.files] == [f"-0000{n}-of-00003.gguf"[-19:] for n in (1, 2, 3)]
    paths = downloaded(hub, plan)
    assert [path.read_bytes() for path in paths] == [content(10 + n, 90_000) for n in (1, 2, 3)]
    assert len({path.parent for path in paths}) == 1


def test_a_small_file_that_is_not_large_is_verified_by_its_git_id(server, hub):
    plan = planned(hub, repo=SHARDED, tag="small.gguf")
    assert (plan.files[0].item.sha256, plan.files[0].stored.digest) == (None, "")
    assert downloaded(hub, plan)[0].read_bytes() == content(20, 5_000)
    server.faults.flip_byte_at = 17
    other = replace(hub, cache_folder=hub.cache_folder.with_name("other"))
    with pytest.raises(DownloadFailed, match="git blob id"):
        pulled(other, repo=SHARDED, tag="small.gguf")


def test_revisions(server, hub):
    for revision in ("v2", "refs%2Fpr%2F1", server.repositories[REPO].commit):
        if "%" not in revision:
            pulled(hub, revision=revision)
            path = huggingface_hub.try_to_load_from_cache(
                REPO, "fox-Q4_K_M.gguf", cache_dir=hub.cache_folder, revision=revision
            )
            assert isinstance(path, str)
    assert server.record.content_bytes == len(Q4)
    with pytest.raises(NotFound, match="'v9'"):
        planned(hub, revision="v9")


def test_a_gated_repository_says_what_to_do(server, hub):
    with pytest.raises(SourceRefused, match=f"gated.*{server.endpoint}/{GATED}"):
        planned(hub, repo=GATED)
    with pytest.raises(SourceRefused, match="token has no access"):
        planned(replace(hub, token="hf_somebody_else"), repo=GATED)
    allowed = replace(hub, token=TOKEN)
    plan = planned(allowed, repo=GATED)
    assert plan.licence == "acme-community"
    assert downloaded(allowed, plan)[0].read_bytes() == Q4
    assert {request.headers.get("authorization") for request in server.record.of("storage")} == {None}


def test_access_that_ended_between_plan_and_download_says_so(server, hub):
    plan = planned(hub)
    server.repositories[REPO].gated = True
    with pytest.raises(SourceRefused, match=f"'{REPO}' is gated; accept its terms"):
        downloaded(hub, plan)


def test_a_private_or_missing_repository(hub):
    for repo in (PRIVATE, "acme/Nothing"):
        with pytest.raises(NotFound, match=f"'{repo}'.*private") as missing:
            planned(hub, repo=repo)
        assert missing.value.field == "model"
    for repo, name in (("huihui_ai/x", "registry.ollama.ai/huihui_ai/x"), ("ollama/llama3.2", "llama3.2")):
        with pytest.raises(NotFound, match=f"one of Ollama's models, ask for {name}$"):
            planned(hub, repo=repo)
    assert pulled(replace(hub, token=TOKEN), repo=PRIVATE)[0].read_bytes() == Q4


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (403, SourceRefused, "who asks"),
        (429, SourceRefused, "too many requests"),
        (500, DownloadFailed, "answered 500"),
    ],
)
def test_refusals_of_the_api(server, hub, monkeypatch, status, kind, words):
    monkeypatch.setattr("localrun.models.download.huggingface.QUESTION_BASE_S", 0.001)
    server.faults.hub_answers = [(status, {})] * 20
    with pytest.raises(kind, match=words):
        planned(hub)


def test_a_hub_in_passing_trouble_is_asked_again(server, hub, monkeypatch):
    monkeypatch.setattr("localrun.models.download.huggingface.QUESTION_BASE_S", 0.001)
    server.faults.hub_answers = [(502, {}), (503, {})]
    assert planned(hub).quant == "Q4_K_M"


@pytest.mark.parametrize("ask", [planned, lambda hub: asyncio.run(huggingface.search("acme", hub=hub))])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_only_questions_of_ours_are_asked_again(server, hub, monkeypatch, ask, status):
    """huggingface_hub's own five attempts, within each of ours, kept a search waiting for more than a minute."""
    monkeypatch.setattr("localrun.models.download.huggingface.QUESTION_BASE_S", 0.001)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: pytest.fail("huggingface_hub waits"))
    server.faults.hub_answers = [(status, {})] * 20
    with pytest.raises(LocalrunError):
        ask(hub)
    assert 20 - len(server.faults.hub_answers) == (1 if status == 429 else 3)
    with pytest.raises(DownloadFailed, match="cannot be reached"):
        ask(replace(hub, endpoint="http://127.0.0.1:9"))


def test_a_token_or_an_address_that_was_copied_wrong_is_told_so(hub):
    with pytest.raises(BadRequest, match="your token has a character that no token has"):
        planned(replace(hub, token="hf_…"))
    with pytest.raises(DownloadFailed, match=r"^HF_ENDPOINT 'hub.example' cannot be reached .*missing an 'http://'"):
        planned(replace(hub, endpoint="hub.example"))


def test_a_token_is_not_shown(hub):
    logged_in = replace(hub, token=TOKEN)
    assert TOKEN not in repr(logged_in)
    assert TOKEN not in repr(planned(logged_in))


def test_no_connection(hub, monkeypatch):
    monkeypatch.setattr("localrun.models.download.huggingface.QUESTION_BASE_S", 0.001)
    with pytest.raises(DownloadFailed, match=r"cannot be reached.*HF_ENDPOINT"):
        planned(replace(hub, endpoint="http://127.0.0.1:9"))


def test_an_answer_that_is_no_hub_s(server, hub):
    server.faults.hub_answers = [(200, {"Content-Type": "text/html"})]
    with pytest.raises(DownloadFailed, match="no hub should"):
        planned(hub)


def test_a_file_name_that_leads_out_of_the_cache_writes_nothing(server, hub):
    for evil in ("../../../evil.gguf", "/etc/evil.gguf", "a\\..\\evil.gguf", "c:evil.gguf", "a/\u202e.gguf"):
        server.repositories[REPO] = Repository(REPO, {evil: Q4})
        with pytest.raises(DownloadFailed, match="nothing of it was written"):
            pulled(hub, tag=evil)
        assert not hub.cache_folder.exists()


def test_a_file_with_a_name_that_cannot_be_stored_is_in_no_other_s_way(server, hub):
    server.repositories[REPO] = Repository(REPO, {"fox: what?-Q8_0.gguf": Q8, "fox-Q4_K_M.gguf": Q4})
    assert [path.name for path in pulled(hub)] == ["fox-Q4_K_M.gguf"]


def test_a_digest_that_is_none_writes_nothing(server, hub, monkeypatch):
    for evil in ("../../evil", "a" * 63, "G" * 64, ""):
        monkeypatch.setattr(Repository, "etag", lambda self, path, evil=evil: evil)
        with pytest.raises(DownloadFailed, match=r"digest|no hub"):
            pulled(hub)
        assert not hub.cache_folder.exists()


def test_a_commit_that_is_none_writes_nothing(server, hub, monkeypatch):
    monkeypatch.setattr(Repository, "commit", property(lambda self: "../../evil"))
    with pytest.raises(LocalrunError):
        pulled(hub)
    assert not hub.cache_folder.exists()


@pytest.mark.parametrize("repo", ["acme", "../x/y", "a/b/c", "acme/fox--x", "acme/.."])
def test_a_name_that_no_repository_has(hub, repo):
    with pytest.raises((DownloadFailed, BadRequest)):
        planned(hub, repo=repo)


def test_wrong_content_is_not_linked(server, hub):
    server.faults.flip_byte_at = 100
    with pytest.raises(DownloadFailed, match="sha256"):
        pulled(hub)
    # The parts of the file that was not verified yet stay for the next pull; neither has a final name.
    for left in find_stale([hub.cache_folder], now_s=time.time(), min_age_s=0):
        remove_stale(left)
    assert [name for name in everything_in(hub.cache_folder) if not name.startswith(".locks")] == []


def test_offline_the_cache_is_all_there_is(server, hub):
    online = pulled(hub)
    server.record.clear()
    offline = replace(hub, is_offline=True, endpoint="http://127.0.0.1:9")
    plan = planned(offline)
    assert downloaded(offline, plan) == online
    assert plan.files[0].stored.digest == f"sha256:{hashlib.sha256(Q4).hexdigest()}"
    assert server.record.requests == []
    shutil.rmtree(hub.cache(REPO).folder / "refs")
    assert planned(offline).files == plan.files, "a cache that was copied without its refs"
    with pytest.raises(NotFound, match="Q8_0"):
        planned(offline, tag="Q8_0")
    with pytest.raises(Unavailable, match="HF_HUB_OFFLINE is set"):
        planned(offline, repo=SHARDED)
    with pytest.raises(Unavailable, match="HF_HUB_OFFLINE is set"):
        asyncio.run(huggingface.search("fox", hub=offline))


def test_the_real_client_s_lock_is_waited_for(server, hub):
    plan = planned(hub)
    lock_path = plan.files[0].item.lock_path
    lock_path.parent.mkdir(parents=True)
    release = threading.Timer(0.6, lambda: None)
    with WeakFileLock(lock_path):
        worker = threading.Thread(target=lambda: downloaded(hub, plan))
        worker.start()
        release.start()
        release.join()
        assert worker.is_alive()
        assert not plan.files[0].item.target.exists()
    worker.join(30)
    assert plan.files[0].item.target.read_bytes() == Q4


def test_the_real_client_waits_for_our_lock(server, hub):
    server.faults.bytes_per_s = 200_000
    plan = planned(hub)
    ours = threading.Thread(target=lambda: downloaded(hub, plan))
    ours.start()
    partial_path = plan.files[0].item.target.with_name(plan.files[0].item.target.name + ".localrun-partial")
    while not partial_path.exists():
        assert ours.is_alive()
    path = theirs(hub, "fox-Q4_K_M.gguf")
    ours.join(30)
    assert Path(path).read_bytes() == Q4
    assert server.record.content_bytes == len(Q4)


def test_search(server, hub):
    hits = asyncio.run(huggingface.search("acme", hub=hub, limit=10))
    assert [hit.repo for hit in hits][:2] == [SHARDED, REPO]
    assert "acme/Weights" not in {hit.repo for hit in hits}
    fox = next(hit for hit in hits if hit.repo == REPO)
    assert (fox.n_downloads, fox.n_likes, fox.licence, fox.is_gated) == (1000, 7, "apache-2.0", False)
    assert fox.updated_at is not None
    assert next(hit for hit in hits if hit.repo == GATED).is_gated
    assert len(asyncio.run(huggingface.search("", hub=hub, limit=1))) == 1
    assert asyncio.run(huggingface.search("giraffe", hub=hub)) == []


def test_the_environment_is_read_as_the_real_client_reads_it(tmp_path):
    program = (
        "from localrun.models.download import huggingface as h; hub = h.Hub.from_environment(); print(hub, hub.token)"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": "http://mirror.example/",
        "HF_HOME": str(tmp_path),
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("HF_HUB_CACHE", None)
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    ).stdout
    for part in ("'http://mirror.example'", TOKEN, str(tmp_path / "hub"), "is_offline=True"):
        assert part in said


@pytest.fixture
def hanging() -> Iterator[HangingHub]:
    with HangingHub() as hub:
        yield hub


def test_questions_that_hang_keep_nobody_else_waiting(hanging, tmp_path):
    hub = huggingface.Hub(endpoint=hanging.endpoint, token=None, cache_folder=tmp_path)

    async def run() -> None:
        searches = [asyncio.create_task(huggingface.search("fox", hub=hub)) for _ in range(40)]
        await until(lambda: len(hanging.connections) == MAX_AT_ONCE)
        assert await asyncio.to_thread(str, 1) == "1"
        assert not any(search.done() for search in searches)
        assert len(hanging.connections) == MAX_AT_ONCE, "the others wait for their turn"
        for search in searches:
            search.cancel()

    asyncio.run(run())  # returns although the hub's threads still wait
    assert sum(thread.name == "hub" for thread in threading.enumerate()) == MAX_AT_ONCE


def test_a_question_whose_asker_has_left_is_not_asked_again(hanging, tmp_path):
    hub = huggingface.Hub(endpoint=hanging.endpoint, token=None, cache_folder=tmp_path)

    async def run() -> None:
        search = asyncio.create_task(huggingface.search("fox", hub=hub))
        await until(lambda: bool(hanging.connections))
        search.cancel()
        await asyncio.wait([search])
        hanging.connections[0].close()  # which huggingface_hub takes for a reason to try again
        await until(lambda: not any(thread.name == "hub" for thread in {*threading.enumerate()} - before))
        assert len(hanging.connections) == 1
        searches = [asyncio.create_task(huggingface.search("fox", hub=hub)) for _ in range(MAX_AT_ONCE)]
        await until(lambda: len(hanging.connections) == 1 + MAX_AT_ONCE)  # its place is free again
        for search in searches:
            search.cancel()

    before = {*threading.enumerate()}
    asyncio.run(run())


def test_the_hub_is_not_waited_for_for_ever(hanging, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_module, "ANSWER_TIMEOUT_S", 0.05)
    hub = huggingface.Hub(endpoint=hanging.endpoint, token=None, cache_folder=tmp_path)

    async def run() -> None:
        search = asyncio.create_task(huggingface.search("fox", hub=hub))
        await until(lambda: len(hanging.connections) == 2)
        search.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("ask", [planned, lambda hub: asyncio.run(huggingface.search("acme", hub=hub))])
def test_no_network_is_said_without_the_system_s_numbers(hub, monkeypatch, ask):
    monkeypatch.setattr("localrun.models.download.huggingface.QUESTION_BASE_S", 0.001)

    def nobody(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    with pytest.raises(DownloadFailed, match="its name is not known here, as without an internet connection") as raised:
        ask(replace(hub, endpoint="http://hub.example"))
    assert "Errno" not in raised.value.message
