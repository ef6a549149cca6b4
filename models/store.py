"""The models on this machine: the built-in one, and the GGUF files in the models folder.

Owned by the daemon; safe to call from several threads. The folder is read anew on every call, so a file that is copied
in or deleted is seen at once; headers are parsed once per (path, size, modification time). Paths are only made of
folder entries and of `.gguf` paths that the user gave, never of parts of a name.

Does not: read weights, watch folders, or download. Sub-folders are not searched.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from localrun.errors import BadModelFile, BadRequest, ModelNotFound

from . import builtin
from .gguf import read_header
from .header import Header
from .name import BUILT_IN, DEFAULT_TAG, Kind, ModelName

_SUFFIX = ".gguf"
_CHUNK_BYTES = 1024 * 1024
# Files whose headers are remembered; a header takes some hundred kilobytes at most.
_MAX_KNOWN = 512
_LAST_SECOND = datetime.max.replace(tzinfo=UTC).timestamp() - 1


@dataclass(frozen=True, eq=False)
class Model:
    """A sound model file. `name` is canonical: whatever way the model was asked for, this is what it is called."""

    name: str
    path: Path
    size_bytes: int
    modified_at: datetime
    header: Header

    @cached_property
    def digest(self) -> str:
        """64 hex digits that tell this file from another: sha256 over its size, modification time and header.

        An id, not a content hash: it costs the header's bytes (some megabytes) and not the weights' gigabytes. Raises
        BadModelFile when the file is gone.
        """
        stamp = f"{self.size_bytes} {self.modified_at.isoformat()} "
        digest = hashlib.sha256(stamp.encode())
        left = self.header.data_offset
        try:
            with self.path.open("rb") as file:
                while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
                    digest.update(chunk)
                    left -= len(chunk)
        except OSError as error:
            raise BadModelFile(f"{self.path.name} cannot be read: {error.strerror or error}") from error
        return digest.hexdigest()


class DamagedFile(NamedTuple):
    """A file in the models folder that cannot be used, and why."""

    path: Path
    problem: str


class _Stamp(NamedTuple):
    """What changes when a file does. The change time also tells a new owner or mode, and an edit that kept the rest."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int


class Store:
    """`models_folder` need not exist: then only the built-in model and paths are found."""

    def __init__(self, models_folder: Path) -> None:
        self._folder = models_folder
        # Each entry is replaced as a whole: two threads that meet a new file both parse it, which is harmless.
        self._known: dict[tuple[Path, str], tuple[_Stamp, Model | BadModelFile]] = {}

    def resolve(self, name: str) -> Model:
        """The model that a client means by `name`.

        Raises BadRequest for a malformed name, ModelNotFound, and BadModelFile for a file that is there but unusable.
        """
        parsed = ModelName.parse(name)
        if parsed.kind is Kind.BUILT_IN:
            found = self._load(builtin.model_path(), BUILT_IN)
        elif parsed.kind is Kind.PATH:
            # Not resolved further: a link's target may not end in .gguf, and then its name would not be a path's.
            path = Path(os.path.abspath(parsed.text))
            found = self._load(path, str(path))
        else:
            found = self._find(parsed)
        if found is None:
            raise ModelNotFound(name)
        return found

    def list(self) -> list[Model]:
        """All sound models: the built-in one first, then the folder's by name. Damaged files are left out."""
        return [model for model in self._survey() if isinstance(model, Model)]

    def damaged(self) -> Sequence[DamagedFile]:
        """The `.gguf` files of the folder that `list` leaves out, by name."""
        return [file for file in self._survey() if isinstance(file, DamagedFile)]

    def _survey(self) -> Iterator[Model | DamagedFile]:
        for path, name in ((builtin.model_path(), BUILT_IN), *self._files()):
            try:
                if path.parent == self._folder:
                    _check_stored_name(name)
                model = self._load(path, name)
            except (BadModelFile, BadRequest) as error:
                yield DamagedFile(path, error.message)
            else:
                if model is not None:
                    yield model

    def _find(self, wanted: ModelName) -> Model | None:
        """A file by that name, letter for letter if there is one, else whatever the case of its letters."""
        stems = [f"{wanted.name}-{wanted.tag or DEFAULT_TAG}"]
        if wanted.tag is None or wanted.tag.lower() == DEFAULT_TAG:
            stems.insert(0, wanted.name)
        files = self._files()
        for stem in stems:
            for path, name in sorted(files, key=lambda file: file[1] != stem):
                if name.lower() == stem.lower():
                    return self._load(path, name)
        return None

    def _files(self) -> Sequence[tuple[Path, str]]:
        """The folder's `.gguf` entries as (path, name without the ending), by name."""
        try:
            entries = sorted(os.listdir(self._folder))
        except OSError:
            return ()
        return [(self._folder / entry, entry[: -len(_SUFFIX)]) for entry in entries if entry.lower().endswith(_SUFFIX)]

    def _load(self, path: Path, name: str) -> Model | None:
        """The model at `path`, from memory when the file is still the same; None when there is no file.

        Raises BadModelFile, from memory as well: a hostile header is not parsed again for every listing.
        """
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise BadModelFile(f"{path.name} cannot be read: {error.strerror or error}") from error
        stamp = _Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known = self._known.get((path, name))
        if known is None or known[0] != stamp:
            known = (stamp, _inspect(path, name, status.st_mtime))
            self._known[path, name] = known
            while len(self._known) > _MAX_KNOWN:
                self._known.pop(next(iter(self._known)), None)
        if isinstance(known[1], BadModelFile):
            raise BadModelFile(known[1].message)
        return known[1]


def _inspect(path: Path, name: str, modified_at_s: float) -> Model | BadModelFile:
    try:
        header = read_header(path)
    except BadModelFile as error:
        return error
    # File systems store times that datetime cannot express.
    modified_at = datetime.fromtimestamp(min(max(modified_at_s, 0.0), _LAST_SECOND), UTC)
    return Model(name, path, header.size_bytes, modified_at, header)


def _check_stored_name(name: str) -> None:
    """Raises BadRequest when a file of this name could not be asked for by it."""
    parsed = ModelName.parse(name)
    if parsed.kind is Kind.BUILT_IN:
        raise BadRequest(f"{name}{_SUFFIX} has the name of the built-in model; rename it")
    if parsed.kind is not Kind.STORED or parsed.name != name:
        raise BadRequest(f"{name}{_SUFFIX} has a name that no model can have; rename it")
