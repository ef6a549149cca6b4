"""Cuts a byte stream from an engine into frame bodies.

Owner: one engine child, on the event loop. A pipe delivers whatever it likes: half a length prefix, or forty frames at
once. What is not yet a whole frame stays here.

Invariant: the bytes kept are less than one frame, so at most `framing.MAX_FRAME_BYTES` and one read.

Does not: decode the bodies.
"""

from __future__ import annotations

from collections.abc import Iterator

from localrun import framing

PREFIX_BYTES = 4


class FrameBuffer:
    """Bytes in, frame bodies out, in order."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    @property
    def is_mid_frame(self) -> bool:
        """Whether a frame has begun and not ended: an end of the stream here loses it."""
        return bool(self._bytes)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that `data` completes. Consume the iterator to its end before the next call.

        Raises framing.FrameError when a length beyond the limit is announced.
        """
        self._bytes += data
        start = 0
        try:
            while len(self._bytes) - start >= PREFIX_BYTES:
                body_start = start + PREFIX_BYTES
                end = body_start + framing.body_length(bytes(self._bytes[start:body_start]))
                if end > len(self._bytes):
                    break
                # Before the yield: a body that its taker fails on must not come again.
                start = end
                yield bytes(self._bytes[body_start:end])
        finally:
            del self._bytes[:start]
