"""Vectors as JSON: lists of numbers, or base64 of their bytes.

A list of a thousand vectors of a thousand numbers is 20 MB of text and takes half a second to write, so it is written
in parts, and other requests have their turn in between.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Sequence

import msgspec

from localrun.wire import Vector

# About a millisecond of work.
_NUMBERS_PER_TURN = 16_384
_BYTES_PER_NUMBER = 4

_encoder = msgspec.json.Encoder()


def values(vector: Vector) -> list[float]:
    """Its numbers."""
    numbers = array("f", vector.values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def base64_json(vector: Vector) -> bytes:
    """As OpenAI's `encoding_format` base64: the little-endian float32 bytes, in quotes."""
    return b'"' + base64.b64encode(vector.values) + b'"'


async def lists_json(vectors: Sequence[Vector]) -> list[bytes]:
    """Each as a JSON list."""
    lists, n_since = [], 0
    for vector in vectors:
        lists.append(_encoder.encode(values(vector)))
        n_since += len(vector.values) // _BYTES_PER_NUMBER
        if n_since >= _NUMBERS_PER_TURN:
            n_since = 0
            await asyncio.sleep(0)
    return lists
