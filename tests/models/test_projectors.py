"""A model's projector: pulled with it, found beside it, named by a Modelfile, explained where there is none."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec
import pytest

from localrun.errors import BadModelFile, BadRequest, NotFound
from localrun.models import creation, modelfile, naming
from localrun.models.gguf.reader import read_header
from localrun.models.storage.manifest import Place, Role, StoredFile
from localrun.models.storage.other_programs import Folder, OllamaStore, OtherPrograms
from localrun.models.storage.store import Store
from tests.hub.repository import Repository
from tests.hub.server import Hub as LoopbackHub
from tests.models.handmade import STRING, U32, array, entry, file_bytes, text, u32
from tests.models.test_pull import GGUF, Machine, pytestmark  # noqa: F401  (the built-in model's file)
from tests.projector_file import changed, parts_of, write_parts, write_projector
from tests.registry import Layer, Registry
from tests.says import says


@pytest.fixture(scope="module")
def width(tiny_gguf: Path) -> int:
    return read_header(tiny_gguf).n_embd


@pytest.fixture
def projector(tmp_path: Path, width: int) -> Path:
    return write_projector(tmp_path / "made.gguf", width=width)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models", hub_cache_folder=tmp_path / "hub")


def put(content: Path, *parts: Path | str) -> Path:
    path = Path(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.read_bytes())
    return path


def upload(store: Store, path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    put(path, store.folder, "blobs", f"sha256-{digest}")
    return f"sha256:{digest}"


# --- pulled -------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> dict[str, bytes]:
    """Projectors for the built-in model, by what they are."""
    wide = read_header(_written(tmp_path, "tiny.gguf", GGUF)).n_embd
    parts = parts_of("gemma3", wide)
    return {
        "sound": write_parts(tmp_path / "sound.gguf", parts).read_bytes(),
        "other": write_parts(tmp_path / "other.gguf", parts, seed=1).read_bytes(),
        "unknown": write_parts(
            tmp_path / "unknown.gguf", changed(parts, {"clip.projector_type": "future"})
        ).read_bytes(),
        "wide": write_projector(tmp_path / "wide.gguf", width=wide + 8).read_bytes(),
    }


def _written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def pulled(tmp_path: Path, files: dict[str, bytes], **options: str) -> Machine:
    with LoopbackHub(Repository("org/fox", {"fox-Q8_0.gguf": GGUF, **files})) as hub:
        machine = Machine(tmp_path / "machine", hub.endpoint)
        machine.pull("org/fox", **options)
    return machine


def test_the_projector_comes_with_the_model_and_goes_with_it(tmp_path: Path, made: dict[str, bytes]):
    machine = pulled(tmp_path, {"mmproj-F32.gguf": made["other"], "mmproj-F16.gguf": made["sound"]})
    model = machine.store.resolve("org/fox")
    assert model.projector is not None
    assert (model.projector.name, model.projector.read_bytes()) == ("mmproj-F16.gguf", made["sound"])
    assert (model.media, model.no_projector) == (("vision",), "")
    assert model.size_bytes == len(GGUF) + len(made["sound"])
    assert [part.path for part in model.parts] == [model.projector]
    assert not any("F32" in path for path in machine.all_files())
    naming.copy(machine.store, "org/fox", "copy")
    assert machine.store.resolve("copy").projector == model.projector
    assert naming.remove(machine.store, "org/fox").freed_bytes == 0
    assert naming.remove(machine.store, "copy").freed_bytes == len(GGUF) + len(made["sound"])
    assert not model.projector.exists()


def test_one_that_is_asked_for(tmp_path: Path, made: dict[str, bytes]):
    there = {"mmproj-F32.gguf": made["other"], "sub/mmproj-F16.gguf": made["sound"]}
    for wanted, content in (("F32", made["other"]), ("mmproj-F16.gguf", made["sound"])):
        machine = pulled(tmp_path / wanted, there, projector=wanted)
        model = machine.store.resolve("org/fox")
        assert model.projector is not None
        assert model.projector.read_bytes() == content
    with pytest.raises(NotFound, match=r"BF16.*mmproj-F32.*sub/mmproj-F16"):
        pulled(tmp_path / "no", there, projector="BF16")


def test_without_it_show_says_so_and_pulling_again_fetches_only_that(tmp_path: Path, made: dict[str, bytes]):
    files = {"fox-Q8_0.gguf": GGUF, "mmproj-F16.gguf": made["sound"]}
    with LoopbackHub(Repository("org/fox", files)) as hub:
        machine = Machine(tmp_path / "machine", hub.endpoint)
        machine.pull("org/fox", projector="none")
        model = machine.store.resolve("org/fox")
        assert (model.projector, model.media) == (None, ())
        assert says(model.no_projector, "mmproj-F16.gguf", "left out", "localrun pull org/fox")
        machine.pull("org/fox")
    assert machine.seen.bytes["fox-Q8_0.gguf"] == [len(GGUF)]  # it was there
    model = machine.store.resolve("org/fox")
    assert (model.media, model.no_projector) == (("vision",), "")


@pytest.mark.parametrize(("name", "said"), [("unknown", ["unknown type 'future'"]), ("wide", ["for another model"])])
def test_one_that_cannot_be_used_is_left_out_and_refused_if_asked_for(
    tmp_path: Path, made: dict[str, bytes], name: str, said: list[str]
):
    machine = pulled(tmp_path, {"mmproj-F16.gguf": made[name]})
    model = machine.store.resolve("org/fox")
    assert model.projector is None
    assert says(model.no_projector, "mmproj-F16.gguf", *said)
    assert any("text only" in status and says(status, *said) for status in machine.seen.statuses)
    assert not any("mmproj" in path for path in machine.all_files())
    with pytest.raises(BadModelFile) as refused:
        pulled(tmp_path / "again", {"mmproj-F16.gguf": made[name]}, projector="F16")
    assert says(refused.value.message, "org/fox", *said, "none")


def test_a_registry_s_projector_comes_along(tmp_path: Path, made: dict[str, bytes]):
    with Registry() as registry:
        name = registry.add("library/fox", Layer("model", GGUF), Layer("projector", made["sound"]))
        machine = Machine(tmp_path / "machine")
        machine.pull(name, projector="none")
        assert says(machine.store.resolve(name).no_projector, "left out", f"localrun pull {name}")
        machine.pull(name)
        with pytest.raises(BadRequest, match="registry"):
            machine.pull(name, projector="F16")
    model = machine.store.resolve(name)
    assert model.projector is not None
    assert model.projector.read_bytes() == made["sound"]
    assert [file.role for file in model.manifest.files] == [Role.MODEL, Role.PROJECTOR]  # type: ignore[union-attr]


# --- found --------------------------------------------------------------------------------------------------------


def test_beside_a_file(store: Store, tmp_path: Path, tiny_gguf: Path, projector: Path):
    path = put(tiny_gguf, tmp_path, "somewhere", "fox-Q4_0.gguf")
    alone = store.resolve(str(path))
    assert (alone.projector, alone.no_projector) == (None, "")
    evidence = store.evidence(str(path))
    beside = put(projector, path.parent, "mmproj-F16.gguf")
    assert not evidence.holds()
    found = store.resolve(str(path))
    assert found.projector == beside
    assert found.size_bytes == path.stat().st_size + beside.stat().st_size
    assert found.digest != alone.digest
    put(tiny_gguf, path.parent, "owl-Q4_0.gguf")
    assert store.resolve(str(path)).projector is None  # whose it is nobody can tell
    beside.rename(beside.with_name("mmproj-fox-F16.gguf"))
    assert store.resolve(str(path)).media == ("vision",)
    assert store.resolve(str(path.with_name("owl-Q4_0.gguf"))).media == ()


def test_beside_what_a_link_leads_to(store: Store, tmp_path: Path, tiny_gguf: Path, projector: Path):
    path = put(tiny_gguf, tmp_path, "theirs", "fox-Q4_0.gguf")
    for folder in (store.folder, tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / "linked.gguf").symlink_to(path)
    evidence = store.evidence(str(tmp_path / "linked.gguf"))
    beside = put(projector, path.parent, "mmproj-F16.gguf")
    assert not evidence.holds()
    for name in ("linked", str(tmp_path / "linked.gguf")):
        assert store.resolve(name).projector == beside
    naming.remove(store, "linked")
    assert beside.exists()
    assert not (store.folder / "linked.gguf").is_symlink()
    put(tiny_gguf, path.parent, "owl-Q4_0.gguf")
    assert store.resolve(str(tmp_path / "linked.gguf")).projector is None  # as for the file itself


def test_in_the_models_folder_it_goes_with_the_last_model_that_uses_it(store: Store, tiny_gguf: Path, projector: Path):
    for name in ("fox-Q4_0", "fox-Q8_0"):
        put(tiny_gguf, store.folder, f"{name}.gguf")
    beside = put(projector, store.folder, "mmproj-fox.gguf")
    assert [model.media for model in store.list()[-2:]] == [("vision",)] * 2
    naming.copy(store, "fox-Q8_0", "copy")
    naming.remove(store, "fox-Q4_0")
    assert beside.exists()
    naming.remove(store, "copy")
    naming.remove(store, "fox-Q8_0")
    assert not beside.exists()


def test_in_the_models_folder_it_stays_for_a_name_that_has_another_model(
    store: Store, tmp_path: Path, tiny_gguf: Path, projector: Path
):
    put(tiny_gguf, store.folder, "fox.gguf")
    beside = put(projector, store.folder, "mmproj-fox.gguf")
    own = put(tiny_gguf, tmp_path, "own.gguf")
    files = tuple(
        StoredFile(role=role, place=Place.FILE, size_bytes=path.stat().st_size, path=str(path))
        for role, path in ((Role.MODEL, own), (Role.PROJECTOR, beside))
    )
    naming.point(store, "own", msgspec.structs.replace(naming.described(store.find("fox")), files=files))
    naming.remove(store, "fox")
    assert store.resolve("own").projector == beside


def test_in_other_programs_folders(tmp_path: Path, tiny_gguf: Path, projector: Path):
    put(tiny_gguf, tmp_path / "lms" / "org" / "repo", "fox-Q4_0.gguf")
    put(projector, tmp_path / "lms" / "org" / "repo", "mmproj-model-f16.gguf")
    ollama = tmp_path / "ollama"
    layers = []
    for kind, path in (("model", tiny_gguf), ("projector", projector)):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        put(path, ollama, "blobs", f"sha256-{digest}")
        layers.append(
            f'{{"mediaType": "application/vnd.ollama.image.{kind}", "digest": "sha256:{digest}", '
            f'"size": {path.stat().st_size}}}'
        )
    manifest = ollama / "manifests/registry.ollama.ai/library/owl/latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(f'{{"layers": [{", ".join(layers)}]}}')
    others = OtherPrograms((OllamaStore(ollama),), (Folder(tmp_path / "lms", "LM Studio"),))
    store = Store(tmp_path / "models", hub_cache_folder=tmp_path / "hub", others=others)
    assert {model.name: model.media for model in store.list()[-2:]} == {
        "fox-Q4_0": ("vision",),
        "owl": ("vision",),
    }
    assert store.resolve("owl").media == ("vision",)


def test_one_that_does_not_fit_leaves_the_model_for_text(store: Store, tmp_path: Path, tiny_gguf: Path, width: int):
    path = put(tiny_gguf, tmp_path, "fox-Q4_0.gguf")
    write_projector(tmp_path / "mmproj.gguf", width=width + 1)
    model = store.resolve(str(path))
    assert (model.projector, model.media) == (None, ())
    assert says(model.no_projector, "mmproj.gguf", "another model", str(width + 1), str(width))
    (tmp_path / "mmproj.gguf").write_bytes(b"GGUF")
    assert says(store.resolve(str(path)).no_projector, "cannot be used", "mmproj.gguf", "truncated")


def test_where_no_projectors_are_used(tmp_path: Path, tiny_gguf: Path, projector: Path):
    path = put(tiny_gguf, tmp_path, "fox", "fox-Q4_0.gguf")
    put(projector, tmp_path, "fox", "mmproj.gguf")
    model = Store(tmp_path / "models", no_projectors="the setting says so").resolve(str(path))
    assert (model.projector, model.no_projector) == (None, "the setting says so")


def test_a_kind_of_model_that_usually_has_one_says_that_it_is_missing(store: Store, tmp_path: Path):
    sizes = {"context_length": 64, "block_count": 1, "embedding_length": 64}
    entries = [entry(f"qwen2vl.{key}", U32, u32(value)) for key, value in sizes.items()]
    tokens = array("tokenizer.ggml.tokens", STRING, 1, text("a"))
    path = tmp_path / "see.gguf"
    path.write_bytes(file_bytes((entry("general.architecture", STRING, text("qwen2vl")), *entries, tokens), ()))
    assert says(store.resolve(str(path)).no_projector, "qwen2vl", "images", "mmproj", "same folder")


# --- created ------------------------------------------------------------------------------------------------------


def test_a_modelfile_names_it(store: Store, tmp_path: Path, tiny_gguf: Path, projector: Path, width: int):
    put(tiny_gguf, tmp_path, "fox.gguf")
    for line in ("FROM ./made.gguf", "PROJECTOR ./made.gguf"):
        said = modelfile.parse(f"FROM ./fox.gguf\n{line}\n")
        assert said.projector is not None
        base = creation.base_of(store, said.base.text, tmp_path)
        stored = creation.projector(store, base, said.projector.text, tmp_path)
        assert stored == StoredFile(
            role=Role.PROJECTOR, place=Place.FILE, size_bytes=projector.stat().st_size, path=str(projector)
        )
    written = modelfile.write(base="/fox.gguf", projector=str(projector))
    read_back = modelfile.parse(written).projector
    assert read_back is not None
    assert read_back.text == str(projector)
    write_projector(tmp_path / "wide.gguf", width=width + 1)
    with pytest.raises(BadModelFile, match=rf"wide.gguf .*{width + 1}.*{width}"):
        creation.projector(store, base, "./wide.gguf", tmp_path)
    with pytest.raises(BadModelFile, match="is no projector"):
        creation.projector(store, base, "./fox.gguf", tmp_path)
    with pytest.raises(NotFound, match="not there"):
        creation.projector(store, base, "./none.gguf", tmp_path)


def test_what_lies_beside_a_file_is_named_with_it(store: Store, tmp_path: Path, tiny_gguf: Path, projector: Path):
    put(tiny_gguf, tmp_path, "fox", "fox.gguf")
    beside = put(projector, tmp_path, "fox", "mmproj.gguf")
    for text_of_base in ("./fox", "./fox/fox.gguf"):
        base = creation.base_of(store, text_of_base, tmp_path)
        assert [(file.role, file.path) for file in base.manifest.files][1:] == [(Role.PROJECTOR, str(beside))]


def test_uploaded_with_the_model_whatever_it_is_called(store: Store, tiny_gguf: Path, projector: Path, width: int):
    model, its = upload(store, tiny_gguf), upload(store, projector)
    for name in ("mmproj.gguf", "vision.gguf"):
        base = creation.base_of_files(store, {name: its, "model.gguf": model})
        assert [(file.role, file.digest) for file in base.manifest.files] == [
            (Role.MODEL, model),
            (Role.PROJECTOR, its),
        ]
    other = upload(store, write_projector(projector.with_name("other.gguf"), width=width, seed=1))
    with pytest.raises(BadRequest, match="2 projectors"):
        creation.base_of_files(store, {"a.gguf": model, "b.gguf": its, "c.gguf": other})


def test_one_that_is_gone_is_explained(store: Store, tmp_path: Path, tiny_gguf: Path, projector: Path):
    model, its = upload(store, tiny_gguf), upload(store, projector)
    base = creation.base_of_files(store, {"mmproj.gguf": its, "model.gguf": model})
    naming.point(store, "fox", base.manifest)
    assert store.resolve("fox").media == ("vision",)
    (store.folder / "blobs" / its.replace(":", "-")).unlink()
    found = store.resolve("fox")
    assert found.projector is None
    assert re.search(r"projector .* is gone.*create the model again", found.no_projector)
