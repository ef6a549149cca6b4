"""The parts of a model's vocabulary that localrun needs outside the engine: the texts of a few tokens.

Reads the file again when asked, at the places that the header remembers, and walks over the other tokens (some
milliseconds per hundred thousand); the vocabulary itself is never held. Callers keep what they get.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final, NamedTuple

from localrun.models.bounded_reader import BoundedReader, open_model_file

# Real vocabularies have at most some thousand (reserved ones included), each a few dozen bytes long.
MAX_CONTROL_TOKENS: Final = 16_384
MAX_TOKEN_BYTES: Final = 512

# LLAMA_TOKEN_TYPE_CONTROL in llama.h.
_CONTROL = 3


class ArraySummary(NamedTuple):
    """An array (or a very long text, as type "u8") whose `length` elements were left in the file at `offset`."""

    type: str
    length: int
    offset: int


def read_control_tokens(path: Path, tokens: ArraySummary, token_types: ArraySummary) -> tuple[str, ...]:
    """Texts of the tokens whose type is control, in id order; empty texts are left out.

    Raises BadModelFile when there are more than the limits above, and when the file is gone or was changed in place.
    """
    with open_model_file(path) as reader:
        reader.seek(token_types.offset, "the token types")
        raw_types = reader.take(4 * min(tokens.length, token_types.length), "the token types")
        wanted = [index for index, (kind,) in enumerate(struct.iter_unpack("<i", raw_types)) if kind == _CONTROL]
        if len(wanted) > MAX_CONTROL_TOKENS:
            reader.fail(f"has {len(wanted)} control tokens; the limit is {MAX_CONTROL_TOKENS}")
        texts = _texts(reader, tokens, wanted)
    return tuple(text for text in texts if text)


def read_token(path: Path, tokens: ArraySummary, index: int) -> str:
    """The text of one token. Raises BadModelFile as `read_control_tokens` does."""
    with open_model_file(path) as reader:
        return _texts(reader, tokens, [index])[0]


def _texts(reader: BoundedReader, tokens: ArraySummary, indexes: list[int]) -> list[str]:
    """The texts at ascending `indexes`."""
    reader.seek(tokens.offset, "the tokens")
    texts = []
    next_index = 0
    for index in indexes:
        reader.skip_strings(index - next_index, "the tokens")
        next_index = index + 1
        length = reader.u64("a token's length")
        if length > MAX_TOKEN_BYTES:
            reader.fail(f"has a special token of {length} bytes; the limit is {MAX_TOKEN_BYTES}")
        texts.append(reader.take(length, "a token").decode("utf-8", errors="replace"))
    return texts
