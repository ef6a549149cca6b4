"""The SSE events of a streamed message.

Written once per token, so what stays the same within one block is encoded once (`Deltas`).

Pure. Does not: know which events follow which (`output.py` and `messages.py` do).
"""

from __future__ import annotations

from typing import Any

import msgspec

Fields = dict[str, Any]

encode = msgspec.json.Encoder().encode


def event(kind: str, fields: Fields | None = None) -> bytes:
    """One whole event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode("ascii"), encode({"type": kind} | (fields or {})))


PING = event("ping")
MESSAGE_STOP = event("message_stop")


class Deltas:
    """Events that add text to one block: `key` is the field that has it, in a delta of type `kind`."""

    def __init__(self, index: int, kind: str, key: str) -> None:
        whole = event("content_block_delta", {"index": index, "delta": {"type": kind, key: ""}})
        # Up to the opening quote of the empty text, and from its closing one on.
        self._before, self._after = whole[: -len(b'""}}\n\n')], b"}}\n\n"

    def add(self, text: str) -> bytes:
        """An event with more text."""
        return self._before + encode(text) + self._after
