"""The numbered SSE events of a streamed response.

Written once per token, so what stays the same within one text is encoded once (`opening`).

Does not: know which events follow which (`output.py` does).
"""

from __future__ import annotations

from localrun.server.openai.chunks import Fields, encode


class Events:
    """One stream's events. The first has the number 0."""

    def __init__(self) -> None:
        self._n_sent = 0

    def event(self, kind: str, fields: Fields) -> bytes:
        """One whole event."""
        return self.more(self.opening(kind, fields))

    def opening(self, kind: str, fields: Fields) -> bytes:
        """The beginning of events of one kind that differ in their number, and in what `more` adds."""
        return b"event: %b\ndata: %b" % (kind.encode("ascii"), encode({"type": kind} | fields)[:-1])

    def more(self, opening: bytes, rest: bytes = b"") -> bytes:
        """An event of `opening`, its number, and `rest`: fields as JSON, with a comma before each."""
        number = self._n_sent
        self._n_sent += 1
        return opening + b',"sequence_number":%d' % number + rest + b"}\n\n"
