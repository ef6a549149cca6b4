"""Models that other programs keep: found where they lie, run without a copy, and never deleted."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from localrun.errors import BadRequest, ModelNotFound
from localrun.models import builtin, naming
from localrun.models.storage import other_programs
from localrun.models.storage.manifest import ManifestKey
from localrun.models.storage.model import Origin
from localrun.models.storage.store import Store
from tests.models.handmade import ENTRIES, STRING, entry, file_bytes, text
from tests.says import says
from tests.support.synthesis.synthesize import synthesize


class Ollama:
    """A store as Ollama fills it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs").mkdir(parents=True)
        (folder / "manifests").mkdir()

    def blob(self, content: bytes) -> Path:
        path = self.folder / "blobs" / f"sha256-{hashlib.sha256(content).hexdigest()}"
        path.write_bytes(content)
        return path

    def add(self, name: str, *layers: tuple[str, bytes]) -> Path:
        """`name` is host/owner/name/tag."""
        described: list[dict[str, Any]] = []
        for kind, content in layers:
            digest = self.blob(content).name.replace("-", ":")
            media_type = f"application/vnd.ollama.image.{kind}"
            described.append({"mediaType": media_type, "digest": digest, "size": len(content)})
        path = self.folder / "manifests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schemaVersion": 2, "layers": described}))
        return path


@pytest.fixture
def home(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(builtin, "model_path", lambda: tiny_gguf)
    monkeypatch.setattr(other_programs, "OLLAMA_SERVICE", tmp_path / "nowhere")
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def store_of(home: Path, environ: dict[str, str] | None = None) -> Store:
    others = other_programs.found(home / "cache", environ or {}, home)
    return Store(home / "models", hub_cache_folder=home / "hub", others=others)


# --- packages ------------------------------------------------------------------------------------------------------


def test_without_any_there_is_no_folder(tmp_path: Path):
    assert other_programs.package_folders(tmp_path, ["no_such_package_at_all"]) == ()
    assert other_programs.found(tmp_path, {}, tmp_path).ollama in ((), other_programs.found(tmp_path, {}).ollama)


def test_a_package_beside_localrun_and_the_cache_folder_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "site" / "package_with_a_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('nobody may import this')", encoding="utf-8")
    synthesize("tiny", "Q4_0", package / "Carried.gguf")
    kept = other_programs.package_cache(tmp_path / "cache")
    kept.mkdir(parents=True)
    synthesize("tiny", "Q4_0", kept / "Kept.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    folders = other_programs.package_folders(tmp_path / "cache", ["package_with_a_model"])
    assert folders == (package, kept)
    store = Store(tmp_path / "models", model_dirs=folders)
    assert [model.name for model in store.list()] == ["tiny", "Carried", "Kept"]


# --- Ollama --------------------------------------------------------------------------------------------------------


def test_ollama_s_models_are_listed_and_found_by_the_names_they_have_there(home: Path, tiny_gguf: Path):
    ollama = Ollama(home / ".ollama/models")
    content = tiny_gguf.read_bytes()
    ollama.add("registry.ollama.ai/library/llama3.2/latest", ("model", content), ("template", b"{{ .Prompt }}"))
    ollama.add("registry.ollama.ai/library/llama3.2/1b", ("model", content), ("projector", b"unread"))
    ollama.add("registry.ollama.ai/somebody/fox/latest", ("model", content))
    ollama.add("hf.co/Owner/Fox-GGUF/Q4_K_M", ("model", content))
    (ollama.folder / "manifests/registry.ollama.ai/library/llama3.2/.DS_Store").touch()
    store = store_of(home)
    assert {model.name for model in store.list()} == {
        *("tiny", "llama3.2", "llama3.2:1b", "registry.ollama.ai/somebody/fox", "Owner/Fox-GGUF:Q4_K_M"),
    }
    assert list(store.damaged()) == []
    for name in ("llama3.2", "LLAMA3.2:latest", "llama3.2:1b", "owner/fox-gguf:q4_k_m", "hf.co/Owner/Fox-GGUF:Q4_K_M"):
        model = store.resolve(name)
        assert (model.origin, model.program) == (Origin.FOREIGN, "Ollama")
        assert model.path.parent == ollama.folder / "blobs"
        assert (model.source.repo, model.source.file) == ("Ollama", str(ollama.folder))
    library = (
        "library/llama3.2",
        "registry.ollama.ai/library/llama3.2:latest",
        "https://Registry.Ollama.ai/Library/LLAMA3.2",
    )
    assert {store.resolve(name).name for name in library} == {"llama3.2"}
    for name in ("somebody/fox", "Somebody/Fox:latest", "registry.ollama.ai/somebody/fox"):
        assert store.resolve(name).name == "registry.ollama.ai/somebody/fox"
    for name in ("llama3.2:3b", "somebody/fox:1b", "hf.co/somebody/fox", "somebody/fox@main"):
        with pytest.raises(ModelNotFound):
            store.resolve(name)


def test_owner_and_name_mean_the_hub_s_model_before_ollama_s(home: Path, tiny_gguf: Path):
    ollama = Ollama(home / ".ollama/models")
    ollama.add("registry.ollama.ai/me/own/latest", ("model", tiny_gguf.read_bytes()))
    store = store_of(home)
    before = store.evidence("me/own")
    with pytest.raises(BadRequest, match=r"ollama rm registry\.ollama\.ai/me/own:latest"):
        naming.remove(store, "me/own")
    naming.copy(store, "tiny", "me/own")
    assert not before.holds()
    assert store.resolve("me/own").name == "me/own"
    naming.copy(store, "tiny", "registry.ollama.ai/me/other")
    assert store.resolve("me/other").name == "registry.ollama.ai/me/other"
    naming.remove(store, "me/other")
    assert {model.name for model in store.list()} == {"tiny", "me/own", "registry.ollama.ai/me/own"}


def test_blobs_whose_names_have_a_colon_are_found(home: Path, tiny_gguf: Path):
    ollama = Ollama(home / ".ollama/models")
    ollama.add("registry.ollama.ai/library/old/latest", ("model", tiny_gguf.read_bytes()))
    blob = ollama.blob(tiny_gguf.read_bytes())
    blob.rename(blob.with_name(blob.name.replace("-", ":")))
    assert store_of(home).resolve("old").path.name.startswith("sha256:")


def test_a_name_that_ollama_has_and_nothing_here_can_load_is_not_found_with_the_reason(home: Path, tiny_gguf: Path):
    ollama = Ollama(home / ".ollama/models")
    (ollama.folder / "manifests/registry.ollama.ai/library/big").mkdir(parents=True)
    (ollama.folder / "manifests/registry.ollama.ai/library/big/cloud").write_text('{"layers": null}')
    ollama.add("registry.ollama.ai/library/parts/latest", ("tensor", b"a"), ("tensor", b"b"))
    ollama.add("hf.co/Some/Half/Q4_0", ("model", tiny_gguf.read_bytes()))
    ollama.blob(tiny_gguf.read_bytes()).unlink()
    store = store_of(home)
    reasons = {
        "big:cloud": "runs in Ollama's cloud",
        "parts": "is made of safetensors",
        "some/half:q4_0": "`ollama pull hf.co/Some/Half:Q4_0` gets it",
    }
    assert len(list(store.damaged())) == len(reasons)
    for name, reason in reasons.items():
        with pytest.raises(ModelNotFound) as caught:
            store.resolve(name)
        assert says(caught.value.message, f"model '{name}' not found: ", reason)
        assert reason in caught.value.reason
    naming.copy(store, "tiny", "big:cloud")
    assert store.resolve("big:cloud").name == "big:cloud", "the name is free"


def test_what_belongs_to_one_of_ollama_s_models_applies_here_too(home: Path, tiny_gguf: Path):
    ollama = Ollama(home / ".ollama/models")
    ollama.add(
        "registry.ollama.ai/library/fox/latest",
        ("model", tiny_gguf.read_bytes()),
        ("params", b'{"temperature": 0.5, "num_gqa": 8, "top_k": null, "stop": [1], "later": [{"x": 1}]}'),
        ("draft", b"unread"),
        ("system", b"Du bist ein Fuchs."),
        ("messages", b'[{"role": "user", "content": "Hi"}]'),
        ("license", b"Free"),
    )
    model = store_of(home).resolve("fox")
    assert (dict(model.parameters), model.system) == ({"temperature": 0.5}, "Du bist ein Fuchs.")
    assert model.messages[0].content == "Hi"
    assert model.template == model.header.chat_template


def test_ollama_s_models_stay_as_they_are(home: Path, tiny_gguf: Path):
    ollama = Ollama(home / ".ollama/models")
    ollama.add("registry.ollama.ai/library/fox/7b", ("model", tiny_gguf.read_bytes()))
    before = {path: path.read_bytes() for path in ollama.folder.rglob("*") if path.is_file()}
    store = store_of(home)
    with pytest.raises(BadRequest) as refused:
        naming.remove(store, "fox:7b")
    assert str(ollama.folder) in refused.value.message
    assert refused.value.message.endswith("type: ollama rm fox:7b")
    naming.copy(store, "fox:7b", "mine")
    assert store.resolve("mine").path == store.resolve("fox:7b").path
    (kept,) = naming.remove(store, "mine").kept
    assert kept.reason.startswith("it belongs to you or to another program")
    naming.collect_garbage(store, now_s=1e10, min_age_s=0)
    assert {path: path.read_bytes() for path in ollama.folder.rglob("*") if path.is_file()} == before


def test_own_models_come_before_ollama_s_and_these_before_other_files(home: Path, tiny_gguf: Path):
    ollama = Ollama(home / ".ollama/models")
    for name in ("one", "two"):
        ollama.add(f"registry.ollama.ai/library/{name}/latest", ("model", tiny_gguf.read_bytes()))
    for folder, name in (("models", "one"), (".lmstudio/models/a/b", "two")):
        (home / folder).mkdir(parents=True)
        shutil.copyfile(tiny_gguf, home / folder / f"{name}.gguf")
    store = store_of(home)
    assert store.resolve("one").origin is Origin.FOLDER
    assert store.resolve("two").program == "Ollama"
    (hidden,) = store.damaged()
    assert (hidden.path.name, hidden.problem.rpartition("; ")[2]) == ("two.gguf", "use its path")


def test_what_ollama_has_and_no_engine_here_can_load_is_told_and_its_name_is_free(home: Path):
    ollama = Ollama(home / ".ollama/models")
    ours = file_bytes((entry("general.architecture", STRING, text("gptoss")), *_named("gptoss")))
    vision = entry("gemma3.vision.block_count", 4, b"\x1b\0\0\0")
    theirs = file_bytes((entry("general.architecture", STRING, text("gemma3")), vision, *_named("gemma3")))
    ollama.add("registry.ollama.ai/library/gpt-oss/20b", ("model", ours))
    ollama.add("registry.ollama.ai/library/gemma3/latest", ("model", theirs))
    store = store_of(home)
    problems = [file.problem for file in store.damaged()]
    assert len(problems) == 2
    assert says(problems[0], "'gemma3'", "vision")
    assert says(problems[1], "'gptoss'", "Ollama")
    assert problems[1].endswith("(localrun search)")
    # `localrun run` pulls what is not found.
    with pytest.raises(ModelNotFound):
        store.resolve("gemma3")


def _named(architecture: str) -> tuple[bytes, ...]:
    """What the header of a small model says besides its architecture."""
    return tuple(_renamed(each, architecture) for each in ENTRIES[1:])


def _renamed(each: bytes, architecture: str) -> bytes:
    """An entry whose key is not of `llama` but of another architecture."""
    n_bytes = int.from_bytes(each[:8], "little")
    key = each[8 : 8 + n_bytes].decode().replace("llama.", f"{architecture}.")
    return text(key) + each[8 + n_bytes :]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"layers": []}',
        b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../x", "size": 1}]}',
        b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:'
        + b"a" * 64
        + b'", "size": 1}]}',
        b'{"layers": [' * 50_000,
        b" " * 2_000_000,
    ],
    ids=lambda content: str(content[:40]),
)
def test_a_damaged_manifest_of_ollama_s_is_in_nobody_s_way(home: Path, tiny_gguf: Path, content: bytes):
    ollama = Ollama(home / ".ollama/models")
    ollama.add("registry.ollama.ai/library/fox/latest", ("model", tiny_gguf.read_bytes()))
    ollama.add("registry.ollama.ai/library/bad/latest").write_bytes(content)
    store = store_of(home)
    assert [model.name for model in store.list()] == ["tiny", "fox"]
    (damaged,) = store.damaged()
    assert "bad" in damaged.problem
    with pytest.raises(ModelNotFound):
        store.resolve("bad")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no FIFOs")
def test_a_fifo_or_a_device_for_a_manifest_holds_nothing_up(home: Path, tiny_gguf: Path):
    ollama = Ollama(home / ".ollama/models")
    ollama.add("registry.ollama.ai/library/fox/latest", ("model", tiny_gguf.read_bytes()))
    folder = home / ".ollama/models/manifests/registry.ollama.ai/library/bad"
    folder.mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(home / ".lmstudio-home-pointer")
    own = home / "models/manifests/localhost/library/bad"
    own.mkdir(parents=True)
    os.mkfifo(own / "own.json")
    names: list[str] = []
    problems: list[str] = []

    def look() -> None:
        store = store_of(home)
        names.extend(model.name for model in store.list())
        problems.extend(file.problem for file in store.damaged())

    # A thread that may be left behind: one that waits for a FIFO's writer would never end.
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(timeout=60)
    assert names == ["tiny", "fox"]
    assert len(problems) == 3
    assert all("not a regular file" in problem for problem in problems)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([], ["'bad'", "Ollama", "cloud"]),
        ([("params", b"{}")], ["'bad'", "Ollama", 0]),
        ([("model", b"x"), ("params", b"[]")], ["parameters", "'bad'", "Ollama", "Expected"]),
        ([("model", b"x"), ("messages", b"{}")], ["messages", "'bad'", "Ollama", "Expected"]),
    ],
)
def test_what_is_wrong_in_ollama_s_store_is_told_in_a_sentence(home: Path, layers: list[Any], said: list[object]):
    Ollama(home / ".ollama/models").add("registry.ollama.ai/library/bad/latest", *layers)
    (damaged,) = store_of(home).damaged()
    assert says(damaged.problem, *said)


def test_a_model_runs_without_its_licence_and_not_without_another_text(home: Path, tiny_gguf: Path):
    ollama = Ollama(home / ".ollama/models")
    weights = ("model", tiny_gguf.read_bytes())
    ollama.add("registry.ollama.ai/library/free/latest", weights, ("license", b"MIT"), ("license", b"gone"))
    ollama.add("registry.ollama.ai/library/mute/latest", weights, ("system", b"Be quiet."))
    ollama.blob(b"gone").unlink()
    ollama.blob(b"Be quiet.").unlink()
    store = store_of(home)
    found = store.resolve("free").manifest
    assert found is not None
    assert found.licence_text == "MIT"
    (damaged,) = store.damaged()
    assert says(damaged.problem, "'mute'", hashlib.sha256(b"Be quiet.").hexdigest(), "No such file")


def test_where_ollama_s_store_is(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usual, named, service = Ollama(home / ".ollama/models"), Ollama(tmp_path / "named"), Ollama(tmp_path / "service")
    monkeypatch.setattr(other_programs, "OLLAMA_SERVICE", service.folder)
    by_custom = other_programs.found(home, {}, home).ollama
    assert [store.folder for store in by_custom] == [usual.folder, service.folder]
    (by_variable,) = other_programs.found(home, {"OLLAMA_MODELS": str(named.folder)}, home).ollama
    assert by_variable.folder == named.folder
    (quoted,) = other_programs.found(home, {"OLLAMA_MODELS": f' "{named.folder}" '}, home).ollama
    assert quoted == by_variable
    assert other_programs.found(home, {"OLLAMA_MODELS": str(tmp_path / "none")}, home).ollama == ()


def test_a_model_that_ollama_pulls_anew_is_noticed(home: Path, tiny_gguf: Path):
    ollama = Ollama(home / ".ollama/models")
    store = store_of(home)
    before = store.evidence("fox")
    path = ollama.add("registry.ollama.ai/library/fox/latest", ("model", tiny_gguf.read_bytes()))
    assert other_programs.OllamaStore(ollama.folder).usual_path(ManifestKey.of("fox")) == path
    pulled = store.evidence("fox")
    assert pulled.holds()
    assert not before.holds()
    path.unlink()
    assert before.holds()
    assert not pulled.holds()


# --- LM Studio -----------------------------------------------------------------------------------------------------


def test_lm_studio_s_files_are_listed_in_place_and_never_deleted(home: Path, tiny_gguf: Path):
    folder = home / ".lmstudio/models/owner/repo"
    folder.mkdir(parents=True)
    for name in ("Fox-Q4_0.gguf", "mmproj-Fox.gguf"):
        shutil.copyfile(tiny_gguf, folder / name)
    store = store_of(home)
    model = store.resolve("fox-q4_0")
    assert (model.name, model.program, model.path) == ("Fox-Q4_0", "LM Studio", folder / "Fox-Q4_0.gguf")
    assert (model.source.repo, model.source.file) == ("LM Studio", str(model.path))
    assert [each.name for each in store.list()] == ["tiny", "Fox-Q4_0"]
    with pytest.raises(BadRequest, match=r"LM Studio.*rm .*Fox-Q4_0\.gguf$"):
        naming.remove(store, "Fox-Q4_0")
    assert model.path.is_file()


def test_links_that_go_round_in_lm_studio_s_folder_hide_no_other_model(home: Path, tiny_gguf: Path):
    folder = home / ".lmstudio/models/owner/repo"
    folder.mkdir(parents=True)
    shutil.copyfile(tiny_gguf, folder / "Fox-Q4_0.gguf")
    (folder / "loop.gguf").symlink_to("loop.gguf")
    (folder / "circle").symlink_to("circle")
    (folder / "up").symlink_to(folder.parent)
    store = store_of(home)
    assert [model.name for model in store.list()] == ["tiny", "Fox-Q4_0"]
    assert store.resolve("fox-q4_0").path == folder / "Fox-Q4_0.gguf"
    assert folder / "loop.gguf" in {file.path for file in store.damaged()}


def test_where_lm_studio_s_folder_is(home: Path, tmp_path: Path):
    def folders() -> list[Path]:
        return [folder.path for folder in other_programs.found(home / "cache", {}, home).folders if folder.program]

    assert folders() == []
    (home / ".cache/lm-studio/models").mkdir(parents=True)
    assert folders() == [home / ".cache/lm-studio/models"]
    moved = tmp_path / "moved"
    (moved / "models").mkdir(parents=True)
    (home / ".lmstudio-home-pointer").write_text(f"{moved}\n")
    assert folders()[0] == moved / "models"
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    for settings in ("not JSON", json.dumps({"downloadsFolder": "relative"}), json.dumps({"downloadsFolder": 5})):
        (moved / "settings.json").write_text(settings)
        assert folders()[0] == moved / "models"
    (moved / "settings.json").write_text(json.dumps({"downloadsFolder": str(chosen)}))
    assert folders()[0] == chosen
