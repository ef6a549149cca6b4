"""The parser of text that is content and nothing else.

Pure.
"""

from __future__ import annotations

from localrun.server.replies.pieces import Content, Piece


class PlainParser:
    """A `ReplyParser` for what no chat format is in."""

    def feed(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []
