"""A projector without weights, for the fakes: rows are made of the digest of the media.

What stands for a row in cells is a hash of the row and its place in the chunk, and of a chunk that is not causal of all
other rows, too. So a row of another picture, at another place or left out changes what follows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import MediaChunk
from localrun.wire import MediaKind, Segment
from tests.fakes.tokens import tokenize

N_EMBD = 4
# A picture is a grid of patches of so many pixels, and of this many patches a side at most.
PATCH_PIXELS, MOST_PATCHES = 16, 16
# Sound has a chunk for each second.
_SOUND_TOKENS = 10


class FakeProjector:
    """A `backend.Projector` that makes rows of the digest. A picture is one chunk, between two tokens of text if
    `has_ends`; with `is_mrope` it takes as many positions as its longer side has patches.

    An encoding is over at the `looks`th look. `problems` are raised by the next ones, in order, None for none.
    """

    kinds: tuple[MediaKind, ...] = (MediaKind.IMAGE, MediaKind.AUDIO)
    audio_rate_hz = 16_000

    def __init__(
        self, *, is_causal: bool = True, is_mrope: bool = False, has_ends: bool = True, looks: int = 2,
        fingerprint: bytes = b"fake projector",
    ) -> None:  # fmt: skip
        self.fingerprint = fingerprint
        self.max_chunk_tokens = 0 if is_causal else MOST_PATCHES**2
        self.looks = looks
        self.problems: list[Exception | None] = []
        self.begun: list[MediaChunk] = []
        self.n_halted = 0
        self.ring: Callable[[], None] = lambda: None
        self._is_causal, self._is_mrope, self._has_ends = is_causal, is_mrope, has_ends
        self._encoding: FakeEncoding | None = None

    def tokenize(self, segments: Sequence[Segment]) -> list[list[int] | MediaChunk]:
        pieces: list[list[int] | MediaChunk] = []
        for segment in segments:
            media = segment.media
            if media is None:
                pieces.append(tokenize(segment.text, parse_special=segment.trusted))
            elif media.kind is MediaKind.AUDIO:
                n_chunks = -(-media.n_samples // self.audio_rate_hz)
                pieces += [MediaChunk(_SOUND_TOKENS, _SOUND_TOKENS, True, media, at) for at in range(n_chunks)]
            else:
                nx, ny = (min(MOST_PATCHES, -(-size // PATCH_PIXELS)) for size in (media.width, media.height))
                chunk = MediaChunk(nx * ny, max(nx, ny) if self._is_mrope else nx * ny, self._is_causal, media, 0)
                pieces += [[*b"<"], chunk, [*b">"]] if self._has_ends else [chunk]
        return pieces

    def begin(self, chunk: MediaChunk) -> FakeEncoding:
        if self._encoding is not None and not self._encoding.is_ended:
            raise ValueError("one chunk at a time")
        self.begun.append(chunk)
        self._encoding = FakeEncoding(self, chunk, self.problems.pop(0) if self.problems else None)
        return self._encoding


class FakeEncoding:
    """See `FakeProjector`."""

    def __init__(self, projector: FakeProjector, chunk: MediaChunk, problem: Exception | None) -> None:
        self.is_ended = False
        self._projector, self._chunk, self._problem = projector, chunk, problem
        self._n_looks_left = projector.looks

    @property
    def is_over(self) -> bool:
        self._n_looks_left -= 1
        self._projector.ring()  # or nobody would look again
        return self._n_looks_left <= 0

    def result(self) -> NDArray[np.float32]:
        assert not self.is_ended, "ended twice"
        self.is_ended = True
        if self._problem is not None:
            raise self._problem
        return fake_rows(self._projector.fingerprint, self._chunk)

    def halt(self) -> None:
        assert not self.is_ended, "ended twice"
        self.is_ended = True
        self._projector.n_halted += 1


def fake_rows(fingerprint: bytes, chunk: MediaChunk) -> NDArray[np.float32]:
    """What a chunk is encoded to."""
    seed = fingerprint + chunk.media.digest + chunk.ordinal.to_bytes(4, "little")
    stream = hashlib.shake_256(seed).digest(2 * N_EMBD * chunk.n_tokens)
    return np.frombuffer(stream, "<u2").astype(np.float32).reshape(chunk.n_tokens, N_EMBD)


def contents_of(chunk: MediaChunk, rows: NDArray[np.float32]) -> list[int]:
    """What stands for the rows of a chunk in cells, below 0."""
    others = 0 if chunk.is_causal else crc32(rows.tobytes())
    return [-1 - (crc32(row.tobytes(), at + others & 0xFFFFFFFF) & 0x7FFFFFFF) for at, row in enumerate(rows)]
