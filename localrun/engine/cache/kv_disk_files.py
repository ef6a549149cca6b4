"""One model's folder of saved segments: whole files in, verified bytes out.

Called by the KV store's thread (reading) and by the background thread (everything else); it keeps no state, so both may
call at once. The layout is in `localrun/kv_folders.py`, the bytes in `kv_disk_format.py`.

Invariants: a segment's name appears with its whole contents or not at all, for they are written under a temporary name,
synced, and renamed. Reading never waits (no pipes), never follows a link, and never takes more memory than the file has
bytes.
Does not: decide what to keep (`kv_disk.py`, `kv_disk_bound.py`).
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import psutil

from localrun import kv_folders
from localrun.engine.cache import kv_disk_format as disk_format
from localrun.engine.cache.kv_disk_format import Damaged, Header

# A temporary file this old belongs to nobody: writing one takes seconds.
ABANDONED_AFTER_S = 3600.0

_FOLDER_MODE, _FILE_MODE = 0o700, 0o600


class KvDiskFiles:
    """The files of one `fingerprint` (16 bytes) below `root`. Makes the folder; raises OSError when that is refused, or
    when something that is not a folder of ours is in its place."""

    def __init__(self, root: Path, fingerprint: bytes, about: kv_folders.About) -> None:
        self.root = root
        self.folder = root / fingerprint.hex()
        self._fingerprint = fingerprint
        self._about = about
        self._make_folder()

    def _make_folder(self) -> None:
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.root, self.folder):
            folder.mkdir(mode=_FOLDER_MODE, exist_ok=True)
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(f"{folder} is not a folder")
            if hasattr(os, "geteuid"):
                if status.st_uid != os.geteuid():
                    raise PermissionError(f"{folder} belongs to another user")
                if stat.S_IMODE(status.st_mode) & 0o077:
                    folder.chmod(_FOLDER_MODE)
        known = kv_folders.read_about(self.folder)
        if known is None or (known.model, known.model_path) != (self._about.model, self._about.model_path):
            kv_folders.write_about(self.folder, self._about)

    # --- writing -------------------------------------------------------------------------------------------------

    def put(self, header: bytes, payload: bytes | bytearray | memoryview, key: bytes, used_at_ns: int) -> None:
        """Write a segment. Raises OSError, and then nothing is left of it. Makes the folder again if it is gone."""
        try:
            self._put(header, payload, key, used_at_ns)
        except FileNotFoundError:
            self._make_folder()
            self._put(header, payload, key, used_at_ns)

    def _put(self, header: bytes, payload: bytes | bytearray | memoryview, key: bytes, used_at_ns: int) -> None:
        temporary = self.folder / kv_folders.temporary_name(key)
        descriptor = os.open(temporary, kv_folders.CREATE_FLAGS, _FILE_MODE)
        try:
            try:
                for part in (header, payload):
                    _write_all(descriptor, part)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.utime(temporary, ns=(used_at_ns, used_at_ns))
            os.replace(temporary, self._path(key))
        except BaseException:
            kv_folders.delete(temporary)
            raise

    def touch(self, key: bytes, used_at_ns: int) -> None:
        """Set when a segment was last used. Raises OSError when it is gone."""
        if os.utime in os.supports_follow_symlinks:
            os.utime(self._path(key), ns=(used_at_ns, used_at_ns), follow_symlinks=False)
        else:
            os.utime(self._path(key), ns=(used_at_ns, used_at_ns))

    def delete(self, key: bytes) -> None:
        """Delete a segment if it is there."""
        kv_folders.delete(self._path(key))

    def delete_abandoned(self, now_s: float) -> None:
        """Delete what writers left behind that were killed, or have had `ABANDONED_AFTER_S` to end."""
        for file in list(kv_folders.saved_files(self.folder)):
            if file.writer_pid is not None:
                is_old = now_s - file.used_at_ns / 1e9 > ABANDONED_AFTER_S
                if is_old or not psutil.pid_exists(file.writer_pid):
                    kv_folders.delete(file.path)

    def free_bytes(self) -> int:
        """What the file system still has for us. Makes the folder again if it is gone. Raises OSError."""
        try:
            free: int = psutil.disk_usage(str(self.folder)).free
        except FileNotFoundError:
            self._make_folder()
            free = psutil.disk_usage(str(self.folder)).free
        return free

    # --- reading -------------------------------------------------------------------------------------------------

    def headers(self) -> Iterator[tuple[Header, int]]:
        """The headers of all sound segments, with when each was last used; the damaged ones are deleted."""
        for file in list(kv_folders.saved_files(self.folder)):
            if file.writer_pid is not None:
                continue
            try:
                yield self._read(file.key, None)[0], file.used_at_ns
            except Damaged:
                kv_folders.delete(file.path)
            except (OSError, MemoryError):
                continue

    def get(self, key: bytes, digest: bytes) -> bytearray | None:
        """The payload of the segment whose header has this digest; None when another one took its place.

        Raises Damaged, and OSError when it cannot be read or is gone.
        """
        return self._read(key, digest)[1]

    def _read(self, key: bytes, digest: bytes | None) -> tuple[Header, bytearray | None]:
        """The header, and the payload if the header has this digest."""
        descriptor = _open(self._path(key))
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Damaged("not a file")
            prefix = file.read(min(status.st_size, disk_format.USUAL_HEADER_BYTES)) or b""
            length = disk_format.header_bytes(prefix, status.st_size)
            while len(prefix) < length and (more := file.read(length - len(prefix))):
                prefix += more
            header = disk_format.parse(prefix[:length], status.st_size, self._fingerprint)
            if header.record.key != key:
                raise Damaged("under another name")
            if header.digest != digest:
                return header, None
            payload = bytearray(header.payload_bytes)
            start = prefix[length:]
            payload[: len(start)] = start
            _read_all(file, memoryview(payload)[len(start) :])
        disk_format.verify(header, payload)
        return header, payload

    def _path(self, key: bytes) -> Path:
        return self.folder / kv_folders.entry_name(key)


def now_ns(depth_tokens: int) -> int:
    """The time to note as last use of a segment that starts at `depth_tokens`: now, but earlier by a microsecond a
    token, so that of segments used together the beginnings are the last to be evicted."""
    return time.time_ns() - 1000 * depth_tokens


def _open(path: Path) -> int:
    """Raises Damaged where there is something that is no file, and OSError."""
    try:
        return os.open(path, kv_folders.OPEN_FLAGS)
    except OSError as error:
        try:
            is_file = stat.S_ISREG(path.lstat().st_mode)
        except OSError:
            raise error from None
        if not is_file:
            raise Damaged("not a file") from None
        raise


def _write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _read_all(file: FileIO, into: memoryview) -> None:
    """Raises Damaged at an early end."""
    while into:
        count = file.readinto(into)
        if not count:
            raise Damaged("cut off while it was read")
        into = into[count:]
