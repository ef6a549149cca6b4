"""The bytes of a saved segment: what was packed comes back, and nothing else passes for it."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.engine.cache import disk_files as disk_format
from localrun.engine.cache.disk_files import DamagedEntry
from localrun.engine.cache.tree import DiskRecord, block_key
from tests.engine.disk_harness import FINGERPRINT, record

PAYLOAD = bytes(range(256)) * 3
ROOT = record([5, 6, 7])
CHILD = record([8, 9], ROOT, is_whole=True)

tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=300)


def read(data: bytes) -> tuple[disk_format.EntryHeader, bytearray]:
    """What a reader makes of a file. Raises Damaged."""
    header = disk_format.parse(data[: disk_format.header_bytes(data, len(data))], len(data), FINGERPRINT)
    payload = bytearray(data[header.header_bytes :])
    disk_format.verify(header, payload)
    return header, payload


def file_of(found: DiskRecord, payload: bytes = PAYLOAD) -> bytes:
    return disk_format.pack(found, payload, FINGERPRINT) + payload


@given(tokens=tokens, start=st.integers(0, 2**40), payload=st.binary(max_size=500), flags=st.integers(0, 3))
def test_a_record_comes_back_as_it_was(tokens: list[int], start: int, payload: bytes, flags: int) -> None:
    parent_key = b"p" * 16 if flags & 1 else b""
    packed = DiskRecord(block_key(parent_key, start, tokens), parent_key, start, tokens, bool(flags & 2))
    header, read_payload = read(file_of(packed, payload))
    found = header.record
    assert (found.key, found.parent_key, found.start, found.tokens) == (packed.key, parent_key, start, tokens)
    assert found.is_whole == packed.is_whole
    assert read_payload == payload


@pytest.mark.parametrize("found", [ROOT, CHILD])
def test_every_truncation_and_every_extension_is_damage(found: DiskRecord) -> None:
    whole = file_of(found)
    for length in range(len(whole)):
        with pytest.raises(DamagedEntry):
            read(whole[:length])
    with pytest.raises(DamagedEntry):
        read(whole + b"\0")


def test_every_flipped_bit_is_damage() -> None:
    whole = bytearray(file_of(CHILD))
    for at in range(len(whole)):
        for bit in range(8):
            whole[at] ^= 1 << bit
            with pytest.raises(DamagedEntry):
                read(bytes(whole))
            whole[at] ^= 1 << bit
    read(bytes(whole))


@given(junk=st.binary(max_size=300))
def test_junk_is_damage(junk: bytes) -> None:
    with pytest.raises(DamagedEntry):
        read(junk)
    with pytest.raises(DamagedEntry):
        read(disk_format.MAGIC + junk)


def test_another_fingerprint_is_damage() -> None:
    foreign = disk_format.pack(ROOT, PAYLOAD, b"x" * 16)
    with pytest.raises(DamagedEntry, match="another model"):
        disk_format.parse(foreign, len(foreign) + len(PAYLOAD), FINGERPRINT)


@pytest.mark.parametrize("field_offset", [60, 64, 80])
def test_a_huge_claim_is_refused_before_anything_is_made_of_it(field_offset: int) -> None:
    data = bytearray(file_of(ROOT))
    struct.pack_into("<I", data, field_offset, 0xFFFFFFF0)
    with pytest.raises(DamagedEntry):
        disk_format.header_bytes(bytes(data), len(data))
    # Even where the file is as long as it claims, no header is that long.
    if field_offset != 80:
        with pytest.raises(DamagedEntry, match="tokens"):
            disk_format.header_bytes(bytes(data), 2**36)


def test_what_the_format_cannot_hold_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        disk_format.pack(DiskRecord(b"short", b"", 0, [1], False), b"", FINGERPRINT)
    long = [0] * (disk_format.MAX_TOKENS + 1)
    with pytest.raises(ValueError, match="limit"):
        disk_format.pack(DiskRecord(b"k" * 16, b"", 0, long, False), b"", FINGERPRINT)


def test_one_usual_read_covers_a_usual_header() -> None:
    header = disk_format.pack(record(list(range(256))), b"", FINGERPRINT)
    assert len(header) == disk_format.USUAL_HEADER_BYTES


def test_what_older_versions_kept_behind_the_tokens_is_passed_over():
    header = bytearray(disk_format.pack(CHILD, PAYLOAD, FINGERPRINT)[: -disk_format.DIGEST_BYTES])
    struct.pack_into("<I", header, 64, 3)
    header += struct.pack("<3i", 7, 8, 9)
    found, payload = read(bytes(header) + disk_format._digest(bytes(header)) + PAYLOAD)
    assert (found.record.tokens, found.record.key, bytes(payload)) == (CHILD.tokens, CHILD.key, PAYLOAD)


def test_a_named_root_is_no_parent():
    tokens, root = [1, 2, 3], b"r" * 16
    named = DiskRecord(block_key(root, 0, tokens), b"", 0, tokens, False, root)
    header = disk_format.pack(named, b"payload", FINGERPRINT)
    found = disk_format.parse(header, len(header) + 7, FINGERPRINT).record
    assert (found.key, found.parent_key, found.root) == (named.key, b"", root)
