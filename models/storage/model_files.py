"""GGUF files as they lie on the disk: which ones a folder has, and what their headers say.

Used by the daemon's threads. Folders are read anew on every call, so a file that is copied in or deleted is seen at
once; headers are parsed once per (path, size, modification time), also those of damaged files.

Does not: read weights, or know names of models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableSequence, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from localrun.errors import BadModelFile
from localrun.models.gguf import reader, tables
from localrun.models.gguf.adapter_header import facts_of
from localrun.models.gguf.header import ADAPTERS, FileKind, Header
from localrun.models.gguf.reader import shard_of
from localrun.models.quant_choice import is_projector
from localrun.stored import FileStamp

SUFFIX = ".gguf"
NAMED = "named"
# How many entries of a foreign folder are looked at, those of its upper folders first.
MAX_ENTRIES = 20_000

# Files whose headers are remembered; a header takes some hundred kilobytes at most. With more files than this every
# list reads all of them again.
_MAX_KNOWN = 2048
_LAST_SECOND = datetime.max.replace(tzinfo=UTC).timestamp() - 1


# Of a model's first file, and of its other shards.
_Stamps = tuple[FileStamp | None, ...]


class ModelFile(NamedTuple):
    """A sound file, of a model or of an adapter."""

    path: Path
    size_bytes: int
    modified_at: datetime
    header: Header

    @property
    def is_adapter(self) -> bool:
        return self.header.kind in ADAPTERS


class ModelFiles:
    """Headers by path. One object serves all threads."""

    def __init__(self) -> None:
        # Each entry is replaced as a whole: two threads that meet a new file both parse it, which is harmless.
        self._known: dict[tuple[Path, str], tuple[_Stamps, ModelFile | BadModelFile]] = {}

    def load(self, path: Path, kind: str = NAMED) -> ModelFile | None:
        """The file at `path`, from memory when it is still the same; None when there is none. `kind` is what it has to
        be, as in `reader.read_header`; `NAMED` is what can have a name, a model or an adapter.

        Raises BadModelFile, from memory as well: a hostile header is not parsed again for every listing.
        """
        try:
            first = FileStamp.of(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise BadModelFile(f"{path.name} cannot be read: {error.strerror or error}") from error
        stamp = first, *map(FileStamp.found, reader.later_shards(path))
        known = self._known.get((path, kind))
        if known is None or known[0] != stamp:
            known = (stamp, _inspect(path, kind, first.modified_ns / 1e9))
            self._known[path, kind] = known
            while len(self._known) > _MAX_KNOWN:
                self._known.pop(next(iter(self._known)), None)
        if isinstance(known[1], BadModelFile):
            raise BadModelFile(known[1].message)
        return known[1]


def in_folder(folder: Path) -> Sequence[tuple[Path, str]]:
    """The folder's own `.gguf` entries as (path, name without the ending), by name. Parts of models are left out."""
    try:
        entries = sorted(os.listdir(folder))
    except OSError:
        return ()
    models = [entry for entry in entries if is_gguf(entry) and not is_part(entry)]
    return [(folder / entry, _stem(entry)) for entry in models]


def below_folder(folder: Path, too_full: MutableSequence[Path] | None = None) -> Iterator[tuple[Path, str]]:
    """As `in_folder`, sub-folders included, for a folder that another program fills. Parts of models are left out. The
    folder is added to `too_full` if it has more entries than are looked at."""
    waiting = [folder]
    seen: set[str] = set()
    n_left = MAX_ENTRIES
    while waiting and n_left >= 0:
        current = waiting.pop(0)
        if (real := os.path.realpath(current)) in seen:
            continue  # links may go round in a circle
        seen.add(real)
        try:
            entries = sorted(os.scandir(current), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries[:n_left]:
            if entry.name.startswith("."):
                continue
            if is_folder(entry):
                waiting.append(Path(entry.path))
            elif is_gguf(entry.name) and not is_part(entry.name):
                yield Path(entry.path), _stem(entry.name)
        n_left -= len(entries)
    if n_left < 0 and too_full is not None:
        too_full.append(folder)


def problem_of_folder(folder: Path) -> str:
    """Why a folder cannot be read; empty if it can."""
    try:
        os.scandir(folder).close()
    except OSError as error:
        return f"the folder cannot be read: {error.strerror or error}"
    return ""


def is_folder(entry: os.DirEntry[str] | Path) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links that go round in a circle; before Python 3.14 what is in somebody else's home
        return False


def is_gguf(name: str) -> bool:
    """Not `._model.gguf`: on a disk that is not its own, macOS keeps what it knows of a file in one of such a name."""
    return name.lower().endswith(SUFFIX) and not name.startswith(".")


def is_part(name: str) -> bool:
    """Whether a GGUF file of this name is no model by itself: a later shard of one, or the projector of one that sees,
    by the customs of the hub."""
    shard = shard_of(name)
    return (shard is not None and shard.number != 1) or is_projector(name)


def _stem(name: str) -> str:
    """A split model is called without its first file's number."""
    shard = shard_of(name)
    return shard.stem if shard else name[: -len(SUFFIX)]


def _inspect(path: Path, kind: str, modified_at_s: float) -> ModelFile | BadModelFile:
    try:
        str(path).encode()
        header = reader.read_named(path) if kind == NAMED else reader.read_header(path, kind=kind)
        if header.kind in ADAPTERS:
            facts_of(header)
        elif header.kind == FileKind.MODEL and (problem := tables.problem(header.metadata)):
            return BadModelFile(f"{path.name} {problem}; look for another GGUF of it (localrun search)")
    except BadModelFile as error:
        return error
    except UnicodeEncodeError:  # a disk of an older system: no answer and no engine could be told of it
        return BadModelFile(f"{path.name} has a name, or is in a folder, that is not UTF-8; rename what is not")
    # File systems store times that datetime cannot express.
    modified_at = datetime.fromtimestamp(min(max(modified_at_s, 0.0), _LAST_SECOND), UTC)
    return ModelFile(path, header.size_bytes, modified_at, header)
