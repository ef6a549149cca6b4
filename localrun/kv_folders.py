"""The folder of saved KV state on disk: its layout, what lies in it, and how to empty it.

    <cache folder>/kv/                  0700
      <fingerprint, 32 hex digits>/     0700, one for each model file, llama.cpp build and set of context parameters
        about.json                      which model that is, for people: `About`
        <key, 32 hex digits>.kv         one saved block; its mtime is when it was last used
        <key>.<pid>-<8 hex digits>.tmp  a block while it is being written

The engine fills it (`localrun.engine.cache.disk`), the daemon and the command line show and clear it. Any number of
processes may work in it at once: every file may vanish at any time, and that is never an error.

Invariants: symbolic links are never followed, and only files named as above are counted or deleted.
Does not: read the contents of blocks, or know models.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

ENTRY_SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"
ABOUT_NAME = "about.json"
MAX_ABOUT_BYTES = 65_536

_FOLDER = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"(?P<key>[0-9a-f]{32})(\.kv|\.(?P<pid>[0-9]{1,10})-[0-9a-f]{8}\.tmp)")
# Not defined on Windows, where opening a link needs no such care: making one takes an administrator.
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
# Opening a pipe that nobody writes to would wait for ever otherwise.
OPEN_FLAGS = NO_FOLLOW | os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
CREATE_FLAGS = NO_FOLLOW | os.O_WRONLY | os.O_CREAT | os.O_EXCL


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Whose state a folder holds. `created_at_s` is Unix time."""

    model: str
    model_path: str
    build: str
    created_at_s: float


class SavedFile(NamedTuple):
    """A block, or with `writer_pid` one that is being written or was left behind. `used_at_ns` is Unix time."""

    path: Path
    key: bytes
    size_bytes: int
    used_at_ns: int
    writer_pid: int | None


class ModelFolder(NamedTuple):
    """One model's folder. `about` is None when its note is gone or unreadable."""

    path: Path
    about: About | None
    files: list[SavedFile]

    @property
    def n_entries(self) -> int:
        return sum(file.writer_pid is None for file in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def used_at_s(self) -> float | None:
        """When any of it was last used, as Unix time; None when it is empty."""
        return max((file.used_at_ns for file in self.files), default=0) / 1e9 if self.files else None

    @property
    def model_name(self) -> str:
        """What to call it: the model's name, else its file, else the folder itself."""
        about = self.about
        return self.path.name if about is None else about.model or about.model_path

    @property
    def owner(self) -> str:
        """What all folders of one model file have in common: its path, or their own name when that is unknown."""
        return self.path.name if self.about is None else self.about.model_path

    @property
    def is_abandoned(self) -> bool:
        """Whether the model's file is gone, or nobody knows which it was."""
        return self.about is None or not os.path.exists(self.about.model_path)

    def is_of(self, model: str) -> bool:
        """Whether this is the state of `model`: a model's name, or the path of its file."""
        return self.about is not None and model in (self.about.model, self.about.model_path)


def kv_folder(cache: Path) -> Path:
    """Where saved state lies, within the cache folder."""
    return cache / "kv"


def entry_name(key: bytes) -> str:
    """The file name of the block with this key of 16 bytes."""
    return key.hex() + ENTRY_SUFFIX


def temporary_name(key: bytes) -> str:
    """A new file name for a block while this process writes it."""
    return f"{key.hex()}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"


def survey(root: Path) -> list[ModelFolder]:
    """Everything that is there. A folder that cannot be read is left out, or shown empty."""
    try:
        with os.scandir(root) as found:
            names = sorted(entry.name for entry in found if _FOLDER.fullmatch(entry.name) and _is_folder(entry))
    except OSError:
        return []
    return [ModelFolder(root / name, read_about(root / name), list(saved_files(root / name))) for name in names]


def saved_files(folder: Path) -> Iterator[SavedFile]:
    """The blocks in a model's folder, and what is left of those that never became whole."""
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            match = _FILE.fullmatch(entry.name)
            if match is None:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            pid = int(match["pid"]) if match["pid"] else None
            yield SavedFile(Path(entry.path), bytes.fromhex(match["key"]), status.st_size, status.st_mtime_ns, pid)


def clear(folder: Path) -> int:
    """Delete all blocks of a model's folder, but not those being written. Returns how many bytes that freed."""
    return sum(file.size_bytes for file in list(saved_files(folder)) if file.writer_pid is None and delete(file.path))


def remove(folder: Path) -> int:
    """Delete a model's folder as far as it holds files of ours. Returns how many bytes that freed."""
    freed_bytes = sum(file.size_bytes for file in list(saved_files(folder)) if delete(file.path))
    delete(folder / ABOUT_NAME)
    with contextlib.suppress(OSError):
        folder.rmdir()
    return freed_bytes


def delete(path: Path) -> bool:
    """Delete a file, or a link but not what it points to. False when that cannot be done, or somebody else did it."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def read_about(folder: Path) -> About | None:
    """The note of a model's folder; None without a sound one."""
    try:
        descriptor = os.open(folder / ABOUT_NAME, OPEN_FLAGS)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            return _about.decode(file.read(MAX_ABOUT_BYTES) or b"")
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None


def write_about(folder: Path, about: About) -> None:
    """Put the note into a model's folder, whole or not at all. Raises OSError."""
    temporary = folder / temporary_name(bytes(16))
    descriptor = os.open(temporary, CREATE_FLAGS, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(about)))
        os.replace(temporary, folder / ABOUT_NAME)
    except BaseException:
        delete(temporary)
        raise


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


_about = msgspec.json.Decoder(About)
