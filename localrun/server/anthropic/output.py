"""A reply's pieces as blocks of content: the blocks themselves, and the SSE events that tell of them while they come.

Runs in the task of the request. Written once per token, so what stays the same within one block is encoded once
(`Deltas`). Invariants: blocks are opened in order, one at a time, each closed before the next; what the events add up
to is what the blocks hold.
Does not: send, or know where the pieces come from.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from localrun.server.parsing.pieces import CallArguments, CallStart, Content, Piece, Thinking

Fields = dict[str, Any]

encode = msgspec.json.Encoder().encode


def event(kind: str, fields: Fields | None = None) -> bytes:
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


class Output:
    """One message's content. With `omits_thinking` thinking has a block without its text."""

    def __init__(self, *, omits_thinking: bool = False) -> None:
        self.has_calls = False
        self._omits_thinking = omits_thinking
        self._blocks: list[Fields] = []
        self._texts: list[list[str]] = []
        self._is_open = False
        self._deltas: Deltas | None = None

    def take(self, pieces: Sequence[Piece]) -> bytes:
        """Takes pieces in. Returns their events."""
        told: list[bytes] = []
        for piece in pieces:
            if isinstance(piece, CallArguments):
                told.append(self._more(piece.text))
            elif isinstance(piece, CallStart):
                told.append(self._open(_tool_use(piece), Deltas(self._next, "input_json_delta", "partial_json")))
            elif isinstance(piece, Content):
                if not self._is_in("text"):
                    told.append(self._open({"type": "text", "text": ""}, Deltas(self._next, "text_delta", "text")))
                told.append(self._more(piece.text))
            elif isinstance(piece, Thinking):
                if not self._is_in("thinking"):
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                    told.append(self._open(block, Deltas(self._next, "thinking_delta", "thinking")))
                told.append(self._more(piece.text))
        return b"".join(told)

    def finish(self) -> bytes:
        """No more pieces come. Returns the last events."""
        return self._close()

    def blocks(self) -> list[Fields]:
        """All of the content, once it has ended. A call that the limit cut off is left out: nobody can make it."""
        made = (self._whole(block, "".join(texts)) for block, texts in zip(self._blocks, self._texts, strict=True))
        return [block for block in made if block is not None]

    @property
    def _next(self) -> int:
        return len(self._blocks)

    def _is_in(self, kind: str) -> bool:
        return self._is_open and self._blocks[-1]["type"] == kind

    def _open(self, block: Fields, deltas: Deltas) -> bytes:
        closed = self._close()
        self.has_calls = self.has_calls or block["type"] == "tool_use"
        index = self._next
        self._blocks.append(block)
        self._texts.append([])
        self._is_open, self._deltas = True, deltas
        return closed + event("content_block_start", {"index": index, "content_block": block})

    def _more(self, text: str) -> bytes:
        self._texts[-1].append(text)
        if self._omits_thinking and self._is_in("thinking"):
            return b""
        return b"" if self._deltas is None else self._deltas.add(text)

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        index = self._next - 1
        stop = event("content_block_stop", {"index": index})
        if self._blocks[-1]["type"] != "thinking":
            return stop
        delta = {"type": "signature_delta", "signature": signature("".join(self._texts[-1]))}
        return event("content_block_delta", {"index": index, "delta": delta}) + stop

    def _whole(self, block: Fields, text: str) -> Fields | None:
        if block["type"] == "text":
            return block | {"text": text}
        if block["type"] == "thinking":
            return block | {"thinking": "" if self._omits_thinking else text, "signature": signature(text)}
        try:
            made = json.loads(text or "{}")
        except ValueError:
            return None
        return block | {"input": made} if isinstance(made, dict) else None


def signature(thinking: str) -> str:
    """Something for clients that refuse thinking without one. Nobody checks it when it comes back."""
    return base64.b64encode(hashlib.sha256(thinking.encode("utf-8", "replace")).digest()).decode("ascii")


def _tool_use(piece: CallStart) -> Fields:
    return {"type": "tool_use", "id": "toolu_" + piece.id.removeprefix("call_"), "name": piece.name, "input": {}}
