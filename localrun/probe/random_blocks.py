"""Random weights of one tensor type, as bytes that can be tiled over tensors of any size.

A pool is a prime number of 32- or 256-element units, more than any tensor has rows. A tensor takes its bytes from the
pool in order, going round, from a start of its own. Because the pool's length is prime and the row's is smaller, no two
rows of a tensor start at the same place: all rows differ, though they are made of the same blocks. That is enough for
benchmarks and for tests of the runtime (finite outputs, no ties by construction); it is not how a trained matrix looks.

Values have mean about 0 and standard deviation 1/sqrt(fan-in), so that activations keep their size from layer to layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from localrun.models.gguf.ggml_types import GgmlType

Bytes = npt.NDArray[np.uint8]

# `kvalues_iq4nl` of ggml-common.h.
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# Each is prime. The smallest above the vocabulary size of a shape keeps small shapes quick to write.
_POOL_UNITS = (1_031, 8_209, 65_537, 262_147)

# Types whose elements are not grouped are drawn in units of this many.
_PLAIN_UNIT_ELEMENTS = 32


class BlockPool:
    """Random blocks of one type at one scale. `n_rows_max` is the most rows that a tensor made from it may have."""

    def __init__(self, tensor_type: GgmlType, fan_in: int, n_rows_max: int, rng: np.random.Generator) -> None:
        unit_elements = max(tensor_type.block_elements, _PLAIN_UNIT_ELEMENTS)
        n_units = next(units for units in _POOL_UNITS if units > n_rows_max)
        self._rng = rng
        self._n_units = n_units
        self._unit_bytes = unit_elements // tensor_type.block_elements * tensor_type.block_bytes
        self._bytes = _random_blocks(tensor_type, n_units * unit_elements, 1 / math.sqrt(fan_in), rng)

    def chunks(self, size_bytes: int) -> Iterator[Bytes]:
        """`size_bytes` bytes of blocks from a random start, in pieces that are views of the pool."""
        start = int(self._rng.integers(self._n_units)) * self._unit_bytes
        while size_bytes > 0:
            piece = self._bytes[start : start + size_bytes]
            yield piece
            size_bytes -= len(piece)
            start = 0


def _random_blocks(tensor_type: GgmlType, n_elements: int, std: float, rng: np.random.Generator) -> Bytes:
    if draw := _DRAWN.get(tensor_type.name):
        return draw(n_elements // tensor_type.block_elements, std, rng)
    # One row per block, because the quantizer works on rows. 64-bit normals would take twice the memory.
    values = rng.standard_normal(n_elements, dtype=np.float32).reshape(-1, _PLAIN_UNIT_ELEMENTS)
    values *= np.float32(std)
    quantized: npt.NDArray[Any] = gguf.quants.quantize(values, gguf.GGMLQuantizationType(tensor_type.number))
    return quantized.view(np.uint8).reshape(-1)


def _random_q4_k(n_blocks: int, std: float, rng: np.random.Generator, *, n_bits: int = 4) -> Bytes:
    """Q4_K super-blocks, and with 5 bits Q5_K's.

    Layout (block_q4_K in ggml-common.h): fp16 d, fp16 dmin, 12 bytes with eight 6-bit scales and eight 6-bit minima,
    and the values' bits; weight = d * scale * q - dmin * minimum. With minimum = scale and dmin = 7.5 d, a uniform q in
    0..15 gives mean 0 and the standard deviation d * rms(scale) * sqrt((16^2 - 1) / 12).
    """
    n_values = 2**n_bits
    scales = rng.integers(32, 64, size=(n_blocks, 8), dtype=np.uint8)
    d = std / (_rms(32, 63) * math.sqrt((n_values**2 - 1) / 12))
    head = np.empty((n_blocks, 16), dtype=np.uint8)
    head[:, 0:4] = np.array([d, (n_values - 1) / 2 * d], dtype="<f2").view(np.uint8)
    low, high = scales[:, :4], scales[:, 4:]
    head[:, 4:8] = head[:, 8:12] = low | (high >> 4 << 6)
    head[:, 12:16] = (high & 15) | (high << 4)
    return np.hstack([head, rng.integers(0, 256, size=(n_blocks, 32 * n_bits), dtype=np.uint8)]).reshape(-1)


def _random_q6_k(n_blocks: int, std: float, rng: np.random.Generator) -> Bytes:
    """Q6_K super-blocks.

    Layout (block_q6_K): 128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 signed 8-bit scales, fp16 d;
    weight = d * scale * (q - 32). A uniform q in 0..63 has standard deviation sqrt((64^2 - 1) / 12); scales of both
    signs make the mean 0.
    """
    blocks = np.empty((n_blocks, 210), dtype=np.uint8)
    blocks[:, :192] = rng.integers(0, 256, size=(n_blocks, 192), dtype=np.uint8)
    scales = rng.integers(32, 64, size=(n_blocks, 16), dtype=np.int8)
    scales *= rng.choice(np.array([-1, 1], dtype=np.int8), size=scales.shape)
    blocks[:, 192:208] = scales.view(np.uint8)
    d = std / (_rms(32, 63) * math.sqrt(4095 / 12))
    blocks[:, 208:210] = np.array([d], dtype="<f2").view(np.uint8)
    return blocks.reshape(-1)


def _random_iq4_xs(n_blocks: int, std: float, rng: np.random.Generator) -> Bytes:
    """IQ4_XS super-blocks.

    Layout (block_iq4_xs): fp16 d, 2 bytes with the high 2 bits of eight scales, 4 bytes with their low 4 bits, 128
    bytes of indices; weight = d * (scale - 32) * _IQ4_VALUES[index]. Scales of both signs make the mean 0.
    """
    scales = rng.integers(16, 32, size=(n_blocks, 8), dtype=np.uint8)
    scales = np.where(rng.integers(0, 2, size=scales.shape, dtype=np.uint8) > 0, scales, 64 - scales).astype(np.uint16)
    blocks = np.empty((n_blocks, 136), dtype=np.uint8)
    d = std / (_rms(1, 16) * math.sqrt(sum(value**2 for value in _IQ4_VALUES) / len(_IQ4_VALUES)))
    blocks[:, 0:2] = np.array([d], dtype="<f2").view(np.uint8)
    high = (scales >> 4 << 2 * np.arange(8, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)
    blocks[:, 2:4] = high.astype("<u2").view(np.uint8).reshape(-1, 2)
    blocks[:, 4:8] = (scales[:, 0::2] & 15) | (scales[:, 1::2] & 15) << 4
    blocks[:, 8:] = rng.integers(0, 256, size=(n_blocks, 128), dtype=np.uint8)
    return blocks.reshape(-1)


def _random_iq4_nl(n_blocks: int, std: float, rng: np.random.Generator) -> Bytes:
    """IQ4_NL blocks: fp16 d, of both signs for a mean of 0, and 16 bytes of indices of `_IQ4_VALUES`."""
    blocks = rng.integers(0, 256, size=(n_blocks, 18), dtype=np.uint8)
    d = std / math.sqrt(sum(value**2 for value in _IQ4_VALUES) / len(_IQ4_VALUES))
    blocks[:, :2] = (d * rng.choice((-1, 1), size=n_blocks)).astype("<f2").view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def _random_q2_k(n_blocks: int, std: float, rng: np.random.Generator) -> Bytes:
    """Q2_K super-blocks: 16 bytes with a scale and a minimum of 4 bits each, 64 bytes of 2-bit values, fp16 d and dmin;
    weight = d * scale * q - dmin * minimum. With minimum = scale and dmin = 1.5 d a uniform q in 0..3 gives mean 0."""
    blocks = rng.integers(0, 256, size=(n_blocks, 84), dtype=np.uint8)
    blocks[:, :16] = rng.integers(8, 16, size=(n_blocks, 16), dtype=np.uint8) * 17
    d = std / (_rms(8, 15) * math.sqrt((4**2 - 1) / 12))
    blocks[:, 80:] = np.array([d, 1.5 * d], dtype="<f2").view(np.uint8)
    return blocks.reshape(-1)


# Drawn as bytes, because gguf-py cannot quantize to these.
_DRAWN: dict[str, Callable[[int, float, np.random.Generator], Bytes]] = {
    "Q2_K": _random_q2_k, "Q4_K": _random_q4_k, "Q5_K": partial(_random_q4_k, n_bits=5), "Q6_K": _random_q6_k,
    "IQ4_NL": _random_iq4_nl, "IQ4_XS": _random_iq4_xs,
}  # fmt: skip


def _rms(first: int, last: int) -> float:
    """Root mean square of the integers from `first` to `last`."""
    return math.sqrt(sum(n * n for n in range(first, last + 1)) / (last - first + 1))
