"""A reply parser for tests: `<t>..</t>` is thinking, `<c name>{..}</c>` a call; nothing is held back but tags."""

from __future__ import annotations

import re

from localrun.server.parsing.pieces import CallArguments, CallStart, Content, Piece, Reply, Thinking
from localrun.wire import ChosenLogprob, Delta, Finish, Phase, Usage

USAGE = Usage(n_prompt=10, n_cached=4, n_output=3, queued_s=0, prefill_s=0.5, decode_s=0.25)
_TAG = re.compile(r"<(/?)(t|c)(?: (\w+))?>")


class StubParser:
    """See the module."""

    def __init__(self) -> None:
        self._text = ""
        self._inside = ""
        self._n_calls = 0

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._text += text
        while found := _TAG.search(self._text):
            pieces += self._plain(self._text[: found.start()])
            self._inside = "" if found[1] else found[2]
            if found[2] == "c" and not found[1]:
                pieces.append(CallStart(self._n_calls, f"call_{self._n_calls}", found[3]))
                self._n_calls += 1
            self._text = self._text[found.end() :]
        held = self._text.rfind("<") if "<" in self._text else len(self._text)
        pieces += self._plain(self._text[:held])
        self._text = self._text[held:]
        return pieces

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        return self._plain(self._text)

    def _plain(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._inside == "c":
            return [CallArguments(self._n_calls - 1, text)]
        return [Thinking(text) if self._inside == "t" else Content(text)]


def delta(text: str, finish: Finish | None = None, logprobs: list[ChosenLogprob] | None = None) -> Delta:
    """One token's delta."""
    usage = USAGE if finish is not None else None
    return Delta(1, Phase.DECODE, 1, 1, text, [1], logprobs, finish, None, usage)


def reply() -> Reply:
    return Reply(StubParser())
