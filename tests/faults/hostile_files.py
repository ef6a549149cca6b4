"""Model files that somebody damaged, by accident or on purpose: sound small ones of every kind of memory, with bytes
changed where it hurts. The same number makes the same file.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from localrun.models.gguf.reader import read_header
from tests.support.synthesis.synthesize import write_model
from tests.support.synthesis.synthetic_tokenizer import make_vocabulary
from tests.support.synthesis.tensor_plan import SHAPES, plan_tensors

KINDS = ("tiny", "tiny-gemma3", "tiny-mamba", "tiny-qwen35", "tiny-lfm2")
N_VOCAB = 320
# Numbers that overflow, are negative, or nearly right.
EXTREMES = (0, 1, 3, 13, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**48, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 32)
HOSTILE_TOKENS = (b"<0x-1>", b"<0xZZ>", b"\xff\xfe\xfd", b"\0\0\0\0", b"%s%n%s", b"<|im_end|>", b"\xf0\x9f", b" ")


class Sound(NamedTuple):
    """A file's bytes, and where its header ends."""

    content: bytes
    header_bytes: int


@cache
def sound(kind: str, folder: Path) -> Sound:
    path = folder / f"{kind}.gguf"
    shape = replace(SHAPES[kind], n_vocab=N_VOCAB, n_ctx_train=512)
    write_model(path, shape, list(plan_tensors(shape, "Q4_0")), "Q4_0", make_vocabulary(N_VOCAB), seed=0)
    return Sound(path.read_bytes(), read_header(path).data_offset)


def hostile(number: int, folder: Path) -> tuple[str, bytes]:
    """What was done to which file, and what it is now. `folder` keeps the sound ones."""
    chance = random.Random(number)
    kind = chance.choice(KINDS)
    content, header_bytes = sound(kind, folder)
    how = chance.choice(WAYS)
    return f"{kind}: {how.__name__}", bytes(how(bytearray(content), header_bytes, chance))


def flipped_bytes(content: bytearray, header_bytes: int, chance: random.Random) -> bytearray:
    for _ in range(chance.choice((1, 1, 2, 8))):
        content[chance.randrange(header_bytes)] ^= chance.randrange(1, 256)
    return content


def flipped_near_the_start(content: bytearray, header_bytes: int, chance: random.Random) -> bytearray:
    content[chance.randrange(min(header_bytes, 1500))] = chance.randrange(256)
    return content


def extreme_numbers(content: bytearray, header_bytes: int, chance: random.Random) -> bytearray:
    code = chance.choice(("<I", "<Q"))
    at = chance.randrange(4, header_bytes - 8)
    struct.pack_into(code, content, at, chance.choice(EXTREMES) % (1 << 8 * struct.calcsize(code)))
    return content


def extreme_settings(content: bytearray, header_bytes: int, chance: random.Random) -> bytearray:
    """The value of an entry: how many heads, layers, tokens there are said to be."""
    architecture = content[content.index(b"general.architecture") + 32 :][:8].split(b"\0")[0]
    found = [at for at in _each(content, architecture[:4], header_bytes) if content[at - 8 : at - 4] != b"\0" * 4]
    at = chance.choice(found or [8])
    length = struct.unpack_from("<Q", content, at - 8)[0]
    value_at = at + length + 4 if length < 100 else at
    struct.pack_into("<I", content, min(value_at, header_bytes - 8), chance.choice(EXTREMES) % (1 << 32))
    return content


def hostile_vocabulary(content: bytearray, header_bytes: int, chance: random.Random) -> bytearray:
    """A token's text, length, kind or number among the special ones."""
    start = content.index(b"tokenizer.ggml.tokens")
    end = content.index(b"tokenizer.chat_template")
    for _ in range(chance.choice((1, 3, 30))):
        at = chance.randrange(start + 40, end - 8)
        text = chance.choice((*HOSTILE_TOKENS, struct.pack("<I", chance.choice(EXTREMES) % (1 << 32))))
        content[at : at + len(text)] = text
    return content


def hostile_tensors(content: bytearray, header_bytes: int, chance: random.Random) -> bytearray:
    """A tensor's name, dimensions, type or offset."""
    start = content.index(b"token_embd.weight") - 8
    for _ in range(chance.choice((1, 1, 4))):
        at = chance.randrange(start, header_bytes - 8)
        struct.pack_into("<I", content, at, chance.choice(EXTREMES) % (1 << 32))
    return content


def swapped_types(content: bytearray, header_bytes: int, chance: random.Random) -> bytearray:
    """Tensors of another type of the same size or less: what is read as weights is not what was written."""
    start = content.index(b"token_embd.weight") - 8
    for at in _each(content[:header_bytes], struct.pack("<I", 2), header_bytes, start):
        if chance.random() < 0.2:
            struct.pack_into("<I", content, at, chance.randrange(42))
    return content


def cut(content: bytearray, header_bytes: int, chance: random.Random) -> bytearray:
    return content[: chance.choice((chance.randrange(header_bytes), chance.randrange(len(content)), len(content) - 1))]


def moved(content: bytearray, header_bytes: int, chance: random.Random) -> bytearray:
    """A piece of the header is missing, there twice, or something else."""
    at, n_bytes = chance.randrange(header_bytes - 64), chance.choice((1, 8, 32))
    piece = content[at : at + n_bytes]
    content[at : at + n_bytes] = chance.choice((b"", piece + piece, bytes(n_bytes), chance.randbytes(n_bytes)))
    return content


def hostile_weights(content: bytearray, header_bytes: int, chance: random.Random) -> bytearray:
    """Not a number, infinite, or noise, where the scales of blocks are."""
    for _ in range(chance.choice((1, 100, 5_000))):
        at = chance.randrange(header_bytes, len(content) - 2)
        content[at : at + 2] = chance.choice((b"\x00\x7c", b"\x00\x7e", b"\xff\xff", chance.randbytes(2)))
    return content


WAYS: Sequence[Callable[[bytearray, int, random.Random], bytearray]] = (
    flipped_bytes, flipped_near_the_start, extreme_numbers, extreme_settings, hostile_vocabulary, hostile_tensors,
    swapped_types, cut, moved, hostile_weights,
)  # fmt: skip


def _each(content: bytes | bytearray, wanted: bytes, end: int, start: int = 0) -> list[int]:
    found, at = [], content.find(wanted, start, end)
    while at >= 0:
        found.append(at)
        at = content.find(wanted, at + 1, end)
    return found
