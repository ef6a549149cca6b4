"""The pieces of a reply as the parts of Ollama's answers: text and thinking as they come, tool calls when they are
whole.

Runs in the task of the request. Does not: make lines of them (`lines.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from localrun.server.ollama.lines import Said, ToolCall
from localrun.server.parsing.pieces import Call, CallArguments, CallStart, Content, Piece, Thinking


class Parts:
    """One answer's. A call is whole when the next piece is another's."""

    def __init__(self) -> None:
        self._open: Call | None = None
        self._n_calls = 0

    def take(self, pieces: Sequence[Piece], *, is_end: bool) -> list[Said]:
        """The parts that `pieces` complete, in their order. With `is_end` no more follow."""
        parts: list[Said] = []
        for piece in pieces:
            if isinstance(piece, CallArguments):
                if self._open is not None:
                    self._open.arguments.append(piece.text)
                continue
            parts += self._closed()
            if isinstance(piece, Content):
                parts.append(Said(text=piece.text))
            elif isinstance(piece, Thinking):
                parts.append(Said(thinking=piece.text))
            elif isinstance(piece, CallStart):
                self._open = Call(piece.id, piece.name)
        return parts + self._closed() if is_end else parts

    def _closed(self) -> list[Said]:
        call, self._open = self._open, None
        if call is None:
            return []
        whole = tool_call(call, self._n_calls)
        if whole is None:
            return []
        self._n_calls += 1
        return [Said(tool_calls=(whole,))]


def tool_call(call: Call, index: int) -> ToolCall | None:
    """A call in Ollama's form; None for one that was cut off by the limit of the answer: nobody can make it."""
    try:
        arguments = json.loads(call.arguments_text or "{}")
    except ValueError:
        return None
    if not isinstance(arguments, dict):
        return None
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


def joined(parts: Sequence[Said]) -> Said:
    """All of an answer's parts as one."""
    return Said(
        text="".join(part.text for part in parts),
        thinking="".join(part.thinking for part in parts),
        tool_calls=[call for part in parts for call in part.tool_calls],
    )
