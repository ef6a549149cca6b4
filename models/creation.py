"""Makes the manifest of a new model from an existing one, or from files, and what is to be different about it.

Used by the daemon's threads. Nothing is copied: a model made of another shares its files, a model made of a GGUF file
uses it in place, and uploaded files are blobs already. Every file is checked before it is named: headers are read,
adapters and projectors must fit the model. An adapter alone gets a name in the same way. Quantizations are those that
llama.cpp makes well without a calibration text.

Does not: write the manifest (naming.py), quantize (the daemon starts a process for it), or check parameters' limits.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from localrun.config import MAX_ADAPTERS
from localrun.errors import BadModelFile, BadRequest, LocalrunError, NotFound
from localrun.models import draft, naming
from localrun.models.gguf import projectors, reader
from localrun.models.gguf.adapter_header import check_finite, misfit
from localrun.models.gguf.header import FileKind, Header
from localrun.models.gguf.reader import shard_of
from localrun.models.gguf.tables import BY_NAME, FILE_TYPES, QUANT_ALIASES
from localrun.models.name import MAX_NAME_CHARS, Kind, ModelName
from localrun.models.storage.manifest import Manifest, Message, Place, Role, Source, StoredFile, blob_path, check_digest
from localrun.models.storage.model_files import SUFFIX, is_part
from localrun.models.storage.store import Store
from localrun.stored import open_regular

# A template of Go, as Ollama's models have them; a Jinja template has `{%` almost certainly, and never these.
_GO = re.compile(
    r"\{\{-?\s*(\.[A-Za-z]|\.\s|\$|/\*|(if|range|with|end|else|template|define|block|slice|index|currentDate)\b)"
)
_DIGEST = re.compile(r"@?(sha256[:-][0-9A-Fa-f]{64})")
_NOT_GGUF = (".safetensors", ".bin", ".pt", ".pth", ".onnx")
_FIRST_BYTES = 64 * 1024
_CONVERT = "convert it to GGUF first (llama.cpp's convert_hf_to_gguf.py does), or pull a GGUF of the model"
_CONVERT_ADAPTER = "convert it to GGUF first (llama.cpp's convert_lora_to_gguf.py does)"


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
    projector: tuple[StoredFile, ...] | None = None


def base_of(store: Store, text: str, folder: Path | None) -> Base:
    """What FROM means: a digest of an uploaded file, a path (relative to `folder`), or a model's name.

    Raises NotFound, ModelNotFound, BadRequest, and BadModelFile for a file that is not sound.
    """
    digest = _DIGEST.fullmatch(text)
    if digest:
        return base_of_blob(store, digest[1], text)
    path = path_of(text, folder)
    if path is not None:
        return _base_of_path(store, _one_file(path))
    model = store.resolve(text)
    return Base(model.name, naming.described(model), model.header, model.path)


def base_of_files(store: Store, files: Mapping[str, str]) -> Base:
    """The base that uploaded files make, file name -> digest. Raises BadRequest, NotFound, BadModelFile."""
    for name in files:
        check_file_name(name)
    shard = next(filter(shard_of, files), None)
    if shard is not None:
        raise BadRequest.of(
            "files",
            f"{shard[:60]} is one of several files of a model, which are found by names that uploads do "
            f"not keep; give the path of the first one as FROM, where the daemon runs, or join them before "
            f"(llama-gguf-split --merge)",
        )
    models = [name for name in files if name.lower().endswith(SUFFIX) and not is_part(name)]
    if len(models) > 1:
        models = [name for name in models if not _is_projector(store, files[name])]
    if not models:
        shown = ", ".join(name[:60] for name in files)
        raise BadRequest.of("files", f"no GGUF file among {shown}; {_CONVERT}")
    if len(models) > 1:
        raise BadRequest.of("files", f"{len(models)} GGUF files ({', '.join(models[:4])}); a model is one of them")
    base = base_of_blob(store, files[models[0]], models[0])
    extra = [projector(store, base, digest, None) for name, digest in files.items() if name != models[0]]
    if len(extra) > 1:
        raise BadRequest.of("files", f"{len(extra)} projectors; a model has one")
    said = msgspec.structs.replace(base.manifest, files=(*base.manifest.files, *extra))
    return Base(base.name, said, base.header, base.path)


def base_of_blob(store: Store, digest: str, name: str) -> Base:
    """The base that one uploaded file makes. Raises NotFound when it was not uploaded, BadRequest, BadModelFile."""
    normal = check_digest(digest, field="files")
    path = blob_path(store.folder, normal)
    if not path.is_file():
        raise NotFound(f"{normal} is not here; upload it first (POST /api/blobs/{normal})", field="files")
    file = store.sound_file(path)
    files, source = (_stored(Role.MODEL, file.header, normal),), Source(kind="create", file=name[:MAX_NAME_CHARS])
    return Base(name, Manifest(name=name, files=files, created_at=file.modified_at, source=source), file.header, path)


def adapters(store: Store, base: Base, texts: Sequence[str], folder: Path | None) -> tuple[StoredFile, ...]:
    """Those that come on top of the base's, as `adapter_file` finds them. Raises BadModelFile for one that does not
    fit the model, or has NaN or infinite numbers, too, and BadRequest for one that the model would have twice, and for
    too many. Hashes files whose digest is not known."""
    its = base.manifest.of_role(Role.ADAPTER)
    seen = {store.adapter_sha256(file) for file in its}
    found = []
    for text in texts:
        file, header = adapter_file(store, text, folder)
        if problem := misfit(header, base.header):
            raise BadModelFile(f"{header.path.name} cannot be used with '{base.name}': it {problem}")
        check_finite(header)
        found.append(file)
        sha256 = store.adapter_sha256(file)
        if sha256 in seen:
            raise BadRequest(f"the model would have the adapter '{text[:200]}' twice", field="adapters")
        seen.add(sha256)
    if len(its) + len(found) > MAX_ADAPTERS:
        raise BadRequest(
            f"the model would have {len(its) + len(found)} adapters; the limit is {MAX_ADAPTERS}", field="adapters"
        )
    return tuple(found)


def adapter_file(store: Store, text: str, folder: Path | None) -> tuple[StoredFile, Header]:
    """An adapter by digest, path or name. Raises NotFound, BadRequest, and BadModelFile for a file that is none."""
    if not _DIGEST.fullmatch(text) and path_of(text, folder) is None:
        named = store.adapter(text, field="adapters")
        return named.file, named.header
    path, normal = _part(store, text, folder, "adapter", "adapters")
    header = store.sound_file(path, FileKind.ADAPTER).header
    return _stored(Role.ADAPTER, header, normal), header


def named_adapter(store: Store, text: str, folder: Path | None, *, licence_text: str | None, now: datetime) -> Manifest:
    """The manifest of an adapter that gets a name of its own. Raises what `adapter_file` raises, and BadModelFile for
    NaN or infinite numbers."""
    file, header = adapter_file(store, text, folder)
    check_finite(header)
    source = Source(kind="create", file=text[:MAX_NAME_CHARS] if file.place is Place.BLOB else str(header.path))
    return Manifest(
        name=header.path.stem, files=(file,), created_at=now, source=source, licence_text=licence_text or ""
    )


def is_adapter(store: Store, text: str, folder: Path | None) -> bool:
    """Whether FROM means an adapter, which has a file or a name like a model. What it does not mean is said later."""
    with contextlib.suppress(LocalrunError):
        adapter_file(store, text, folder)
        return True
    return False


def projector(store: Store, base: Base, text: str, folder: Path | None) -> StoredFile:
    """A projector by digest or path. Raises NotFound, BadRequest, and BadModelFile when it is none for this model."""
    path, normal = _part(store, text, folder, "projector", "files")
    header = reader.read_header(path, kind="projector")
    if problem := projectors.fit_problem(header, base.header):
        raise BadModelFile(f"{path.name} {problem}")
    return _stored(Role.PROJECTOR, header, normal)


def _part(store: Store, text: str, folder: Path | None, what: str, field: str) -> tuple[Path, str]:
    """The file that a text means, and its digest if it is an uploaded one. Raises NotFound and BadRequest."""
    digest = _DIGEST.fullmatch(text)
    normal = check_digest(digest[1], field=field) if digest else ""
    path = blob_path(store.folder, normal) if normal else path_of(text, folder)
    if path is None:
        raise NotFound(f"there is no file {text[:200]}", field=field)
    if what == "adapter":
        path = _one_file(path, field=field, way_out=_CONVERT_ADAPTER)
    if path.is_dir():
        raise BadRequest(f"the {what} {path} is a folder; name the GGUF file in it", field=field)
    if not path.is_file():
        way_out = f"; upload it first (POST /api/blobs/{normal})" if normal else ""
        raise NotFound(f"the {what} {normal or path} is not there{way_out}", field=field)
    return path, normal


def _stored(role: Role, header: Header, digest: str) -> StoredFile:
    if digest:
        return StoredFile(role=role, place=Place.BLOB, size_bytes=header.size_bytes, digest=digest)
    return StoredFile(role=role, place=Place.FILE, size_bytes=header.size_bytes, path=str(header.path))


def _is_projector(store: Store, digest: str) -> bool:
    """By the first entries of an uploaded file; what is not there, or no GGUF file, is none."""
    path = blob_path(store.folder, check_digest(digest, field="files"))
    try:
        with open_regular(path) as file:
            entries = reader.first_entries(file.read(_FIRST_BYTES))
    except OSError:
        return False
    return entries.get("general.architecture") == "clip"


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
    if changes.projector is not None:
        files = (*(file for file in files if file.role is not Role.PROJECTOR), *changes.projector)

    def pick(new: Any, old: Any) -> Any:
        return old if new is None else new

    return msgspec.structs.replace(
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
        no_projector="" if changes.projector else said.no_projector,
    )


def is_go(template: str) -> bool:
    """Whether it is a template of Go."""
    return "{%" not in template and _GO.search(template) is not None


def path_of(text: str, folder: Path | None) -> Path | None:
    """The path that a text means; None when it is no path but a name. Raises BadRequest for a relative one without
    a folder that it is relative to."""
    if os.sep == "/" and "\\ " in text and not os.path.exists(text):
        text = text.replace("\\ ", " ")  # as terminals write a blank when a file is dropped on them
    path = Path(text).expanduser()
    if path.is_absolute():
        return path
    if text.lower().endswith(SUFFIX) and ":" in text and ModelName.parse(text).kind is Kind.STORED:
        return None  # a file of a repository on the hub
    looks_like_one = text.startswith(("./", "../", ".\\", "..\\")) or text in (".", "..")
    looks_like_one = looks_like_one or text.lower().endswith((SUFFIX, "/", *_NOT_GGUF))
    if folder is None and looks_like_one:
        raise BadRequest(f"'{text[:200]}' is a relative path; give the absolute path", field="from")
    if folder is not None and (looks_like_one or _is_there(folder, text)):
        return (folder / path).resolve()
    return None


def check_file_name(name: str) -> None:
    """Raises BadRequest for a name in `files` or `adapters` that would leave its folder."""
    if not name or len(name) > MAX_NAME_CHARS or "\0" in name or "\\" in name or name.startswith("/") or ":" in name:
        raise BadRequest.of("files", f"'{name[:60]}' is no relative file name")
    if ".." in name.split("/"):
        raise BadRequest.of("files", f"'{name[:60]}' climbs out of its folder")


def _is_there(folder: Path, text: str) -> bool:
    # A name and a file in the current folder that is called like it: the name is meant, unless it is a GGUF file's.
    return "/" in text and ":" not in text and (folder / text).is_file()


def _one_file(path: Path, *, field: str = "from", way_out: str = _CONVERT) -> Path:
    """The file itself, or the only model in a folder."""
    if path.suffix.lower() in _NOT_GGUF:
        raise BadRequest(f"{path} is not a GGUF file; {way_out}", field=field)
    if not path.is_dir():
        return path
    names = sorted(entry.name for entry in path.iterdir())
    models = [name for name in names if name.lower().endswith(SUFFIX) and not is_part(name)]
    if len(models) == 1:
        return path / models[0]
    if models:
        raise BadRequest(f"{path} has {len(models)} GGUF files ({', '.join(models[:4])}); name one", field=field)
    raise BadRequest(f"{path} has no GGUF file; {way_out}", field=field)


def _base_of_path(store: Store, path: Path) -> Base:
    if not path.is_file():
        raise NotFound(f"there is no file {path}", field="from")
    file = store.sound_file(path)
    files = naming.files_in_place(file.header, store.projector_for(path, file.header))
    source = Source(kind="file", file=str(path))
    said = Manifest(name=path.stem, files=files, created_at=file.modified_at, source=source)
    return Base(str(path), said, file.header, path)


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
        raise BadRequest.of("quantize", f"'{name[:40]}' is not one of {', '.join(_QUANTIZATIONS)}")
    return _QUANTIZATION_NUMBERS[wanted]


def canonical_quantization(name: str) -> str:
    """The name as llama.cpp writes it. Raises BadRequest."""
    return FILE_TYPES[quantization_number(name)]


def check_quantizable(header: Header, name: str) -> None:
    """Raises BadRequest for a model that was quantized already."""
    if header.quantization not in _UNQUANTIZED:
        raise BadRequest.of(
            "quantize",
            f"'{name}' is {header.quantization} already, and quantizing twice loses much more than once; "
            f"begin with an F16, BF16 or F32 file of it",
        )


def quantized_bytes(header: Header, name: str) -> int:
    """About what the quantized file takes, rather too much: some tensors keep more bits than the rest."""
    kind = canonical_quantization(name)
    for type_name in (kind, kind.rpartition("_")[0]):
        with contextlib.suppress(KeyError):
            chosen = BY_NAME[type_name]
            size_bytes = header.n_params * chosen.block_bytes // chosen.block_elements
            return min(header.size_bytes, size_bytes * 5 // 4 + header.data_offset)
    return header.size_bytes
