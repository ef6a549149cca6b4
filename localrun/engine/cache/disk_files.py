"""One model's folder of saved blocks: whole files in, verified bytes out.

Called by the KV store's thread (reading) and by the background thread (everything else). It keeps no state, so both may
call at once. `localrun/kv_folders.py` describes the folder's layout.

Invariants: a block's name appears with its whole contents or not at all, because the contents are written under a
temporary name, synced, and renamed. Reading never blocks (no pipes), never follows a link, and never takes more memory
than the file has bytes.
Does not: decide what to keep (`disk.py`).

The bytes of one block; numbers are little-endian. The payload is the backend's state bytes, exactly up to the end
of the file.

    offset  bytes
    0       8     magic, with the format's version: "lrkvseg1"
    8       16    fingerprint of model, build and context parameters
    24      16    key
    40      16    key of the parent, or the name of the root; zeros at the usual one
    56      1     1: there is a parent, 2: a named root, 0: the usual root
    57      1     1: the payload is the state of the whole path, 0: of this block's positions alone
    58      2     zero
    60      4     number of tokens, n
    64      4     number of further integers, m: 0 in new files
    68      4     CRC-32 of the payload
    72      8     position of the first token
    80      8     length of the payload
    88      4n    tokens, int32
    +4n     4m    what older versions kept there and nobody reads, int32
    +4m     16    BLAKE2b of everything before, 16 bytes of digest
    then          payload

The header's digest identifies the whole entry, because it covers the payload's checksum and length. The payload uses
CRC-32, the fastest checksum that comes with Python (8 MB: 1.1 ms against 3.8 for SHA-256 and 5.6 for BLAKE2b). It finds
every error of up to 32 bits in a row, and misses one in four billion of the others. It does not protect against
somebody who may write to the folder; the folder's mode does that.

Invariant: nothing is allocated by a number from the file before that number is compared with the file's length.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import psutil

from localrun import kv_folders
from localrun.engine.cache.tree import KEY_BYTES, DiskRecord
from localrun.stored import FileStamp

MAGIC = b"lrkvseg1"
DIGEST_BYTES = 16
# Tokens and what is not read together: beyond what any context holds, and a header of 64 MB.
MAX_TOKENS = 16 * 1024 * 1024

_FIXED = struct.Struct("<8s16s16s16sBBHIIIQQ")
FIXED_BYTES = _FIXED.size
_PARENT, _NAMED_ROOT = 1, 2
# The whole header of a block with 256 tokens, so that one read is enough for it.
USUAL_HEADER_BYTES = FIXED_BYTES + 4 * 256 + DIGEST_BYTES


class _FixedHeader(NamedTuple):
    """The fields of `_FIXED`, in order."""

    magic: bytes
    fingerprint: bytes
    key: bytes
    parent_key: bytes
    has_parent: int
    is_whole: int
    zero: int
    n_tokens: int
    n_unread: int
    payload_crc: int
    start: int
    payload_bytes: int


class DamagedEntry(Exception):
    """The bytes are not a sound entry of this fingerprint."""


@dataclass(frozen=True)
class EntryHeader:
    """What precedes the payload. `digest` distinguishes this entry from all others, even those with the same key."""

    record: DiskRecord
    digest: bytes
    header_bytes: int
    payload_bytes: int
    payload_crc: int

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.payload_bytes


def pack(record: DiskRecord, payload: bytes | bytearray | memoryview, fingerprint: bytes) -> bytes:
    """The header for a record. Raises ValueError if the format cannot hold it."""
    tokens = np.asarray(record.tokens, "<i4")
    above = record.parent_key or record.root
    if len(record.key) != KEY_BYTES or len(above) not in (0, KEY_BYTES) or len(fingerprint) != KEY_BYTES:
        raise ValueError(f"keys and fingerprints have {KEY_BYTES} bytes")
    if len(tokens) > MAX_TOKENS:
        raise ValueError(f"a block of {len(tokens)} tokens; the limit is {MAX_TOKENS}")
    has_parent = _PARENT if record.parent_key else _NAMED_ROOT if record.root else 0
    fixed = _FIXED.pack(
        MAGIC, fingerprint, record.key, above, has_parent, record.is_whole, 0,
        len(tokens), 0, crc32(payload), record.start, len(payload),
    )  # fmt: skip
    header = fixed + tokens.tobytes()
    return header + _digest(header)


def header_bytes(prefix: bytes, file_bytes: int) -> int:
    """The length of the header that begins with `prefix`, in a file of `file_bytes`. Raises Damaged."""
    if len(prefix) < FIXED_BYTES:
        raise DamagedEntry("shorter than a header")
    fixed = _FixedHeader(*_FIXED.unpack_from(prefix))
    if fixed.magic != MAGIC:
        raise DamagedEntry("not a saved block, or one of another version")
    if fixed.n_tokens + fixed.n_unread > MAX_TOKENS:
        raise DamagedEntry(f"{fixed.n_tokens} tokens and {fixed.n_unread} further integers")
    length = FIXED_BYTES + 4 * (fixed.n_tokens + fixed.n_unread) + DIGEST_BYTES
    if length + fixed.payload_bytes != file_bytes:
        raise DamagedEntry(f"{file_bytes} bytes instead of {length + fixed.payload_bytes}")
    return length


def parse(header: bytes, file_bytes: int, fingerprint: bytes) -> EntryHeader:
    """Parse a header, given as many bytes as `header_bytes` says. Raises Damaged."""
    length = header_bytes(header, file_bytes)
    if len(header) != length:
        raise DamagedEntry("the header is cut off")
    digest = header[-DIGEST_BYTES:]
    if _digest(memoryview(header)[:-DIGEST_BYTES]) != digest:
        raise DamagedEntry("the header's digest is wrong")
    fixed = _FixedHeader(*_FIXED.unpack_from(header))
    if fixed.fingerprint != fingerprint:
        raise DamagedEntry("of another model or build")
    record = DiskRecord(
        key=fixed.key,
        parent_key=fixed.parent_key if fixed.has_parent == _PARENT else b"",
        start=fixed.start,
        tokens=np.frombuffer(header, "<i4", fixed.n_tokens, FIXED_BYTES).tolist(),
        is_whole=bool(fixed.is_whole),
        root=fixed.parent_key if fixed.has_parent == _NAMED_ROOT else b"",
    )
    return EntryHeader(record, digest, length, fixed.payload_bytes, fixed.payload_crc)


def verify(header: EntryHeader, payload: bytearray) -> None:
    """Raises Damaged if `payload` does not belong to the header."""
    if len(payload) != header.payload_bytes or crc32(payload) != header.payload_crc:
        raise DamagedEntry("the payload's checksum is wrong")


def _digest(header: bytes | memoryview) -> bytes:
    return hashlib.blake2b(header, digest_size=DIGEST_BYTES, person=b"localrun kv disk").digest()


# A temporary file this old is abandoned: writing one takes seconds.
ABANDONED_AFTER_S = 3600.0

_FOLDER_MODE, _FILE_MODE = 0o700, 0o600


class KvDiskFiles:
    """The files of one `fingerprint` (16 bytes) below `root`. Creates the folder; raises OSError if that is refused, or
    if something else is in its place."""

    def __init__(self, root: Path, fingerprint: bytes, about: kv_folders.About) -> None:
        self.root = root
        self.folder = root / fingerprint.hex()
        self._fingerprint = fingerprint
        self._about = about
        self._make_folder()

    def _make_folder(self) -> None:
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.root, self.folder):
            # Not `exist_ok`, which calls a folder that somebody deletes at this moment something else in its place.
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=_FOLDER_MODE)
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
        """Write a block. Raises OSError, leaving nothing behind. Creates the folder again if it is gone."""
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
        """Set when a block was last used. Raises OSError when it is gone."""
        if os.utime in os.supports_follow_symlinks:
            os.utime(self._path(key), ns=(used_at_ns, used_at_ns), follow_symlinks=False)
        else:
            os.utime(self._path(key), ns=(used_at_ns, used_at_ns))

    def delete(self, key: bytes) -> None:
        """Delete a block if it is there."""
        kv_folders.delete(self._path(key))

    def delete_abandoned(self, now_s: float) -> None:
        """Delete temporary files whose writer is dead, or that are older than `ABANDONED_AFTER_S`."""
        for file in list(kv_folders.saved_files(self.folder)):
            if file.writer_pid is not None:
                is_old = now_s - file.used_at_ns / 1e9 > ABANDONED_AFTER_S
                if is_old or not psutil.pid_exists(file.writer_pid):
                    kv_folders.delete(file.path)

    def free_bytes(self) -> int:
        """The free bytes of the file system. Creates the folder again if it is gone. Raises OSError."""
        try:
            free: int = psutil.disk_usage(str(self.folder)).free
        except FileNotFoundError:
            self._make_folder()
            free = psutil.disk_usage(str(self.folder)).free
        return free

    # --- reading -------------------------------------------------------------------------------------------------

    def headers(self) -> Iterator[tuple[EntryHeader, int]]:
        """The headers of all sound blocks, with the time of last use; damaged ones are deleted."""
        for file in list(kv_folders.saved_files(self.folder)):
            if file.writer_pid is not None:
                continue
            try:
                yield self._read(file.key, None)[0], file.used_at_ns
            except DamagedEntry:
                kv_folders.delete(file.path)
            except (OSError, MemoryError):
                continue

    def get(self, key: bytes, digest: bytes) -> bytearray | None:
        """The payload of the block whose header has this digest; None if another one took its place.

        Raises Damaged, or OSError if it cannot be read or is gone.
        """
        return self._read(key, digest)[1]

    def _read(self, key: bytes, digest: bytes | None) -> tuple[EntryHeader, bytearray | None]:
        """The header, and the payload if the header has this digest."""
        descriptor = _open(self._path(key))
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedEntry("not a file")
            prefix = file.read(min(status.st_size, USUAL_HEADER_BYTES))
            length = header_bytes(prefix, status.st_size)
            prefix += file.read(max(0, length - len(prefix)))
            header = parse(prefix[:length], status.st_size, self._fingerprint)
            if header.record.key != key:
                raise DamagedEntry("under another name")
            if header.digest != digest:
                return header, None
            payload = bytearray(header.payload_bytes)
            start = prefix[length:]
            payload[: len(start)] = start
            if file.readinto(memoryview(payload)[len(start) :]) < len(payload) - len(start):
                raise DamagedEntry("cut off while it was read")
        verify(header, payload)
        return header, payload

    def _path(self, key: bytes) -> Path:
        return self.folder / kv_folders.entry_name(key)


def now_ns(depth_tokens: int) -> int:
    """The time to record as last use of a block that starts at `depth_tokens`: now, less a microsecond per token, so
    that of blocks used together the first ones are evicted last."""
    return time.time_ns() - 1000 * depth_tokens


def _open(path: Path) -> int:
    """Raises Damaged if the path is not a file, and OSError."""
    try:
        return os.open(path, kv_folders.OPEN_FLAGS)
    except OSError as error:
        try:
            is_file = stat.S_ISREG(path.lstat().st_mode)
        except OSError:
            raise error from None
        if not is_file:
            raise DamagedEntry("not a file") from None
        raise


def _write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


FINGERPRINT_BYTES = 16
HEAD_BYTES = 1024 * 1024
N_PAGES = 64
PAGE_BYTES = 4096


def fingerprint(model_files: Sequence[Path], *, build: str, parameters: Mapping[str, str]) -> bytes:
    """Which saved state belongs to which model and build, for everything that changes what the bytes mean.

    The weights are not read as a whole, because that takes as long as loading. Stamps, the first MiB (header and
    vocabulary) and pages spread over the rest distinguish files. The native libraries count by size and modification
    time, because builds of one version may differ.

    16 bytes for the files of a model, a build of llama.cpp (`library_build`) and the parameters of the context that
    change its state. Raises OSError when the file cannot be read."""
    digest = hashlib.blake2b(MAGIC, digest_size=FINGERPRINT_BYTES, person=b"localrun model")
    for path in model_files:
        stamp = FileStamp.of(path)
        _add(digest, str(tuple(stamp)).encode())
        with path.open("rb", buffering=0) as file:
            _add(digest, file.read(HEAD_BYTES) or b"")
            step_bytes = max(PAGE_BYTES, (stamp.size_bytes - HEAD_BYTES) // N_PAGES)
            for offset in range(HEAD_BYTES, stamp.size_bytes, step_bytes):
                file.seek(offset)
                _add(digest, file.read(PAGE_BYTES) or b"")
    _add(digest, build.encode())
    for name, value in sorted(parameters.items()):
        _add(digest, name.encode())
        _add(digest, value.encode())
    return digest.digest()


def library_build(package: str, library_folder: Path) -> str:
    """The version of a package and a digest of its native libraries, as a readable line. Raises OSError."""
    from importlib import metadata  # here, because it is a tenth of what an engine imports

    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(library_folder.iterdir()):
        status = path.stat()
        _add(digest, f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:  # laid out by hand; the files still identify it
        version = "of unknown version"
    return f"{package} {version} {digest.hexdigest()}"


def _add(digest: hashlib.blake2b, part: bytes) -> None:
    """Add a part with its length, so that the end of one part cannot pass for the beginning of the next."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
