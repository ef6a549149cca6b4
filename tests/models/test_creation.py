"""New models of existing ones and of files: what they share, what differs, and which quantizations can be made."""

from __future__ import annotations

import math
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from localrun.errors import BadModelFile, BadRequest, ModelNotFound, NotFound
from localrun.models import builtin, creation, naming
from localrun.models.creation import Changes
from localrun.models.gguf.reader import read_header
from localrun.models.storage.blobs import BlobWriter
from localrun.models.storage.manifest import Message, Place, Role
from localrun.models.storage.store import Store
from tests.lora_file import write_lora
from tests.models.test_shards import split_copy
from tests.support.synthesis.synthesize import synthesize

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(builtin, "model_path", lambda: tiny_gguf)
    return Store(tmp_path / "models", hub_cache_folder=tmp_path / "hub")


def upload(store: Store, path: Path) -> str:
    with BlobWriter(store.blobs) as writer:
        writer.write(path.read_bytes())
        return writer.finish()


def make(store: Store, name: str, base: str, folder: Path | None = None, **changes: object) -> None:
    made = creation.assemble(creation.base_of(store, base, folder), Changes(**changes), now=NOW)  # type: ignore[arg-type]
    naming.point(store, name, made)


def test_a_model_of_a_model_keeps_what_is_not_changed(store: Store) -> None:
    make(
        store, "fox", "tiny", parameters={"temperature": 0.1, "top_k": 5}, system="Be a fox.", licence_text="MIT",
        messages=(Message("user", "hi"),), template="{% if messages %}x{% endif %}", requires="0.1.0",
    )  # fmt: skip
    make(store, "wolf", "fox:latest", parameters={"top_k": 7}, system="Be a wolf.")
    wolf = store.resolve("wolf")
    assert wolf.parameters == {"temperature": 0.1, "top_k": 7}
    assert (wolf.system, wolf.template) == ("Be a wolf.", "{% if messages %}x{% endif %}")
    assert wolf.messages == (Message("user", "hi"),)
    assert wolf.manifest is not None
    assert (wolf.manifest.licence_text, wolf.manifest.requires) == ("MIT", "0.1.0")
    assert wolf.path == builtin.model_path()
    assert wolf.modified_at == NOW
    assert (wolf.source.kind, wolf.source.file) == ("create", "fox")
    assert store.resolve("fox").digest != wolf.digest


def test_a_file_is_used_where_it_lies(store: Store, tmp_path: Path, tiny_gguf: Path) -> None:
    shutil.copyfile(tiny_gguf, tmp_path / "my model.gguf")
    for text in ("my model.gguf", "./my model.gguf", str(tmp_path / "my model.gguf")):
        make(store, "mine", text, tmp_path)
        assert store.resolve("mine").path == tmp_path / "my model.gguf"
    assert store.blobs.all() == ()
    (tmp_path / "my model.gguf").unlink()
    with pytest.raises(BadModelFile, match=r"my model\.gguf.*'mine' is gone"):
        store.resolve("mine")
    assert "is gone" in {file.path.name: file.problem for file in store.damaged()}["latest.json"]


def test_a_folder_with_one_model(store: Store, tmp_path: Path, tiny_gguf: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(BadRequest, match="no GGUF file"):
        creation.base_of(store, "./folder", tmp_path)
    for name in ("a.gguf", "mmproj-a.gguf"):
        shutil.copyfile(tiny_gguf, folder / name)
    for text in ("./folder", "folder/"):
        assert creation.base_of(store, text, tmp_path).path == folder / "a.gguf"
    shutil.copyfile(tiny_gguf, folder / "b.gguf")
    with pytest.raises(BadRequest, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        creation.base_of(store, "./folder", tmp_path)


def test_a_model_in_several_files(store: Store, tmp_path: Path, tiny_gguf: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    first = split_copy(tiny_gguf, folder)
    make(store, "by-file", f"./folder/{first.name}", tmp_path, system="Be brief.")
    make(store, "by-folder", "./folder", tmp_path)
    for name in ("by-file", "by-folder"):
        model = store.resolve(name)
        assert model.path == first
        assert model.header.shard_paths == tuple(sorted(folder.iterdir()))
        assert model.size_bytes == sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("nothing", ModelNotFound, "'nothing' not found"),
        ("./nothing.gguf", NotFound, "there is no file"),
        ("/nowhere/at/all.gguf", NotFound, "there is no file"),
        ("model.safetensors", BadRequest, "convert it to GGUF"),
        ("../../etc/passwd", NotFound, "there is no file"),
        ("sha256:" + "0" * 64, NotFound, "upload it first"),
        ("Org/Repo:file.gguf", ModelNotFound, "not found"),
    ],
)
def test_what_cannot_be_begun_with(
    text: str, error: type[Exception], message: str, store: Store, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        creation.base_of(store, text, tmp_path)


def test_a_relative_path_needs_a_folder(store: Store) -> None:
    with pytest.raises(BadRequest, match="give the absolute path"):
        creation.base_of(store, "./x.gguf", None)


def test_a_damaged_file_is_not_taken(store: Store, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(BadModelFile):
        creation.base_of(store, "./bad.gguf", tmp_path)


def test_uploaded_files(store: Store, tiny_gguf: Path) -> None:
    digest = upload(store, tiny_gguf)
    for text in (digest, f"@{digest}", digest.replace(":", "-")):
        assert creation.base_of(store, text, None).manifest.files[0].digest == digest
    base = creation.base_of_files(store, {"model.gguf": digest})
    (file,) = base.manifest.files
    assert (file.role, file.place, file.size_bytes) == (Role.MODEL, Place.BLOB, tiny_gguf.stat().st_size)
    for files, message in (
        ({"model.safetensors": digest}, "convert it to GGUF"),
        ({"a.gguf": digest, "b.gguf": digest}, "2 GGUF files"),
        ({"a-00001-of-00002.gguf": digest, "a-00002-of-00002.gguf": digest}, "path of the first one as FROM"),
        ({"../a.gguf": digest}, "climbs out"),
        ({"/etc/a.gguf": digest}, "no relative file name"),
        ({"a.gguf": "sha256:../../x"}, "is no digest"),
    ):
        with pytest.raises(BadRequest, match=message):
            creation.base_of_files(store, files)
    with pytest.raises(BadModelFile, match="is no projector"):
        creation.base_of_files(store, {"a.gguf": digest, "mmproj.gguf": digest})


def test_adapters_must_be_for_the_model(store: Store, tmp_path: Path, tiny_gguf: Path) -> None:
    base = creation.base_of(store, "tiny", None)
    good = write_lora(tiny_gguf, tmp_path / "lora.gguf")
    other = write_lora(tiny_gguf, tmp_path / "other.gguf", architecture="qwen2")
    by_path = creation.adapters(store, base, ["lora.gguf"], tmp_path)[0]
    assert (by_path.role, by_path.place, by_path.path) == (Role.ADAPTER, Place.FILE, str(good))
    digest = upload(store, good)
    by_digest = creation.adapters(store, base, [digest], None)[0]
    assert (by_digest.place, by_digest.digest) == (Place.BLOB, digest)
    with pytest.raises(BadModelFile, match=r"'tiny': it is for qwen2.*llama"):
        creation.adapters(store, base, [str(other)], None)[0]
    spoiled = write_lora(tiny_gguf, tmp_path / "spoiled.gguf", strength=math.inf)
    for refused in (
        lambda: creation.adapters(store, base, [str(spoiled)], None)[0],
        lambda: creation.named_adapter(store, str(spoiled), None, licence_text=None, now=NOW),
    ):
        with pytest.raises(BadModelFile, match=r"spoiled\.gguf has NaN or infinite numbers .*\.lora_b"):
            refused()
    peft = tmp_path / "peft"
    peft.mkdir()
    (peft / "adapter_model.safetensors").touch()
    for text in ("./peft", "./peft/adapter_model.safetensors"):
        with pytest.raises(BadRequest, match=r"GGUF file; convert it .*convert_lora_to_gguf\.py"):
            creation.adapters(store, base, [text], tmp_path)[0]
    shutil.copy(good, peft / "adapter.gguf")
    assert creation.adapters(store, base, ["./peft"], tmp_path)[0].path == str(peft / "adapter.gguf")
    with pytest.raises(BadModelFile, match="is no adapter but a model"):
        creation.adapters(store, base, [str(tiny_gguf)], None)[0]
    with pytest.raises(NotFound):
        creation.adapters(store, base, ["./nothing.gguf"], tmp_path)[0]
    made = creation.assemble(base, Changes(adapters=(by_path, by_digest)), now=NOW)
    naming.point(store, "tuned", made)
    assert [part.path for part in store.resolve("tuned").parts] == [good, store.path_of(by_digest)]


@pytest.mark.parametrize(
    "template",
    [
        "{{ .System }}",
        "{{- if .Prompt }}x{{ end }}",
        "{{ range .Messages }}{{ .Content }}{{ end }}",
        "{{/* go */}}",
        "{{ . }}",
    ],
)
def test_templates_of_go_are_told(template: str) -> None:
    assert creation.is_go(template)


@pytest.mark.parametrize(
    "template",
    [
        "",
        "plain",
        "{{ bos_token }}",
        "{%- for m in messages %}{{ m.content }}{% endfor %}",
        "{{ messages[0].content }}",
    ],
)
def test_templates_of_jinja_are_not(template: str) -> None:
    assert not creation.is_go(template)


@pytest.mark.skipif(os.name != "posix", reason="a backslash separates folders there")
def test_a_path_with_blanks_as_a_terminal_writes_it(tmp_path: Path) -> None:
    (tmp_path / "my models").mkdir()
    file = tmp_path / "my models" / "a b.gguf"
    file.touch()
    for text in (str(file).replace(" ", "\\ "), "./my\\ models/a\\ b.gguf", "my models/a b.gguf"):
        assert creation.path_of(text, tmp_path) == file


def test_names() -> None:
    assert creation.quantization_number("q4_k_m") == creation.quantization_number("Q4_K") == 15
    assert creation.canonical_quantization("q4_K_M") == "Q4_K_M"
    for wrong in ("q9", "", "IQ1_S"):  # the last one needs a calibration text
        with pytest.raises(BadRequest, match="is not one of Q8_0, Q6_K"):
            creation.quantization_number(wrong)


def test_only_whole_weights_are_quantized(tiny_gguf: Path) -> None:
    with pytest.raises(BadRequest, match=r"'x'.*Q4_0.*F16"):
        creation.check_quantizable(read_header(tiny_gguf), "x")


def test_the_expected_size_is_rather_too_much(tmp_path: Path) -> None:
    sizes = {}
    for kind in ("F16", "Q8_0", "Q4_0"):
        synthesize("tiny", kind, tmp_path / kind)
        sizes[kind] = (tmp_path / kind).stat().st_size
    header = read_header(tmp_path / "F16")
    creation.check_quantizable(header, "x")
    for kind in ("Q8_0", "Q4_0", "Q4_K_M"):
        assert sizes.get(kind, 0) <= creation.quantized_bytes(header, kind) < sizes["F16"]
