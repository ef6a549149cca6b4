"""The bytes of one saved segment on disk. Pure: bytes in, bytes or a record out.

All numbers are little-endian. The payload is the backend's state bytes, exactly up to the end of the file.

    offset  bytes
    0       8     magic, with the format's version: "lrkvseg1"
    8       16    fingerprint of model, build and context parameters
    24      16    key
    40      16    key of the parent; zeros at the root
    56      1     1: there is a parent
    57      1     1: the payload is the state of the whole path, 0: of this segment's positions alone
    58      2     zero
    60      4     number of tokens, n
    64      4     number of positions in `order`, m
    68      4     CRC-32 of the payload
    72      8     position of the first token
    80      8     length of the payload
    88      4n    tokens, int32
    +4n     4m    order, int32
    +4m     16    BLAKE2b of everything before, 16 bytes of digest
    then          payload

The header's digest names the whole entry, for it covers the payload's checksum and length. CRC-32 is for the payload
because it is the fastest that comes with Python (8 MB: 1.1 ms against 3.8 for SHA-256 and 5.6 for BLAKE2b) and finds
every damage of up to 32 bits in a row, and others but one in four billion. It is no protection against somebody who may
write into the folder; that is what the folder's mode is for.

Invariant: nothing is allocated by a number of the file before that number is compared with the file's length.
Does not: open files (`kv_disk_files.py`).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

import numpy as np

from localrun.engine.cache.disk_record import KEY_BYTES, DiskRecord

MAGIC = b"lrkvseg1"
DIGEST_BYTES = 16
# Tokens and positions together: beyond what any context holds, and a header of 64 MB.
MAX_TOKENS = 16 * 1024 * 1024

_FIXED = struct.Struct("<8s16s16s16sBBHIIIQQ")
FIXED_BYTES = _FIXED.size
# The whole header of a segment with 256 tokens and as many positions, so that one read is enough for it.
USUAL_HEADER_BYTES = FIXED_BYTES + 8 * 256 + DIGEST_BYTES


class _Fixed(NamedTuple):
    """The fields of `_FIXED`, in order."""

    magic: bytes
    fingerprint: bytes
    key: bytes
    parent_key: bytes
    has_parent: int
    is_whole: int
    zero: int
    n_tokens: int
    n_order: int
    payload_crc: int
    start: int
    payload_bytes: int


class Damaged(Exception):
    """The bytes are not a sound entry of this fingerprint."""


@dataclass(frozen=True)
class Header:
    """What stands before the payload. `digest` tells this entry from every other, also of the same key."""

    record: DiskRecord
    digest: bytes
    header_bytes: int
    payload_bytes: int
    payload_crc: int

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.payload_bytes


def pack(record: DiskRecord, payload: bytes | bytearray | memoryview, fingerprint: bytes) -> bytes:
    """The header for a record. Raises ValueError for one that the format cannot hold."""
    tokens = np.asarray(record.tokens, "<i4")
    order = np.asarray(record.order, "<i4")
    if len(record.key) != KEY_BYTES or len(record.parent_key) not in (0, KEY_BYTES) or len(fingerprint) != KEY_BYTES:
        raise ValueError(f"keys and fingerprints have {KEY_BYTES} bytes")
    if len(tokens) + len(order) > MAX_TOKENS:
        raise ValueError(f"a segment of {len(tokens)} tokens; the limit is {MAX_TOKENS}")
    fixed = _FIXED.pack(
        MAGIC, fingerprint, record.key, record.parent_key, bool(record.parent_key), record.is_whole, 0,
        len(tokens), len(order), crc32(payload), record.start, len(payload),
    )  # fmt: skip
    header = fixed + tokens.tobytes() + order.tobytes()
    return header + _digest(header)


def header_bytes(prefix: bytes, file_bytes: int) -> int:
    """How long the header is whose first bytes are `prefix`, in a file of `file_bytes`. Raises Damaged."""
    if len(prefix) < FIXED_BYTES:
        raise Damaged("shorter than a header")
    fixed = _Fixed(*_FIXED.unpack_from(prefix))
    if fixed.magic != MAGIC:
        raise Damaged("not a saved segment, or one of another version")
    if fixed.n_tokens + fixed.n_order > MAX_TOKENS:
        raise Damaged(f"{fixed.n_tokens} tokens and {fixed.n_order} positions")
    length = FIXED_BYTES + 4 * (fixed.n_tokens + fixed.n_order) + DIGEST_BYTES
    if length + fixed.payload_bytes != file_bytes:
        raise Damaged(f"{file_bytes} bytes instead of {length + fixed.payload_bytes}")
    return length


def parse(header: bytes, file_bytes: int, fingerprint: bytes) -> Header:
    """The header whose bytes (as many as `header_bytes` says) are `header`. Raises Damaged."""
    length = header_bytes(header, file_bytes)
    if len(header) != length:
        raise Damaged("the header is cut off")
    digest = header[-DIGEST_BYTES:]
    if _digest(memoryview(header)[:-DIGEST_BYTES]) != digest:
        raise Damaged("the header's digest is wrong")
    fixed = _Fixed(*_FIXED.unpack_from(header))
    if fixed.fingerprint != fingerprint:
        raise Damaged("of another model or build")
    order_at = FIXED_BYTES + 4 * fixed.n_tokens
    record = DiskRecord(
        key=fixed.key,
        parent_key=fixed.parent_key if fixed.has_parent else b"",
        start=fixed.start,
        tokens=np.frombuffer(header, "<i4", fixed.n_tokens, FIXED_BYTES).tolist(),
        order=np.frombuffer(header, "<i4", fixed.n_order, order_at).astype(np.int32),
        is_whole=bool(fixed.is_whole),
    )
    return Header(record, digest, length, fixed.payload_bytes, fixed.payload_crc)


def verify(header: Header, payload: bytearray) -> None:
    """Raises Damaged when `payload` is not what the header was made for."""
    if len(payload) != header.payload_bytes or crc32(payload) != header.payload_crc:
        raise Damaged("the payload's checksum is wrong")


def _digest(header: bytes | memoryview) -> bytes:
    return hashlib.blake2b(header, digest_size=DIGEST_BYTES, person=b"localrun kv disk").digest()
