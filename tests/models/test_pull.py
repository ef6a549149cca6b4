"""Pulling from a loopback registry and a loopback hub: what comes to be here, and what never does."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import hf_hub_download

from localrun.errors import (
    BadModelFile,
    BadRequest,
    DigestMismatch,
    DownloadFailed,
    LocalrunError,
    ModelNotFound,
    NotFound,
    SourceRefused,
)
from localrun.models import builtin, naming, pull
from localrun.models.download import huggingface, ollama
from localrun.models.download.fetch import new_client
from localrun.models.download.huggingface import Hub
from localrun.models.download.plan import FetchLimits, Item, RemotePlan
from localrun.models.storage.manifest import Place, Role
from localrun.models.storage.store import Store
from tests.hub.repository import Repository
from tests.hub.server import Hub as LoopbackHub
from tests.models.handmade import STRING, U32, entry, file_bytes, text, u32
from tests.models.test_shards import N_SHARDS, shard
from tests.registry import Layer, Registry

GGUF = builtin.model_path().read_bytes() if builtin.model_path().is_file() else b""
LIMITS = FetchLimits(backoff_base_s=0.01, backoff_cap_s=0.02, retries=3)

pytestmark = pytest.mark.skipif(not GGUF, reason="the built-in model's file is not there")


class Seen:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.statuses: list[str] = []
        self.plan: RemotePlan | None = None
        self.bytes: dict[str, list[int]] = {}

    def status(self, text: str) -> None:
        self.statuses.append(text)

    def planned(self, plan: RemotePlan) -> None:
        self.plan = plan

    def advanced(self, item: Item, n_bytes_done: int) -> None:
        assert self.plan is not None
        self.bytes.setdefault(item.name, []).append(n_bytes_done)

    def verifying(self, item: Item) -> None:
        """Not looked at."""


class Machine:
    """A store, and `pull` into it."""

    def __init__(self, folder: Path, endpoint: str = "http://127.0.0.1:9") -> None:
        self.folder = folder
        self.hub = Hub(endpoint=endpoint, token=None, cache_folder=folder / "hub")
        self.store = Store(folder / "models", hub_cache_folder=folder / "hub")
        self.seen = Seen()

    def pull(self, name: str, **options: Any) -> pull.Manifest:
        async def run() -> pull.Manifest:
            async with new_client() as client:
                context = pull.PullContext(
                    store=self.store, hub=self.hub, client=client, limits=LIMITS, memory_bytes=16_000_000_000
                )
                self.seen = Seen()
                return await pull.pull(name, context=context, observer=self.seen, **options)

        return asyncio.run(run())

    def all_files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def registry():
    with Registry() as running:
        yield running


# --- registries ----------------------------------------------------------------------------------------------------


def test_a_registry_s_model_comes_with_all_that_belongs_to_it(machine: Machine, registry: Registry):
    name = registry.add(
        "library/fox",
        Layer("model", GGUF),
        Layer("template", b"{{ .Prompt }}"),
        Layer("system", b"Du bist ein Fuchs."),
        Layer(
            "params", b'{"temperature": 0.5, "stop": ["<a>", "<b>"], "num_gqa": 8, "top_k": "many", "use_mmap": true}'
        ),
        Layer("license", b"First licence"),
        Layer("license", b"Second licence"),
        Layer("messages", b'[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yip"}]'),
        tag="8b",
    )
    said = machine.pull(name)
    model = machine.store.resolve(name)
    assert model.name == name
    assert model.path.read_bytes() == GGUF
    assert model.path.name == f"sha256-{hashlib.sha256(GGUF).hexdigest()}"
    assert dict(model.parameters) == {"temperature": 0.5, "stop": ["<a>", "<b>"], "use_mmap": True}
    assert (model.system, said.licence_text) == ("Du bist ein Fuchs.", "First licence\n\nSecond licence")
    assert [(message.role, message.content) for message in model.messages] == [("user", "Hi"), ("assistant", "Yip")]
    assert model.template == model.header.chat_template
    assert model.source.kind == "registry"
    assert machine.seen.statuses == ["pulling manifest", "verifying sha256 digest", "writing manifest", "success"]
    (counts,) = machine.seen.bytes.values()
    assert counts == sorted(counts)
    assert counts[-1] == len(GGUF)


def test_a_tag_that_only_begins_like_one_of_the_catalogue_is_asked_of_ollama_s_registry(
    machine: Machine, registry: Registry, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pull, "OLLAMA_HOST", registry.host)
    registry.add("library/qwen3", Layer("model", GGUF), tag="4b-instruct")
    assert machine.pull("qwen3:4b-instruct").source.kind == "registry"
    assert machine.store.resolve("qwen3:4b-instruct").path.read_bytes() == GGUF


def test_a_second_pull_transfers_nothing_and_a_new_version_replaces_the_old(machine: Machine, registry: Registry):
    name = registry.add("library/fox", Layer("model", GGUF), Layer("system", b"old"))
    machine.pull(name)
    before = registry.content_bytes
    machine.pull(name)
    assert registry.content_bytes - before < 1000
    registry.add("library/fox", Layer("model", GGUF), Layer("system", b"new"))
    machine.pull(name)
    assert machine.store.resolve(name).system == "new"


def test_a_broken_line_is_resumed(machine: Machine, registry: Registry):
    name = registry.add("library/fox", Layer("model", GGUF))
    registry.drop_after = 3_000_000
    machine.pull(name)
    assert machine.store.resolve(name).path.read_bytes() == GGUF
    assert registry.content_bytes < len(GGUF) + 1_000_000


GOOD = {"mediaType": "application/vnd.ollama.image.model", "digest": Layer("model", GGUF).digest, "size": len(GGUF)}


@pytest.mark.parametrize(
    "manifest",
    [
        {"layers": [GOOD | {"digest": "sha256:../../../../evil"}]},
        {"layers": [GOOD | {"digest": "../evil"}]},
        {"layers": [GOOD | {"digest": "/etc/passwd"}]},
        {"layers": [GOOD | {"digest": "sha256:" + "a" * 63}]},
        {"layers": [GOOD | {"digest": "sha256:" + "a" * 64 + "/../x"}]},
        {"layers": [GOOD | {"digest": "sha256:" + "a" * 63 + "\0"}]},
        {"layers": [GOOD | {"digest": "sha512:" + "a" * 64}]},
        {"layers": [GOOD | {"digest": 5}]},
        {"layers": [GOOD | {"size": -1}]},
        {"layers": [GOOD | {"size": 1 << 60}]},
        {"layers": [GOOD, GOOD | {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:.."}]},
        {"layers": [GOOD, GOOD]},
        {"layers": [GOOD, GOOD | {"mediaType": "application/vnd.ollama.image.tensor", "name": "../../x"}]},
        {"layers": [GOOD | {"mediaType": "application/vnd.ollama.image.params"}]},
        {"layers": [GOOD | {"mediaType": "application/vnd.ollama.image.tensor"}] * 3},
        {"layers": [GOOD] * 1000},
        {"layers": []},
        {"layers": "all of them"},
        {},
        [],
        b"",
        b"\xff\xfe",
        b"<html>log in</html>",
        b'{"layers": [' * 50_000,
        b" " * 2_000_000,
    ],
    ids=lambda manifest: str(manifest)[:60],
)
def test_a_hostile_manifest_writes_nothing(machine: Machine, registry: Registry, manifest: Any):
    registry.blobs[GOOD["digest"]] = GGUF  # type: ignore[index]
    name = registry.add_manifest("library/evil", manifest)
    with pytest.raises(DownloadFailed):
        machine.pull(name)
    assert machine.all_files() == []
    assert registry.asked_for("/storage/") <= 1


def test_small_layers_are_bounded_and_verified(machine: Machine, registry: Registry):
    layer = Layer("system", b"be good")
    name = registry.add("library/fox", Layer("model", GGUF), layer)
    registry.blobs[layer.digest] = b"be evil"
    with pytest.raises(DownloadFailed, match="does not have its digest"):
        machine.pull(name)
    registry.blobs[layer.digest] = b"x" * 3_000_000
    with pytest.raises(DownloadFailed, match="more than 1048576 bytes"):
        machine.pull(name)
    name = registry.add("library/fox", Layer("model", GGUF), Layer("params", b'["no object"]'))
    with pytest.raises(DownloadFailed, match="parameters"):
        machine.pull(name)
    assert machine.all_files() == []


def test_a_file_with_another_content_gets_no_name(machine: Machine, registry: Registry):
    layer = Layer("model", GGUF)
    name = registry.add("library/fox", layer)
    registry.blobs[layer.digest] = GGUF[:-1] + bytes([GGUF[-1] ^ 1])
    with pytest.raises(DigestMismatch):
        machine.pull(name)
    assert machine.all_files() == []


def test_what_is_no_model_leaves_the_old_one_in_place(machine: Machine, registry: Registry):
    name = registry.add("library/fox", Layer("model", GGUF))
    machine.pull(name)
    registry.add("library/fox", Layer("model", b"GGUF but not really" * 100))
    with pytest.raises(BadModelFile):
        machine.pull(name)
    assert machine.store.resolve(name).path.read_bytes() == GGUF


def test_a_registry_s_refusals(machine: Machine, registry: Registry, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ModelNotFound, match="localrun search"):
        machine.pull(f"{registry.host}/library/nothing")
    registry.statuses = [401]
    with pytest.raises(SourceRefused, match="private") as refused:
        machine.pull(f"{registry.host}/library/nothing")
    assert "body of a refusal" not in refused.value.message
    for status, said in ((400, "HF_ENDPOINT to it and pull library/nothing$"), (412, "a newer Ollama alone")):
        registry.statuses = [status]
        with pytest.raises(SourceRefused, match=said):
            machine.pull(f"{registry.host}/library/nothing")
    monkeypatch.setattr(ollama, "BACKOFF_S", 0.001)
    for status, said in (
        (429, "has had too many requests from here"),
        (503, "answered with status 503; pull again"),
    ):
        registry.statuses = [status] * ollama.ATTEMPTS
        with pytest.raises(DownloadFailed, match=said):
            machine.pull(f"{registry.host}/library/nothing")
    registry.statuses = [500, 503]
    name = registry.add("library/fox", Layer("model", GGUF))
    assert machine.pull(name).name == name


# --- what no engine here can load ----------------------------------------------------------------------------------


def unloadable(architecture: str, *more: bytes) -> bytes:
    """A file of some megabytes that begins like a model of that architecture."""
    begins = (entry("general.architecture", STRING, text(architecture)), *more)
    return file_bytes(begins) + bytes(5_000_000)


@pytest.mark.parametrize(
    ("content", "said", "way_out"),
    [
        (unloadable("gptoss"), "'gptoss'", "localrun pull gpt-oss:20b"),
        (
            unloadable("gpt-oss", entry("gpt-oss.vision.block_count", U32, u32(9))),
            "vision encoder",
            "localrun pull gpt-",
        ),
    ],
)
def test_a_registry_s_model_for_ollama_s_own_engine_is_refused_before_the_transfer(
    machine: Machine, registry: Registry, content: bytes, said: str, way_out: str
):
    name = registry.add("library/gpt-oss", Layer("model", content), tag="20b")
    with pytest.raises(BadModelFile) as refused:
        machine.pull(name)
    assert said in refused.value.message
    assert "nothing was transferred" in refused.value.message
    assert way_out in refused.value.message
    assert registry.content_bytes < 500_000
    assert machine.all_files() == []


@pytest.mark.parametrize("ignores_range", [False, True])
def test_a_repository_s_model_of_an_unknown_architecture_is_refused_before_the_transfer(
    tmp_path: Path, ignores_range: bool
):
    repository = Repository("org/future-GGUF", {"future-Q4_K_M.gguf": unloadable("future-1")})
    with LoopbackHub(repository) as hub:
        hub.faults.ignore_range = ignores_range
        machine = Machine(tmp_path, hub.endpoint)
        with pytest.raises(BadModelFile, match=r"'future-1'.*llama\.cpp.*localrun search future"):
            machine.pull("org/future-GGUF")
        if not ignores_range:
            assert hub.record.requested_bytes <= pull.FIRST_BYTES
    assert machine.all_files() == []


def test_the_transfer_decides_where_the_first_bytes_cannot_be_had(tmp_path: Path):
    files = {"tiny-Q8_0.gguf": GGUF, "late-Q4_0.gguf": unloadable("future-1")}
    with LoopbackHub(Repository("org/two-GGUF", files)) as hub:
        machine = Machine(tmp_path, hub.endpoint)
        hub.faults.storage_answers = [(503, {})]
        machine.pull("org/two-GGUF:Q8_0")
        assert machine.store.resolve("org/two-GGUF:Q8_0").path.read_bytes() == GGUF
        hub.faults.storage_answers = [(503, {})]
        with pytest.raises(BadModelFile):
            machine.pull("org/two-GGUF:Q4_0")
        assert [model.name for model in machine.store.list()] == ["tiny", "org/two-GGUF:Q8_0"]


@pytest.mark.parametrize("name", ["tiny", "./model.gguf", "/tmp/model.gguf", "a/b/c/d", "../x", "x\0y", "con/x"])
def test_what_cannot_be_pulled_is_a_bad_request(machine: Machine, name: str):
    with pytest.raises(BadRequest):
        machine.pull(name)
    assert machine.all_files() == []


# --- the hub -------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub():
    small = {"Qwen3-0.6B-Q4_K_M.gguf": b"GGUF4" + GGUF, "Qwen3-0.6B-Q8_0.gguf": GGUF}
    shards = {f"Q8_0/big-Q8_0-0000{number + 1}-of-00003.gguf": shard(number) for number in range(N_SHARDS)}
    projector = file_bytes((entry("general.architecture", STRING, text("clip")),))
    with LoopbackHub(
        Repository("unsloth/Qwen3-0.6B-GGUF", small),
        Repository("org/evil", {"model-Q4_0.gguf": b"GGUF" * 1000}),
        Repository("org/big", {**shards, "mmproj-F16.gguf": projector, "README.md": b"# Big"}),
    ) as running:
        yield running


def test_a_catalogue_name_comes_from_its_repository(tmp_path: Path, hub: LoopbackHub):
    machine = Machine(tmp_path, hub.endpoint)
    said = machine.pull("qwen3:0.6b")
    assert [(file.role, file.place) for file in said.files] == [(Role.MODEL, Place.HUB)]
    assert said.source.repo == "unsloth/Qwen3-0.6B-GGUF"
    assert any("Q8_0" in status and "half" in status for status in machine.seen.statuses)
    model = machine.store.resolve("qwen3:0.6b")
    assert (model.name, model.path.read_bytes()) == ("qwen3:0.6b", GGUF)
    assert "models--unsloth--Qwen3-0.6B-GGUF" in str(model.path)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3:0.6b-q8_0",
        "unsloth/Qwen3-0.6B-GGUF:Q8_0",
        "hf.co/unsloth/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf",
        "https://huggingface.co/unsloth/Qwen3-0.6B-GGUF@main:q8_0",
    ],
)
def test_every_spelling_finds_the_same_file(tmp_path: Path, hub: LoopbackHub, name: str):
    machine = Machine(tmp_path, hub.endpoint)
    machine.pull(name)
    assert machine.store.resolve(name).path.read_bytes() == GGUF
    assert [model.path.name for model in machine.store.list() if model.name != "tiny"] == ["Qwen3-0.6B-Q8_0.gguf"]
    shown = next(model.name for model in machine.store.list() if model.name != "tiny")
    assert machine.store.resolve(shown).path.read_bytes() == GGUF


def test_all_shards_come_along_and_a_broken_projector_does_not(tmp_path: Path, hub: LoopbackHub):
    machine = Machine(tmp_path, hub.endpoint)
    said = machine.pull("org/big:Q8_0")
    assert [file.role for file in said.files] == [Role.MODEL] * N_SHARDS
    model = machine.store.resolve("org/big:Q8_0")
    assert model.path.name == "big-Q8_0-00001-of-00003.gguf"
    assert len(model.header.shard_paths) == N_SHARDS
    assert not any("mmproj" in path for path in machine.all_files())
    assert model.size_bytes == sum(file.size_bytes for file in said.files)


def theirs(machine: Machine, file: str) -> Path:
    """What huggingface_hub downloads into the same cache."""
    options = {"endpoint": machine.hub.endpoint, "cache_dir": machine.hub.cache_folder, "token": False}
    return Path(hf_hub_download("unsloth/Qwen3-0.6B-GGUF", file, **options))


def test_a_file_that_another_program_fetched_outlives_every_name(tmp_path: Path, hub: LoopbackHub):
    machine = Machine(tmp_path, hub.endpoint)
    path = theirs(machine, "Qwen3-0.6B-Q8_0.gguf")
    for name in ("qwen3:0.6b-q8_0", "unsloth/Qwen3-0.6B-GGUF:Q8_0", "qwen3:0.6b-q8_0"):
        assert [file.adopted for file in machine.pull(name).files] == [True]
    for name in ("qwen3:0.6b-q8_0", "unsloth/Qwen3-0.6B-GGUF:Q8_0"):
        removed = naming.remove(machine.store, name)
        assert (removed.freed_bytes, len(removed.kept)) == (0, 1)
    assert path.read_bytes() == GGUF


def test_a_file_that_a_pull_brought_goes_with_its_last_name(tmp_path: Path, hub: LoopbackHub):
    machine = Machine(tmp_path, hub.endpoint)
    for name in ("qwen3:0.6b-q8_0", "unsloth/Qwen3-0.6B-GGUF:Q8_0", "qwen3:0.6b-q8_0"):
        assert [file.adopted for file in machine.pull(name).files] == [False]
    theirs(machine, "Qwen3-0.6B-Q4_K_M.gguf")
    assert naming.remove(machine.store, "qwen3:0.6b-q8_0").freed_bytes == 0
    assert naming.remove(machine.store, "unsloth/Qwen3-0.6B-GGUF:Q8_0").freed_bytes == len(GGUF)
    assert [path.name for path in machine.hub.cache_folder.rglob("*.gguf")] == ["Qwen3-0.6B-Q4_K_M.gguf"]


def test_a_model_has_one_id_whoever_brought_its_file(tmp_path: Path, hub: LoopbackHub):
    fetched, found = (Machine(tmp_path / each, hub.endpoint) for each in ("fetched", "found"))
    theirs(found, "Qwen3-0.6B-Q8_0.gguf")
    ids = []
    for machine in (fetched, found):
        machine.pull("qwen3:0.6b-q8_0")
        ids.append(machine.store.resolve("qwen3:0.6b-q8_0").digest)
    assert ids[0] == ids[1]


def test_what_a_pull_found_is_not_removed_before_it_has_named_it(
    tmp_path: Path, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
):
    machine = Machine(tmp_path, hub.endpoint)
    machine.pull("qwen3:0.6b-q8_0")
    fetch = huggingface.download

    async def removed_meanwhile(*arguments: Any, **options: Any) -> Any:
        paths = await fetch(*arguments, **options)
        removed = naming.remove(machine.store, "qwen3:0.6b-q8_0")
        assert len(removed.kept) == 1
        return paths

    monkeypatch.setattr(huggingface, "download", removed_meanwhile)
    other = machine.pull("unsloth/Qwen3-0.6B-GGUF:Q8_0").name
    assert machine.store.resolve(other).path.read_bytes() == GGUF
    assert naming.remove(machine.store, other).freed_bytes == len(GGUF)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("unsloth/Qwen3-0.6B-GGUF:Q2_K", NotFound),
        ("nobody/nothing", LocalrunError),
        ("org/evil", BadModelFile),
        ("unsloth/Qwen3-0.6B-GGUF@none", NotFound),
    ],
)
def test_a_failed_pull_gives_nothing_a_name(tmp_path: Path, hub: LoopbackHub, name: str, error: type[LocalrunError]):
    machine = Machine(tmp_path, hub.endpoint)
    with pytest.raises(error):
        machine.pull(name)
    assert not (tmp_path / "models").exists()
