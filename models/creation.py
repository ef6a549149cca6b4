"""Makes the manifest of a new model from an existing one, or from files, and what is to be different about it.

Used by the daemon's threads. Nothing is copied: a model made of another shares its files, a model made of a GGUF file
uses it in place, and uploaded files are blobs already. Every file is checked before it is named: headers are read,
adapters must be for the architecture of the model. Quantizations are those that llama.cpp makes well without a
calibration text.

Does not: write the manifest (naming.py), quantize (the daemon starts a process for it), or check parameters' limits.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from localrun.errors import BadModelFile, BadRequest, NotFound
from localrun.models import draft, naming
from localrun.models.gguf import reader
from localrun.models.gguf.ggml_types import FILE_TYPES, QUANT_ALIASES, by_name
from localrun.models.gguf.header import Header
from localrun.models.gguf.reader import shard_of
from localrun.models.name import MAX_NAME_CHARS, Kind, ModelName
from localrun.models.storage.manifest import Manifest, Message, Place, Role, Source, StoredFile, blob_path, check_digest
from localrun.models.storage.model_files import SUFFIX, is_part
from localrun.models.storage.store import Store

# A template of Go, as Ollama's models have them; a Jinja template has `{%` almost certainly, and never these.
_GO = re.compile(
    r"\{\{-?\s*(\.[A-Za-z]|\.\s|\$|/\*|(if|range|with|end|else|template|define|block|slice|index|currentDate)\b)"
)
_DIGEST = re.compile(r"@?(sha256[:-][0-9A-Fa-f]{64})")
_NOT_GGUF = (".safetensors", ".bin", ".pt", ".pth", ".onnx")
_CONVERT = "convert it to GGUF first (llama.cpp's convert_hf_to_gguf.py does), or pull a GGUF of the model"


@dataclass(frozen=True)
class Base:
    """What a new model begins with: its manifest so far, its header, and the file to quantize. `name` is for people."""

    name: str
    manifest: Manifest
    header: Header
    path: Path


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What is to be different. None leaves what the base has; parameters are merged, adapters come on top."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    template: str | None = None
    messages: tuple[Message, ...] | None = None
    licence_text: str | None = None
    requires: str | None = None
    draft: str | None = None
    adapters: tuple[StoredFile, ...] = ()


def base_of(store: Store, text: str, folder: Path | None) -> Base:
    """What FROM means: a digest of an uploaded file, a path (relative to `folder`), or a model's name.

    Raises NotFound, ModelNotFound, BadRequest, and BadModelFile for a file that is not sound.
    """
    digest = _DIGEST.fullmatch(text)
    if digest:
        return base_of_blob(store, digest[1], text)
    path = path_of(text, folder)
    if path is not None:
        return _base_of_path(store, _one_file(path), text)
    model = store.resolve(text)
    return Base(model.name, naming.described(model), model.header, model.path)


def base_of_files(store: Store, files: Mapping[str, str]) -> Base:
    """The base that uploaded files make, file name -> digest. Raises BadRequest, NotFound, BadModelFile."""
    for name in files:
        check_file_name(name)
    shard = next(filter(shard_of, files), None)
    if shard is not None:
        raise BadRequest(
            f"files: {shard[:60]} is one of several files of a model, which are found by names that uploads do "
            f"not keep; give the path of the first one as FROM, where the daemon runs, or join them before "
            f"(llama-gguf-split --merge)",
            field="files",
        )
    models = [name for name in files if name.lower().endswith(SUFFIX) and not is_part(name)]
    if not models:
        shown = ", ".join(name[:60] for name in files)
        raise BadRequest(f"files: no GGUF file among {shown}; {_CONVERT}", field="files")
    if len(models) > 1:
        raise BadRequest(
            f"files: {len(models)} GGUF files ({', '.join(models[:4])}); a model is one of them",
            field="files",
        )
    base = base_of_blob(store, files[models[0]], models[0])
    extra = [_projector(store, digest) for name, digest in files.items() if name != models[0]]
    said = naming.changed(base.manifest, files=(*base.manifest.files, *extra))
    return Base(base.name, said, base.header, base.path)


def base_of_blob(store: Store, digest: str, name: str) -> Base:
    """The base that one uploaded file makes. Raises NotFound when it was not uploaded, BadRequest, BadModelFile."""
    normal = check_digest(digest, field="files")
    path = blob_path(store.folder, normal)
    if not path.is_file():
        raise NotFound(f"{normal} is not here; upload it first (POST /api/blobs/{normal})", field="files")
    file = store.sound_file(path)
    stored = StoredFile(role=Role.MODEL, place=Place.BLOB, size_bytes=file.size_bytes, digest=normal)
    said = Manifest(
        name=name,
        files=(stored,),
        created_at=file.modified_at,
        source=Source(kind="create", file=name[:MAX_NAME_CHARS]),
    )
    return Base(name, said, file.header, path)


def adapter(store: Store, base: Base, text: str, folder: Path | None) -> StoredFile:
    """An adapter by digest or path. Raises NotFound, BadRequest, and BadModelFile when it is none for this model."""
    digest = _DIGEST.fullmatch(text)
    normal = check_digest(digest[1], field="adapters") if digest else ""
    if normal:
        path = blob_path(store.folder, normal)
    else:
        found = path_of(text, folder)
        if found is None:
            raise NotFound(f"there is no file {text[:200]}", field="adapters")
        path = found
    if not path.is_file():
        raise NotFound(f"the adapter {path} is not there", field="adapters")
    header = reader.read_header(path, kind="adapter")
    if header.metadata.get("adapter.type") != "lora":
        raise BadModelFile(f"{path.name} is an adapter of a kind that llama.cpp does not run; only LoRA is")
    if header.architecture != base.header.architecture:
        raise BadModelFile(
            f"{path.name} is an adapter for {header.architecture}, but '{base.name}' is {base.header.architecture}"
        )
    size_bytes = header.size_bytes
    if normal:
        return StoredFile(role=Role.ADAPTER, place=Place.BLOB, size_bytes=size_bytes, digest=normal)
    return StoredFile(role=Role.ADAPTER, place=Place.FILE, size_bytes=size_bytes, path=str(path))


def draft_name(store: Store, base: Base, text: str, folder: Path | None) -> str:
    """A draft model as it is kept: a name as it is, a path made absolute. Raises what `draft.find` raises."""
    path = path_of(text, folder)
    name = text if path is None else str(path)
    draft.find(store, name, model=base.name, target=base.header)
    return name


def assemble(base: Base, changes: Changes, *, now: datetime, quantized: StoredFile | None = None) -> Manifest:
    """The new model's manifest, still under its base's name. `quantized` takes the place of the model's own file."""
    said = base.manifest
    files = said.files
    if quantized is not None:
        files = (quantized, *(file for file in files if file.role is not Role.MODEL))

    def pick(new: Any, old: Any) -> Any:
        return old if new is None else new

    return naming.changed(
        said,
        files=(*files, *changes.adapters),
        created_at=now,
        source=_source(base),
        parameters={**said.parameters, **changes.parameters},
        system=pick(changes.system, said.system),
        template=pick(changes.template, said.template),
        messages=pick(changes.messages, said.messages),
        licence_text=pick(changes.licence_text, said.licence_text),
        requires=pick(changes.requires, said.requires),
        draft=pick(changes.draft, said.draft),
    )


def refuse_go(template: str) -> None:
    """Raises BadRequest for a template of Go, with the way out."""
    if "{%" not in template and _GO.search(template):
        raise BadRequest(
            "template: this is a Go template, which localrun does not run; leave it out to use the chat template that "
            "is in the GGUF file, or write it in Jinja, as on the model's page on the hub",
            field="template",
        )


def path_of(text: str, folder: Path | None) -> Path | None:
    """The path that a text means; None when it is no path but a name. Raises BadRequest for a relative one without
    a folder that it is relative to."""
    path = Path(text).expanduser()
    if path.is_absolute():
        return path
    if text.lower().endswith(SUFFIX) and ":" in text and ModelName.parse(text).kind is Kind.STORED:
        return None  # a file of a repository on the hub
    looks_like_one = text.startswith(("./", "../", ".\\", "..\\")) or text in (".", "..")
    looks_like_one = looks_like_one or text.lower().endswith((SUFFIX, *_NOT_GGUF))
    if folder is None and looks_like_one:
        raise BadRequest(f"'{text[:200]}' is a relative path; give the absolute path", field="from")
    if folder is not None and (looks_like_one or _is_there(folder, text)):
        return (folder / path).resolve()
    return None


def check_file_name(name: str) -> None:
    """Raises BadRequest for a name in `files` or `adapters` that would leave its folder."""
    if not name or len(name) > MAX_NAME_CHARS or "\0" in name or "\\" in name or name.startswith("/") or ":" in name:
        raise BadRequest(f"files: '{name[:60]}' is no relative file name", field="files")
    if ".." in name.split("/"):
        raise BadRequest(f"files: '{name[:60]}' climbs out of its folder", field="files")


def _is_there(folder: Path, text: str) -> bool:
    # A name and a file in the current folder that is called like it: the name is meant, unless it is a GGUF file's.
    return "/" in text and ":" not in text and (folder / text).is_file()


def _one_file(path: Path) -> Path:
    """The file itself, or the only model in a folder."""
    if path.suffix.lower() in _NOT_GGUF:
        raise BadRequest(f"{path} is not a GGUF file; {_CONVERT}", field="from")
    if not path.is_dir():
        return path
    names = sorted(entry.name for entry in path.iterdir())
    models = [name for name in names if name.lower().endswith(SUFFIX) and not is_part(name)]
    if len(models) == 1:
        return path / models[0]
    if models:
        raise BadRequest(f"{path} has {len(models)} models ({', '.join(models[:4])}); name one", field="from")
    raise BadRequest(f"{path} has no GGUF file; {_CONVERT}", field="from")


def _base_of_path(store: Store, path: Path, text: str) -> Base:
    if not path.is_file():
        raise NotFound(f"there is no file {path}", field="from")
    file = store.sound_file(path)
    files = naming.files_in_place(file.header)
    source = Source(kind="file", file=str(path))
    said = Manifest(name=path.stem, files=files, created_at=file.modified_at, source=source)
    return Base(text, said, file.header, path)


def _projector(store: Store, digest: str) -> StoredFile:
    normal = check_digest(digest, field="files")
    path = blob_path(store.folder, normal)
    if not path.is_file():
        raise NotFound(f"{normal} is not here; upload it first (POST /api/blobs/{normal})", field="files")
    header = reader.read_header(path, kind="projector")
    return StoredFile(role=Role.PROJECTOR, place=Place.BLOB, size_bytes=header.size_bytes, digest=normal)


def _source(base: Base) -> Source:
    before = base.manifest.source
    return Source(kind="create", repo=before.repo, revision=before.revision, file=base.name, url=before.url)


# --- quantizing ---------------------------------------------------------------------------------------------------

_QUANTIZATIONS = (
    *("Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS"),
    *("Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "BF16", "F16"),
)
_QUANTIZATION_NUMBERS = {name: number for number, name in FILE_TYPES.items() if name in _QUANTIZATIONS}
_UNQUANTIZED = ("F32", "F16", "BF16")


def quantization_number(name: str) -> int:
    """The number of a quantization. Raises BadRequest naming them all."""
    wanted = name.upper()
    wanted = QUANT_ALIASES.get(wanted, wanted)
    if wanted not in _QUANTIZATION_NUMBERS:
        raise BadRequest(f"quantize: '{name[:40]}' is not one of {', '.join(_QUANTIZATIONS)}", field="quantize")
    return _QUANTIZATION_NUMBERS[wanted]


def canonical_quantization(name: str) -> str:
    """The name as llama.cpp writes it. Raises BadRequest."""
    return FILE_TYPES[quantization_number(name)]


def check_quantizable(header: Header, name: str) -> None:
    """Raises BadRequest for a model that was quantized already."""
    if header.quantization not in _UNQUANTIZED:
        raise BadRequest(
            f"quantize: '{name}' is {header.quantization} already, and quantizing twice loses much more than once; "
            f"begin with an F16, BF16 or F32 file of it",
            field="quantize",
        )


def quantized_bytes(header: Header, name: str) -> int:
    """About what the quantized file takes, rather too much: some tensors keep more bits than the rest."""
    kind = canonical_quantization(name)
    for type_name in (kind, kind.rpartition("_")[0]):
        with contextlib.suppress(KeyError):
            chosen = by_name(type_name)
            size_bytes = header.n_params * chosen.block_bytes // chosen.block_elements
            return min(header.size_bytes, size_bytes * 5 // 4 + header.data_offset)
    return header.size_bytes
