"""Pieces of a GGUF file, put together by hand so that any of them can be wrong.

Integers are cut to their width, so that -1 stands for the largest value.
"""

from __future__ import annotations

import struct

U8, U32, F32, BOOL, STRING, ARRAY, U64, F64 = 0, 4, 6, 7, 8, 9, 10, 12
TYPE_F32, TYPE_Q4_0, TYPE_Q4_K = 0, 2, 12


def u32(value: int) -> bytes:
    return struct.pack("<I", value & 0xFFFF_FFFF)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value & 0xFFFF_FFFF_FFFF_FFFF)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + u32(kind) + payload


def array(key: str, kind: int, length: int, payload: bytes) -> bytes:
    return entry(key, ARRAY, u32(kind) + u64(length) + payload)


def tensor(name: str | bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + u32(len(shape)) + b"".join(map(u64, shape)) + u32(kind) + u64(offset)


ARCHITECTURE = entry("general.architecture", STRING, text("llama"))
ENTRIES = (
    ARCHITECTURE,
    entry("llama.context_length", U32, u32(4096)),
    entry("llama.block_count", U32, u32(2)),
    entry("llama.embedding_length", U32, u32(64)),
    entry("llama.attention.head_count", U32, u32(4)),
    array("llama.feed_forward_length", U32, 2, u32(96) + u32(128)),
    array("tokenizer.ggml.tokens", STRING, 3, text("a") + text("<s>") + text("b")),
    array("tokenizer.ggml.token_type", 5, 3, u32(1) + u32(3) + u32(1)),
)
# 64 x 4 weights in Q4_0 are 144 bytes, 160 with padding; 64 in F32 are 256.
TENSORS = (tensor("token_embd.weight", (64, 4), TYPE_Q4_0, 0), tensor("output_norm.weight", (64,), TYPE_F32, 160))
DATA = bytes(160 + 256)


def file_bytes(
    entries: tuple[bytes, ...] = ENTRIES,
    tensors: tuple[bytes, ...] = TENSORS,
    *,
    magic: bytes = b"GGUF",
    version: bytes = u32(3),
    n_entries: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
    data: bytes = DATA,
) -> bytes:
    counts = u64(len(tensors) if n_tensors is None else n_tensors) + u64(
        len(entries) if n_entries is None else n_entries
    )
    head = magic + version + counts + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


VALID = file_bytes()
