"""Reads and checks a GGUF header before any C code sees the file.

Runs in the daemon, on files that nobody has vouched for. Every count, length, type, dimension and extent is checked
against the file's size and against the limits below before it is used, so a hostile header costs less than 64 MiB and a
second. Parsing is iterative, and big arrays are passed over, not kept.

The format is that of llama.cpp's gguf.cpp: versions 2 and 3, little-endian. What llama.cpp refuses is refused here.
Stricter than llama.cpp: the limits, and tensors without any element (a zero among the dimensions), because no converter
writes them and C code divides by dimensions; a tensor with no dimensions at all is one number, as there. Files that
cannot run as a language model by themselves are refused by name where a model is asked for: projectors, adapters, and
all but the first file of a split model. With the first come all others, which llama.cpp finds by its name,
`NAME-00001-of-00003.gguf` (`llama_split_path`); the limits are for all of them together.

A *card* is a file's beginning, up to its tensors' data (`card_bytes`): all that is read here, and nothing that an
engine could load.

Does not: judge whether the vocabulary makes sense. That is found out when the engine process loads the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from localrun.errors import BadModelFile
from localrun.models.gguf import projectors, tables
from localrun.models.gguf.bounded_reader import MAX_HEADER_BYTES, BoundedReader, open_model_file
from localrun.models.gguf.header import (
    ADAPTERS,
    ArraySummary,
    FileKind,
    Header,
    Scalar,
    TensorInfo,
    Value,
    dimension_problem,
    kind_of,
)

# Published models have at most some hundred; each costs an open file in the engine.
MAX_SHARDS = 1_000

_NUMBERED = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.IGNORECASE)


class Shard(NamedTuple):
    """What a file's name says of it: the `number`th (from 1) of the `n_files` files of the model `stem`."""

    stem: str
    number: int
    n_files: int

    @property
    def name(self) -> str:
        """As llama.cpp writes it, and looks for it."""
        return f"{self.stem}-{self.number:05}-of-{self.n_files:05}.gguf"


def shard_of(name: str) -> Shard | None:
    """By the customs of the hub, in any case; None for a file that is a model by itself."""
    numbered = _NUMBERED.fullmatch(name)
    return Shard(numbered[1], int(numbered[2]), int(numbered[3])) if numbered else None


class Split(NamedTuple):
    """What a file says of itself: the `number`th of `n_shards`, from 0, and `n_tensors` in all of them together."""

    number: int
    n_shards: int
    n_tensors: int


def split_of(metadata: Mapping[str, Value]) -> Split | None:
    """The file's place in a split model; None for a model in one file."""
    number, n_shards, n_tensors = (metadata.get(f"split.{key}", 0) for key in ("no", "count", "tensors.count"))
    if not isinstance(n_shards, int) or not isinstance(number, int) or not isinstance(n_tensors, int) or n_shards <= 1:
        return None
    return Split(number, n_shards, n_tensors)


def shard_problem(path: Path, split: Split) -> str | None:
    """Why the file at `path` cannot be opened as the first of its model, as the end of a sentence; None if it can."""
    named = shard_of(path.name)
    if split.n_shards > MAX_SHARDS:
        return f"is one of {split.n_shards} files of a model; the limit is {MAX_SHARDS}"
    if split.number:
        first = shard_paths(path, split)[0].name if named else "the one whose name ends in -00001"
        return f"is file {split.number + 1} of {split.n_shards} of a model; open the first one, {first}"
    if named is None or path.name != Shard(named.stem, 1, split.n_shards).name:
        return (
            f"is the first of {split.n_shards} files of a model, but its name does not end in "
            f"-00001-of-{split.n_shards:05}.gguf, by which the others are found; give all their own names back, or "
            f"join them with `llama-gguf-split --merge`"
        )
    return None


def later_shards(path: Path) -> list[Path]:
    """The other files of the model whose first file `path` is by its name; none for other names."""
    named = shard_of(path.name)
    if named is None or named.number != 1 or named.n_files > MAX_SHARDS or path.name != named.name:
        return []
    return shard_paths(path, Split(0, named.n_files, 0))[1:]


def shard_paths(path: Path, split: Split) -> list[Path]:
    """All files of the model that the numbered file `path` belongs to, in order."""
    stem = path.name[: -len("-00001-of-00001.gguf")]
    return [path.with_name(Shard(stem, number, split.n_shards).name) for number in range(1, split.n_shards + 1)]


# The richest headers known have 800,000 strings (a vocabulary of 262,144 with its merges), 100 entries, 2,000 tensors.
MAX_ARRAY_STRINGS: Final = 2_000_000
MAX_ENTRIES: Final = 4_096
MAX_TENSORS: Final = 16_384
# GGML_MAX_NAME and GGML_MAX_DIMS in ggml.h.
MAX_TENSOR_NAME_BYTES: Final = 63
MAX_DIMENSIONS: Final = 4
# Metadata that stays in memory, all together, and the longest text and array that do.
MAX_KEPT_BYTES: Final = 4 * 1024 * 1024
MAX_KEPT_TEXT_BYTES: Final = 1024 * 1024
MAX_KEPT_ELEMENTS: Final = 1_024

_MAGIC = b"GGUF"
_MODEL: Final = frozenset({FileKind.MODEL})
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32

# About what one element of a tuple takes in Python.
_ELEMENT_BYTES = 64

# enum gguf_type in gguf.h: those that are asked for, the two that need more than a struct, then number -> (name, struct
# code).
_U16 = 2
_F32 = 6
_STRING = 8
_ARRAY = 9
_SCALARS: dict[int, tuple[str, str]] = {
    0: ("u8", "B"), 1: ("i8", "b"), 2: ("u16", "H"), 3: ("i16", "h"), 4: ("u32", "I"), 5: ("i32", "i"),
    6: ("f32", "f"), 7: ("bool", "?"), 10: ("u64", "Q"), 11: ("i64", "q"), 12: ("f64", "d"),
}  # fmt: skip


def read_header(path: Path, *, kind: str = FileKind.MODEL, sizes: Mapping[str, int] | None = None) -> Header:
    """The checked header of a model file, and of all files of a split model whose first file it is.

    `kind` is what the file has to be: a model, or a part for one (adapter, projector), which has no dimensions. What a
    projector needs instead is checked by projectors.py. A control vector counts as an adapter. With `sizes`, the bytes
    of whole files by the names that they have here, these are cards.
    Raises BadModelFile that names the file and what is wrong with it.
    """
    return _header(path, frozenset({kind}) if kind != FileKind.ADAPTER else ADAPTERS, sizes or {})


def read_named(path: Path) -> Header:
    """As `read_header`, of whatever may have a name: a model or an adapter."""
    return _header(path, ADAPTERS | {FileKind.MODEL}, {})


def card_bytes(path: Path) -> int:
    """How long the card of a file is, of any kind. Raises BadModelFile."""
    with open_model_file(path) as reader:
        parser = _Parser(reader, _MODEL, _Budget())
        parser.tensors(parser.beginning()[1], set())
        return reader.position


def _header(path: Path, kinds: frozenset[str], sizes: Mapping[str, int]) -> Header:
    budget = _Budget()
    with open_model_file(path, size_bytes=sizes.get(path.name)) as reader:
        header = _Parser(reader, kinds, budget).header(path)
    split = split_of(header.metadata)
    return header if split is None or header.kind != FileKind.MODEL else _joined(header, split, budget, sizes)


def first_entries(content: bytes) -> dict[str, Value]:
    """The metadata in a file's first bytes: what is whole there, up to the end or to whatever is wrong."""
    parser = _Parser(BoundedReader(Path("beginning.gguf"), io.BytesIO(content), len(content)), _MODEL, _Budget())
    with contextlib.suppress(BadModelFile):
        parser.beginning()
    return parser.metadata


def _joined(first: Header, split: Split, budget: _Budget, sizes: Mapping[str, int]) -> Header:
    """The header of a model in several files. Raises BadModelFile."""
    paths = shard_paths(first.path, split)
    missing = [path.name for path in paths[1:] if not path.exists()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise BadModelFile(
            f"{first.path.name} is the first of {split.n_shards} files of a model, of which {shown} "
            f"{'is' if len(missing) == 1 else 'are'} missing beside it; pull the model again"
        )
    tensors, size_bytes = list(first.tensors), first.size_bytes
    names = {tensor.name for tensor in tensors}
    for number, path in enumerate(paths[1:], start=1):
        with open_model_file(path, budget.header_bytes, size_bytes=sizes.get(path.name)) as reader:
            tensors += _Parser(reader, _MODEL, budget).shard(split._replace(number=number), names)
            size_bytes += reader.size_bytes
    if len(tensors) != split.n_tensors:
        raise BadModelFile(
            f"{first.path.name} is the first of {split.n_shards} files with {split.n_tensors} tensors, but they have "
            f"{len(tensors)}; they are not all of the same model"
        )
    return dataclasses.replace(first, size_bytes=size_bytes, tensors=tuple(tensors), shard_paths=tuple(paths))


class _Budget:
    """What is left of the limits, for all files of a model together."""

    def __init__(self) -> None:
        self.tensors = MAX_TENSORS
        self.entries = MAX_ENTRIES
        self.array_strings = MAX_ARRAY_STRINGS
        self.kept_bytes = MAX_KEPT_BYTES
        self.header_bytes = MAX_HEADER_BYTES


class _Parser:
    """One pass over one file: preamble, metadata, tensor descriptions."""

    def __init__(self, reader: BoundedReader, kinds: frozenset[str], budget: _Budget) -> None:
        self._reader = reader
        self._kinds = kinds
        self._types = projectors.KEY_TYPES if FileKind.PROJECTOR in kinds else {}
        self._budget = budget
        self.metadata: dict[str, Value] = {}

    def header(self, path: Path) -> Header:
        version, n_tensors = self.beginning()
        metadata = self.metadata
        split, is_model = split_of(metadata), kind_of(metadata) == FileKind.MODEL
        # Later files of a split model do not even say their architecture.
        if FileKind.MODEL in self._kinds and is_model and split and (problem := shard_problem(path, split)):
            self._reader.fail(problem)
        architecture = self._architecture(metadata)
        tensors, data_offset = self.tensors(n_tensors, set())
        if is_model and (problem := dimension_problem(architecture, metadata)):
            # Other programs' files, of pictures or sound, say nothing of a language model.
            self._reader.fail(tables.problem(metadata) or f"cannot be used: {problem}")
        if FileKind.PROJECTOR in self._kinds and (problem := projectors.problem(metadata, tensors)):
            self._reader.fail(problem)
        return Header(
            path=path,
            size_bytes=self._reader.size_bytes,
            version=version,
            architecture=architecture,
            metadata=metadata,
            tensors=tensors,
            data_offset=data_offset,
        )

    def shard(self, expected: Split, names: set[str]) -> tuple[TensorInfo, ...]:
        """Tensors of a further file, which has only to say which one it is. `names` are known tensors, and grow."""
        _, n_tensors = self.beginning()
        metadata = self.metadata
        # As in llama.cpp, only the first file has to know how many tensors there are.
        if metadata.get("split.no") != expected.number or metadata.get("split.count") != expected.n_shards:
            self._reader.fail(f"does not say that it is file {expected.number + 1} of {expected.n_shards} of its model")
        return self.tensors(n_tensors, names)[0]

    def beginning(self) -> tuple[int, int]:
        """The version and the number of tensors; fills `metadata`."""
        version = self._version()
        n_tensors = self._count("the number of tensors", self._budget.tensors)
        n_entries = self._count("the number of metadata entries", self._budget.entries)
        self._budget.tensors -= n_tensors
        self._budget.entries -= n_entries
        for _ in range(n_entries):
            key = self._key(self.metadata)
            self.metadata[key] = self._value(key[:80])
        return version, n_tensors

    def _version(self) -> int:
        magic = self._reader.take(len(_MAGIC), "the magic bytes")
        if magic == b"vers":
            self._reader.fail("is a pointer of Git LFS and not the file itself; `git lfs pull` in its folder gets that")
        if magic.startswith(b"<"):
            self._reader.fail("is a web page and not the file itself; `localrun pull` takes its address")
        if magic != _MAGIC:
            self._reader.fail("is not a GGUF file: it does not begin with 'GGUF'")
        version = self._reader.u32("the version")
        if version and version & 0xFFFF == 0:
            self._reader.fail("is byte-swapped (made for a big-endian machine); convert it again for this one")
        if version not in _VERSIONS:
            self._reader.fail(f"has GGUF version {version}; versions 2 and 3 can be read")
        return version

    # --- metadata ---------------------------------------------------------------------------------------------------

    def _key(self, known: dict[str, Value]) -> str:
        key = self._name("a metadata key", MAX_KEPT_TEXT_BYTES)
        if not key:
            self._reader.fail("has a metadata entry without a key")
        if key in known:
            self._reader.fail(f"has the metadata key '{key[:80]}' twice")
        self._keep(len(key))
        return key

    def _value(self, key: str) -> Value:
        kind = self._reader.u32(f"the type of '{key}'")
        if kind == _ARRAY:
            return self._array(key)
        if kind == _STRING:
            self._check_type(key, "str")
            return self._text(key)
        if kind not in _SCALARS:
            self._reader.fail(f"has the unknown value type {kind} for '{key}'")
        self._check_type(key, _SCALARS[kind][0])
        # llama.cpp reads these without a look at their type, and ends the process if it is another one.
        if key == "split.no" and kind != _U16:
            self._reader.fail("has a 'split.no' that is no 16-bit number")
        if key == "adapter.lora.alpha" and kind != _F32:
            self._reader.fail("has an 'adapter.lora.alpha' that is no 32-bit float")
        return self._scalars(kind, 1, key)[0]

    def _check_type(self, key: str, found: str) -> None:
        """libmtmd reads the keys of a projector without a look at their types, and ends the process for another one."""
        wanted = self._types.get(key, found)
        if wanted != found:
            self._reader.fail(f"has a value of the type {found} for '{key}'; llama.cpp reads {wanted} there")

    def _scalars(self, kind: int, count: int, key: str) -> tuple[Scalar, ...]:
        layout = struct.Struct(f"<{count}{_SCALARS[kind][1]}")
        return layout.unpack(self._reader.take(layout.size, f"the value of '{key}'"))

    def _text(self, key: str) -> str | ArraySummary:
        length = self._reader.u64(f"the length of '{key}'")
        offset = self._reader.position
        if length > MAX_KEPT_TEXT_BYTES:
            self._reader.skip(length, f"the text of '{key}'")
            return ArraySummary("u8", length, offset)
        self._keep(length)
        return self._reader.take(length, f"the text of '{key}'").decode("utf-8", errors="replace")

    def _array(self, key: str) -> Value:
        kind = self._reader.u32(f"the element type of '{key}'")
        length = self._reader.u64(f"the length of '{key}'")
        offset = self._reader.position
        if kind == _ARRAY:
            self._reader.fail(f"has arrays inside the array '{key}', which no GGUF reader supports")
        if kind != _STRING and kind not in _SCALARS:
            self._reader.fail(f"has the unknown element type {kind} for the array '{key}'")
        self._check_type(key, f"[{'str' if kind == _STRING else _SCALARS[kind][0]}]")
        # The vocabulary is always left in the file, however small, so that its users find it in one shape.
        if length <= MAX_KEPT_ELEMENTS and not key.startswith("tokenizer."):
            self._keep(length * _ELEMENT_BYTES)
            return self._scalars(kind, length, key) if kind != _STRING else self._texts(length, key)
        if kind == _STRING:
            self._budget.array_strings -= length
            if self._budget.array_strings < 0:
                self._reader.fail(f"has more than {MAX_ARRAY_STRINGS} texts in its arrays (at '{key}')")
            self._reader.skip_strings(length, f"'{key}'")
            return ArraySummary("str", length, offset)
        name, code = _SCALARS[kind]
        self._reader.skip(length * struct.calcsize(f"<{code}"), f"'{key}'")
        return ArraySummary(name, length, offset)

    def _texts(self, count: int, key: str) -> tuple[str, ...]:
        texts = []
        for _ in range(count):
            text = self._text(key)
            if isinstance(text, ArraySummary):
                self._reader.fail(f"has a text of {text.length} bytes in '{key}'; the limit is {MAX_KEPT_TEXT_BYTES}")
            texts.append(text)
        return tuple(texts)

    def _architecture(self, metadata: dict[str, Value]) -> str:
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            self._reader.fail("does not say its architecture ('general.architecture')")
        kind = kind_of(metadata)
        if kind not in self._kinds and FileKind.MODEL in self._kinds:
            self._reader.fail(f"is not a language model but a part for one ({kind[:40]})")
        if kind not in self._kinds:
            self._reader.fail(f"is no {min(self._kinds)} but a {kind[:40]}")
        return architecture

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            self._reader.fail(f"has the alignment {str(alignment)[:40]}, which is not a power of two")
        return alignment

    # --- tensors ----------------------------------------------------------------------------------------------------

    def tensors(self, n_tensors: int, names: set[str]) -> tuple[tuple[TensorInfo, ...], int]:
        """Tensor descriptions, and where the data begins. Takes the header's bytes off the budget.

        Offsets in the file must follow each other without gaps, as llama.cpp requires.
        """
        described = []
        alignment, expected = self._alignment(), 0
        for _ in range(n_tensors):
            name = self._name("a tensor's name", MAX_TENSOR_NAME_BYTES)
            if name in names:
                self._reader.fail(f"has the tensor '{name}' twice")
            names.add(name)
            shape = self._shape(name)
            type_name, size_bytes = self._type_and_size(name, shape)
            offset = self._reader.u64(f"the offset of '{name}'")
            if offset != expected:
                self._reader.fail(f"has the tensor '{name}' at offset {offset}; expected {expected}")
            expected = _padded(offset + size_bytes, alignment)
            described.append((name, shape, type_name, offset, size_bytes))
        data_offset = _padded(self._reader.position, alignment)
        end = data_offset + expected
        if described:
            # The padding after the last tensor may be missing.
            end = data_offset + described[-1][3] + described[-1][4]
        if end > self._reader.size_bytes:
            self._reader.fail(
                f"is truncated: its tensors end at byte {end}, but the file has {self._reader.size_bytes}"
            )
        self._budget.header_bytes -= self._reader.position
        tensors = tuple(TensorInfo(name, s, kind, data_offset + at, size) for name, s, kind, at, size in described)
        return tensors, data_offset

    def _shape(self, name: str) -> tuple[int, ...]:
        n_dimensions = self._reader.u32(f"the number of dimensions of '{name}'")
        if n_dimensions > MAX_DIMENSIONS:
            self._reader.fail(f"has the tensor '{name}' with {n_dimensions} dimensions; the limit is {MAX_DIMENSIONS}")
        shape = tuple(self._reader.u64(f"a dimension of '{name}'") for _ in range(n_dimensions))
        if 0 in shape:
            self._reader.fail(f"has the tensor '{name}' without elements: its shape is {shape}")
        return shape or (1,)

    def _type_and_size(self, name: str, shape: tuple[int, ...]) -> tuple[str, int]:
        """Type name and size in bytes. Python's integers do not overflow, and the file's size is the limit."""
        number = self._reader.u32(f"the type of '{name}'")
        if number not in tables.BY_NUMBER:
            self._reader.fail(f"has the tensor '{name}' of the unknown type {number}")
        tensor_type = tables.BY_NUMBER[number]
        row_elements, block_elements = shape[0], tensor_type.block_elements
        if row_elements % block_elements:
            self._reader.fail(
                f"has the tensor '{name}' with rows of {row_elements}; {tensor_type.name} needs a multiple of "
                f"{block_elements}"
            )
        size_bytes = row_elements // block_elements * tensor_type.block_bytes
        for dimension in shape[1:]:
            size_bytes *= dimension
        if size_bytes > self._reader.size_bytes:
            self._reader.fail(f"is truncated: the tensor '{name}' alone has {size_bytes} bytes")
        return tensor_type.name, size_bytes

    # --- limits -----------------------------------------------------------------------------------------------------

    def _count(self, what: str, limit: int) -> int:
        count = self._reader.u64(what)
        if count > limit:
            self._reader.fail(f"says that {what} is {count}; the limit is {limit}")
        return count

    def _name(self, what: str, limit_bytes: int) -> str:
        length = self._reader.u64(f"the length of {what}")
        if length > limit_bytes:
            self._reader.fail(f"has {what} of {length} bytes; the limit is {limit_bytes}")
        try:
            return self._reader.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            self._reader.fail(f"has {what} that is not UTF-8")

    def _keep(self, n_bytes: int) -> None:
        self._budget.kept_bytes -= n_bytes
        if self._budget.kept_bytes < 0:
            self._reader.fail(f"has more than {MAX_KEPT_BYTES} bytes of metadata besides its vocabulary")


def _padded(position: int, alignment: int) -> int:
    return (position + alignment - 1) & -alignment
