"""Faults 32 to 39: names, digests and addresses from others, files that are none, kills, and disks that refuse.

Each is made to a daemon of its own processes, with a registry and a hub on loopback.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from localrun.config import in_short
from localrun.models.storage import manifest
from tests.daemon import Daemon, running_daemon
from tests.depth import DEPTH
from tests.faults.injection import Injected
from tests.faults.postcondition import check_store, models_folder, unharmed
from tests.hub.repository import Repository
from tests.hub.server import TOKEN, Hub
from tests.models.handmade import VALID
from tests.registry import Layer, Registry
from tests.support.synthesis.synthesize import synthesize

RESUMABLE = (".localrun-partial", ".localrun-journal", ".lock")
REPO = "acme/Fox-GGUF"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("models") / "fox.gguf"
    synthesize("tiny", "Q4_0", path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def hub(gguf: bytes) -> Iterator[Hub]:
    with Hub(Repository(REPO, {"fox-Q4_K_M.gguf": gguf})) as running:
        yield running


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as running:
        yield running


# Nobody waits between two attempts.
HASTY = {"localrun__models__download__item__FetchLimits": {"backoff_cap_s": 0.01, "stall_s": 5.0}}


@pytest.fixture(scope="module")
def daemon(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    hasty = Injected(tmp_path_factory.mktemp("faults"), **HASTY)
    with running_daemon(HF_ENDPOINT=hub.endpoint, **hasty.environment) as running:
        yield running


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def names(daemon: Daemon) -> set[str]:
    return {in_short(row["name"]) for row in daemon.http.get("/api/tags").json()["models"]}


def files(daemon: Daemon) -> set[str]:
    """Every file of the models folder and of the hub's cache, and what leads out of it."""
    roots = (models_folder(daemon.home), daemon.home / "huggingface")
    return {str(path) for root in roots for path in root.rglob("*") if path.is_symlink() or not path.is_dir()}


def pull(daemon: Daemon, name: str) -> httpx2.Response:
    return daemon.post("/api/pull", model=name, stream=False)


def upload(daemon: Daemon, content: bytes) -> httpx2.Response:
    return daemon.http.post(f"/api/blobs/{digest_of(content)}", content=content)


def create(daemon: Daemon, name: str, content: bytes, system: str) -> httpx2.Response:
    body = {"model": name, "files": {"fox.gguf": digest_of(content)}, "system": system, "stream": False}
    return daemon.post("/api/create", body)


def delete(daemon: Daemon, name: str) -> httpx2.Response:
    return daemon.http.request("DELETE", "/api/delete", json={"model": name})


def is_refused(response: httpx2.Response, *statuses: int) -> bool:
    """Whether the answer is an error in words, of one of these statuses."""
    return response.status_code in statuses and isinstance(response.json()["error"], str)


# --- 32, 33: names and digests ---------------------------------------------------------------------------------------

BAD_NAMES = ["../x", "/etc/passwd", "%2e%2e/x", "a\0b", "CON", "x/../y", "a\\b", "tinу", "n" * 5_000, "..", "\u202ex"]


def test_fault_32_names_that_could_leave_the_folder(daemon: Daemon) -> None:
    with unharmed(daemon):
        before = files(daemon)
        for name in BAD_NAMES:
            asked = {
                "pull": pull(daemon, name),
                "show": daemon.post("/api/show", model=name),
                "create": create(daemon, name, VALID, ""),
                "copy": daemon.post("/api/copy", source="tiny", destination=name),
                "delete": delete(daemon, name),
                "generate": daemon.post("/api/generate", model=name, prompt="x"),
                "chat": daemon.post("/v1/chat/completions", model=name, messages=[{"role": "user", "content": "x"}]),
            }
            for what, response in asked.items():
                assert response.status_code == 400, (what, name, response.text)
            assert files(daemon) == before, name


def test_fault_32_twins_that_differ_in_case_are_one_model(daemon: Daemon) -> None:
    with unharmed(daemon):
        for name in ("Fox:Q4", "FOX:q4", "fox:q4"):
            assert daemon.post("/api/copy", source="tiny", destination=name).status_code == 200
        assert len([name for name in names(daemon) if name.lower() == "fox:q4"]) == 1
        assert delete(daemon, "fOX:Q4").status_code == 200
        assert names(daemon) == {"tiny"}


BAD_DIGESTS = [
    *("sha256:../../../../x", "../x", "/etc/passwd", "sha256:" + "a" * 63, "sha256:" + "a" * 64 + "/../x"),
    *("sha512:" + "a" * 64, "sha256:" + "A" * 63 + "\0", "sha256:" + "a" * 63 + "é"),
]


def test_fault_33_digests_that_are_none_are_written_nowhere(daemon: Daemon, registry: Registry) -> None:
    with unharmed(daemon):
        before = files(daemon)
        for digest in BAD_DIGESTS:
            layer = {"mediaType": "application/vnd.ollama.image.model", "digest": digest, "size": 10}
            assert is_refused(pull(daemon, registry.add_manifest("library/evil", {"layers": [layer]})), 502)
            assert is_refused(create_from(daemon, digest), 400)
            # What a router takes for another path is no route.
            assert upload_to(daemon, digest).status_code in (400, 404, 405)
            assert files(daemon) == before, digest
        assert registry.asked_for("/blobs/") == 0


def create_from(daemon: Daemon, digest: str) -> httpx2.Response:
    return daemon.post("/api/create", model="evil", files={"fox.gguf": digest}, stream=False)


def upload_to(daemon: Daemon, digest: str) -> httpx2.Response:
    return daemon.http.post(f"/api/blobs/{digest.replace(chr(0), '%00')}", content=b"GGUF")


# --- 34: addresses ---------------------------------------------------------------------------------------------------


def test_fault_34_a_server_that_sends_us_elsewhere(daemon: Daemon, registry: Registry, hub: Hub) -> None:
    """To where clouds hand out credentials, to files, in circles: refused in words, and nothing is written."""
    name = registry.add("library/fox", Layer("model", VALID))
    places = ["http://169.254.169.254/latest/meta-data/", "file:///etc/passwd", "//[fe80::1]/x", "http://0.0.0.0/x",
              "ftp://127.0.0.1/x", f"http://{registry.host}/v2/library/fox/manifests/latest"]  # fmt: skip
    with unharmed(daemon, may_leave=(".lock",)):
        before = files(daemon)
        for registry.location in places:
            assert is_refused(pull(daemon, name), 502), registry.location
            assert files(daemon) == before
        registry.location = ""
        for named in ("169.254.169.254/library/x", "169.254.169.254:80/library/x"):
            assert is_refused(pull(daemon, named), 502), named
        hub.faults.storage_answers = [(302, {"Location": "http://169.254.169.254/x"})] * 20
        refused = pull(daemon, REPO)
        hub.faults.storage_answers = []
        assert is_refused(refused, 502)
        assert "169.254.169.254" in refused.text
        # The hub's own clients keep their locks, too.
        assert {path for path in files(daemon) if not path.endswith(".lock")} == before


def test_fault_34_a_token_stays_with_its_origin(hub: Hub) -> None:
    hub.record.clear()
    with running_daemon(HF_ENDPOINT=hub.endpoint, HF_TOKEN=TOKEN) as daemon, unharmed(daemon, may_leave=(".lock",)):
        assert pull(daemon, REPO).status_code == 200
    asked = {name: hub.record.of(name) for name in ("hub", "storage")}
    assert any(TOKEN in request.headers.get("authorization", "") for request in asked["hub"])
    assert asked["storage"]
    assert not any("authorization" in request.headers for request in asked["storage"])


# --- 35: what servers send -------------------------------------------------------------------------------------------


def test_fault_35_what_is_not_the_announced_content_gets_no_name(
    daemon: Daemon, registry: Registry, gguf: bytes
) -> None:
    layer = Layer("model", gguf)
    name = registry.add("library/fox", layer)
    wrong = {"one bit": gguf[:-1] + bytes([gguf[-1] ^ 1]), "short": gguf[:-1], "long": gguf + b"x", "empty": b""}
    with unharmed(daemon):
        before = files(daemon)
        for what, content in wrong.items():
            registry.blobs[layer.digest] = content
            assert is_refused(pull(daemon, name), 502), what
            assert files(daemon) == before, what
        assert names(daemon) == {"tiny"}


@pytest.mark.parametrize(
    ("fault", "comes"),
    [
        ({"ignore_range": True}, True),
        ({"endless": True}, True),
        ({"no_length": True}, True),
        ({"drop_after": lambda n: 300_000}, True),
        ({"flip_byte_at": 1_000_000}, False),
        ({"short_by": 1}, False),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fault_35_a_storage_that_does_otherwise(
    daemon: Daemon, hub: Hub, gguf: bytes, fault: dict[str, Any], comes: bool
) -> None:
    usual = {name: getattr(hub.faults, name) for name in fault}
    with unharmed(daemon, may_leave=RESUMABLE):
        for name, value in fault.items():
            setattr(hub.faults, name, value)
        try:
            response = pull(daemon, REPO)
        finally:
            for name, value in usual.items():
                setattr(hub.faults, name, value)
        if comes:
            assert response.status_code == 200, response.text
        else:
            assert is_refused(response, 502)
            assert REPO not in names(daemon)
            assert pull(daemon, REPO).status_code == 200, "the sound file comes after all"
        (path,) = (daemon.home / "huggingface").rglob("fox-Q4_K_M.gguf")
        assert path.read_bytes() == gguf
        delete(daemon, REPO)


# --- 36: what is no file ---------------------------------------------------------------------------------------------


def test_fault_36_what_is_no_regular_file_is_refused_and_never_waited_for(daemon: Daemon, gguf: bytes) -> None:
    folder = models_folder(daemon.home)
    blobs = folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    outside = daemon.home / "outside.gguf"
    outside.write_bytes(gguf)
    made = [folder / f"{name}.gguf" for name in ("fifo", "zero", "loop", "folder", "nowhere")]
    with unharmed(daemon):
        os.mkfifo(made[0])
        made[1].symlink_to("/dev/zero")
        made[2].symlink_to(made[2].name)
        made[3].mkdir()
        made[4].symlink_to("nowhere")
        for path in made:
            asked = daemon.post("/api/generate", model=path.stem, prompt="x", stream=False)
            assert is_refused(asked, 404, 422), (path, asked.text)
            assert is_refused(daemon.post("/api/show", model=str(path)), 404, 422), path
            assert is_refused(
                daemon.post("/api/create", model="made", modelfile=f"FROM {path}", stream=False), 400, 404, 422
            )
        assert names(daemon) == {"tiny"}
        for content, put in ((b"1", os.mkfifo), (b"2", lambda path: path.symlink_to("/dev/zero"))):
            path = blobs / digest_of(content).replace(":", "-")
            put(path)
            made.append(path)
            assert is_refused(create_from(daemon, digest_of(content)), 400, 404, 422), path
            assert upload(daemon, content).status_code == 201, "it takes the place of what is none"
            assert not path.is_symlink()
            assert path.read_bytes() == content
        # A link to a file is followed, and deleting the model deletes the link alone; so with a second hard link.
        for link in (os.symlink, os.link):
            link(outside, folder / "linked.gguf")
            assert daemon.post("/api/generate", model="linked", prompt="x", stream=False).status_code == 200
            assert delete(daemon, "linked").status_code == 200
            assert outside.read_bytes() == gguf
        for path in made:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


# --- 37: kills -------------------------------------------------------------------------------------------------------


def test_fault_37_kills_during_pull_create_and_delete(
    hub: Hub, registry: Registry, gguf: bytes, tmp_path: Path
) -> None:
    """A daemon is killed while clients pull, create, copy and delete; the next one shows the old state or the new."""
    name = registry.add("library/fox", Layer("model", gguf), Layer("system", b"old"))
    home = {"LOCALRUN_HOME": str(tmp_path), "HF_HOME": str(tmp_path / "huggingface"), "HF_ENDPOINT": hub.endpoint}
    seed = int.from_bytes(os.urandom(4), "big")
    print("seed", seed)
    chance = random.Random(seed)
    for turn in range(5 * DEPTH):
        with running_daemon(**home) as daemon:
            check_store(tmp_path)
            assert {row["name"] for row in daemon.http.get("/api/tags").json()["models"]} >= {"tiny:latest"}
            work = threading.Thread(target=change_until_killed, args=(daemon, name, gguf, turn))
            work.start()
            time.sleep(chance.uniform(0, 0.3))
            daemon.stop(signal.SIGKILL)
            work.join()
    with running_daemon(**home) as daemon:
        while any(
            row["state"] in ("planning", "pulling") for row in daemon.http.get("/localrun/v1/pulls").json()["pulls"]
        ):
            time.sleep(0.05)  # what the daemon before did not finish
        with unharmed(daemon, may_leave=RESUMABLE):
            assert pull(daemon, name).status_code == 200
            change_until_killed(daemon, name, gguf, 0, n_turns=1)
            daemon.post("/localrun/v1/gc", min_age_s=0, partial_min_age_s=0)
            named = {file.digest for said in manifest.read_all(models_folder(tmp_path)).manifests.values()
                     for file in said.files}  # fmt: skip
            blobs = models_folder(tmp_path) / "blobs"
            assert {path.name.replace("-", ":") for path in blobs.iterdir()} == named
        assert check_store(tmp_path) == []


def change_until_killed(daemon: Daemon, pulled: str, gguf: bytes, first_turn: int, n_turns: int = 1_000) -> None:
    with httpx2.Client(base_url=daemon.url, timeout=60, trust_env=False) as http:
        other = Daemon(daemon.url, daemon.process, daemon.home / "log.txt")
        try:
            for turn in range(first_turn, first_turn + n_turns):
                content = gguf + bytes([turn % 3])
                http.post(f"/api/blobs/{digest_of(content)}", content=content).raise_for_status()
                create(other, "made", content, f"turn {turn}").raise_for_status()
                http.post("/api/copy", json={"source": "made", "destination": f"copied:{turn % 2}"}).raise_for_status()
                pull(other, pulled).raise_for_status()
                pull(other, REPO).raise_for_status()
                delete(other, pulled).raise_for_status()
                delete(other, REPO)
                delete(other, f"copied:{turn % 2}").raise_for_status()
        except httpx2.TransportError:
            pass
        finally:
            other.http.close()


# --- 38: disks that refuse -------------------------------------------------------------------------------------------

REFUSALS = [(errno.ENOSPC, True), (errno.EACCES, False), (errno.EIO, False)]


@pytest.mark.parametrize("shift", range(1 if DEPTH == 1 else len(REFUSALS)))
def test_fault_38_the_disk_refuses_at_each_touch(registry: Registry, tmp_path: Path, hub: Hub, shift: int) -> None:
    """The n-th touch of the disk fails, for every n until the operation succeeds: a clean error, and what was there
    before is there after it. One touch is refused in one way, the next in another; with depth each in every way."""
    faults = Injected(tmp_path, **HASTY)
    other = VALID + b"another"
    from_registry = registry.add("library/fox", Layer("model", VALID + b"pulled"))
    with running_daemon(HF_ENDPOINT=hub.endpoint, **faults.environment) as daemon:
        root = str(models_folder(daemon.home))

        def shown() -> str:
            return str(daemon.post("/api/show", model="old").json()["system"])

        def copied(name: str) -> httpx2.Response:
            return daemon.post("/api/copy", source="old", destination=name)

        def cleaned() -> object:
            return daemon.post("/localrun/v1/gc", min_age_s=0, partial_min_age_s=0)

        # What is done, and what comes before it: each of them finds the same.
        steps: dict[str, tuple[Callable[[], httpx2.Response], Callable[[], object]]] = {
            "upload": (lambda: upload(daemon, other), cleaned),
            "create": (
                lambda: create(daemon, "made", other, ""),
                lambda: (delete(daemon, "made"), upload(daemon, other)),
            ),
            "copy": (lambda: copied("copied"), lambda: delete(daemon, "copied")),
            "replace": (lambda: create(daemon, "old", VALID, "new"), lambda: create(daemon, "old", VALID, "as it was")),
            "pull": (lambda: pull(daemon, from_registry), lambda: (delete(daemon, from_registry), cleaned())),
            "delete": (lambda: delete(daemon, "deleted"), lambda: copied("deleted")),
        }
        upload(daemon, VALID).raise_for_status()
        with unharmed(daemon):
            create(daemon, "old", VALID, "as it was").raise_for_status()
            for what, (step, prepare) in steps.items():
                for n in range(1, 100):
                    prepare()
                    before, system = names(daemon), shown()
                    number, lasts = REFUSALS[(n + shift) % len(REFUSALS)]
                    faults.plan(what="disk", root=root, at=n, errno=number, lasts=lasts)
                    response = step()
                    faults.end()
                    assert check_store(daemon.home) == [], (what, n)
                    if response.status_code >= 400:
                        assert faults.n_met, (what, n, response.text)
                        assert is_refused(response, 500, 502, 507), (what, n, response.text)
                        assert os.strerror(number) in response.text or response.status_code == 507, (what, n)
                        assert (names(daemon), shown()) == (before, system), (what, n)
                    elif not faults.n_met:
                        break
                else:
                    pytest.fail(f"{what} touches the disk a hundred times")
            assert shown() == "new"
            for name in (*steps, "old", "made", "copied", from_registry):
                delete(daemon, name)


in_a_namespace = pytest.mark.skipif(
    not (hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("unshare"))
    or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="mounting a small or read-only disk takes root and mount namespaces",
)


def on_a_disk(options: str, folder: Path) -> tuple[str, ...]:
    """What runs a program with a file system of its own at `folder`."""
    return ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {options} none "{folder}" && exec "$@"', "sh")


@in_a_namespace
def test_fault_38_a_full_disk(registry: Registry, gguf: bytes, tmp_path: Path) -> None:
    """Everything of the program is on a disk with room for one model and a half."""
    name = registry.add("library/fox", Layer("model", gguf))
    wrapped = on_a_disk(f"size={len(gguf) * 3 // 2}", tmp_path)
    with (
        running_daemon(within=wrapped, LOCALRUN_HOME=str(tmp_path / "home"), HF_HOME=str(tmp_path / "hf")) as daemon,
        unharmed(daemon),
    ):
        for _ in range(3):
            refused = pull(daemon, name)
            assert is_refused(refused, 507), refused.text
            assert upload(daemon, gguf).status_code == 507
            assert "GB are" in refused.text
        assert daemon.post("/api/copy", source="tiny", destination="copied").status_code == 200
        assert names(daemon) == {"tiny", "copied"}


@in_a_namespace
def test_fault_38_a_read_only_disk(registry: Registry, gguf: bytes, tmp_path: Path) -> None:
    name = registry.add("library/fox", Layer("model", gguf))
    wrapped = on_a_disk("ro", tmp_path)
    with (
        running_daemon(within=wrapped, LOCALRUN_HOME=str(tmp_path / "home"), HF_HOME=str(tmp_path / "hf")) as daemon,
        unharmed(daemon),
    ):
        for response in (
            pull(daemon, name),
            upload(daemon, gguf),
            daemon.post("/api/copy", source="tiny", destination="copied"),
        ):
            assert is_refused(response, 500, 502, 507), response.text
            assert "read-only" in response.text.lower()
        assert names(daemon) == {"tiny"}


# --- 39: two at once -------------------------------------------------------------------------------------------------


def test_fault_39_pulls_of_one_model_are_one_download(daemon: Daemon, registry: Registry, gguf: bytes) -> None:
    name = registry.add("library/fox", Layer("model", gguf))
    registry.bytes_per_s = 2_000_000
    with unharmed(daemon):
        with ThreadPoolExecutor(4) as several:
            asked = list(several.map(lambda _: post_alone(daemon, "/api/pull", model=name, stream=False), range(4)))
        assert {response.status_code for response in asked} == {200}
        # The first bytes are looked at before the rest comes.
        assert registry.content_bytes < len(gguf) * 3 // 2
        assert delete(daemon, name).status_code == 200


def test_fault_39_a_model_that_is_deleted_while_it_loads_is_served_or_gone(daemon: Daemon, gguf: bytes) -> None:
    with unharmed(daemon):
        for turn in range(4 * DEPTH):
            upload(daemon, gguf).raise_for_status()
            create(daemon, "made", gguf, f"turn {turn}").raise_for_status()
            with ThreadPoolExecutor(2) as two:
                answer = two.submit(post_alone, daemon, "/api/generate", model="made", prompt="x", stream=False)
                gone = two.submit(delete_alone, daemon, "made")
                assert answer.result().status_code in (200, 404, 409, 422), answer.result().text
                assert gone.result().status_code in (200, 409), gone.result().text
            if gone.result().status_code == 409:
                assert delete(daemon, "made").status_code == 200
            assert names(daemon) == {"tiny"}


def post_alone(daemon: Daemon, path: str, **fields: Any) -> httpx2.Response:
    return httpx2.post(f"{daemon.url}{path}", json=fields, timeout=60, trust_env=False)


def delete_alone(daemon: Daemon, name: str) -> httpx2.Response:
    return httpx2.request("DELETE", f"{daemon.url}/api/delete", json={"model": name}, timeout=60, trust_env=False)
