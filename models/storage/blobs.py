"""Blobs: files of the models folder that are named by the sha256 of their content, `blobs/sha256-<64 hex digits>`.

Used by the daemon's threads. A blob has its name only once it is complete and its content was hashed. A blob belongs to
nobody: the manifests that name it keep it. Whoever is about to write such a manifest holds the blob until then, so that
no removal that runs at the same time takes it away.

Does not: know manifests, or decide what is garbage (naming.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from localrun import stored
from localrun.errors import BadRequest, Conflict, DiskFull
from localrun.models.storage.manifest import blob_path, check_digest

# Of a disk, to be left for others.
RESERVE_BYTES = 256 * 1024 * 1024
_BLOB = re.compile(r"sha256-([0-9a-f]{64})")


class Blob(NamedTuple):
    """`modified_at_s` is Unix time."""

    digest: str
    path: Path
    size_bytes: int
    modified_at_s: float


class Blobs:
    """The blobs of one models folder. `folder` need not exist. One object serves all threads of the daemon."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def folder(self) -> Path:
        return self._folder / "blobs"

    def has(self, digest: str) -> bool:
        """Raises BadRequest for a malformed digest."""
        return blob_path(self._folder, digest).is_file()

    @contextlib.contextmanager
    def held(self, digests: Sequence[str]) -> Iterator[None]:
        """While in here, these blobs are not removed; also those that are yet to be written."""
        normal = [check_digest(digest) for digest in digests]
        with self._lock:
            self._held.update(normal)
        try:
            yield
        finally:
            with self._lock:
                self._held.subtract(normal)
                self._held += Counter()  # drops the zeros

    def remove(self, digest: str) -> int:
        """Bytes that its removal freed: 0 if there is none, or somebody holds it."""
        path = blob_path(self._folder, digest)
        with self._lock:
            if self._held[check_digest(digest)]:
                return 0
            try:
                size_bytes = path.stat().st_size
                path.unlink()
            except FileNotFoundError:
                return 0
            return size_bytes

    def all(self) -> Sequence[Blob]:
        """All complete blobs, by digest."""
        try:
            names = sorted(os.listdir(self.folder))
        except OSError:
            return ()
        found = []
        for name in names:
            if match := _BLOB.fullmatch(name):
                with contextlib.suppress(OSError):
                    status = (self.folder / name).stat()
                    found.append(Blob(f"sha256:{match[1]}", self.folder / name, status.st_size, status.st_mtime))
        return found


class BlobWriter:
    """Writes one blob, piece by piece: `with BlobWriter(blobs) as writer`, then `write` and `finish`.

    Left without `finish`, it leaves nothing behind.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._hash = hashlib.sha256()
        self._exit = contextlib.ExitStack()
        self._temporary = Path()
        self._file: BinaryIO | None = None
        self.n_bytes = 0

    def __enter__(self) -> BlobWriter:
        self._temporary = self._exit.enter_context(stored.temporary(self._blobs.folder))
        self._file = self._exit.enter_context(self._temporary.open("xb"))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def write(self, data: bytes) -> None:
        """Raises OSError when the disk is full."""
        assert self._file is not None
        self._file.write(data)
        self._hash.update(data)
        self.n_bytes += len(data)

    def finish(self, expected_digest: str | None = None) -> str:
        """Names the blob by its content. The digest. Raises BadRequest when it is not the expected one."""
        assert self._file is not None
        digest = f"sha256:{self._hash.hexdigest()}"
        if expected_digest is not None and check_digest(expected_digest) != digest:
            raise BadRequest(f"the content has the digest {digest}, not {expected_digest}", field="digest")
        self._file.close()
        stored.publish(self._temporary, self._blobs.folder / digest.replace(":", "-"))
        return digest


def adopt(blobs: Blobs, path: Path) -> str:
    """Hashes a finished temporary file in the blobs' folder and names it by its content. The digest."""
    digest = hash_file(path)
    stored.publish(path, blobs.folder / digest.replace(":", "-"))
    return digest


def hash_file(path: Path) -> str:
    """`sha256:` and the hex digits of a whole file. Raises Conflict when it changed meanwhile, OSError."""
    with path.open("rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        digest = hashlib.file_digest(file, "sha256")
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise Conflict(f"{path} changed while it was read; try again when nobody writes to it")
    return f"sha256:{digest.hexdigest()}"


def check_room(folder: Path, n_bytes: int, *, instead: str = "put LOCALRUN_MODELS on another disk") -> None:
    """Raises DiskFull, which says what else can be done (`instead`), unless so much may be written to `folder`, which
    is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = max(0, shutil.disk_usage(folder).free - RESERVE_BYTES)
    if n_bytes > free_bytes:
        raise DiskFull(
            f"{_exact(n_bytes)} are to be written to {folder}, but {_exact(free_bytes)} are free, besides "
            f"{_exact(RESERVE_BYTES)} that are left to others; free some, or {instead}"
        )


def _exact(n_bytes: int) -> str:
    """To the digits that tell two sizes apart."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:.3f} {name}"
    return f"{n_bytes} bytes"
