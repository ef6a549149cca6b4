"""OpenAI's answers: the SSE chunks of a stream, and the one object that stands for all of them.

Written once per token, so a chunk is put together from bytes made once per answer and the encoded text. Within one
answer the id, the time and the model never change.

Does not: send, or know where the deltas come from. The two routes' own parts are in `chat_chunks.py` and
`completion_chunks.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from localrun import __version__
from localrun.wire import ChosenLogprob, Delta, Finish, TokenLogprob

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode

Fields = dict[str, Any]


class Chunks(ABC):
    """One answer. `include_usage` puts `"usage": null` into all chunks but the last, as `stream_options` asks."""

    id_prefix: ClassVar[str]
    stream_object: ClassVar[str]
    whole_object: ClassVar[str]
    before_text: ClassVar[bytes]
    after_text: ClassVar[bytes]
    no_text: ClassVar[bytes]

    def __init__(self, *, request_id: str, model: str, include_usage: bool) -> None:
        self._envelope: Fields = {
            "id": self.id_prefix + request_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"localrun-{__version__}",
        }
        envelope = encode({"object": self.stream_object} | self._envelope)
        self._head = b"data: " + envelope[:-1] + b',"choices":[{"index":'
        self._usage = b',"usage":null' if include_usage else b""
        self._tail = self._usage + b"}\n\n"
        self._after_text = self.after_text + b',"logprobs":null,"finish_reason":null}]' + self._tail

    # --- a stream ------------------------------------------------------------------------------------------------

    def text(self, index: int, text: str, logprobs: Sequence[ChosenLogprob] | None = None) -> bytes:
        """New text of one choice."""
        start = self._head + b"%d," % index + self.before_text + encode(text)
        if not logprobs:
            return start + self._after_text
        more = b',"logprobs":' + encode(self.logprobs(index, logprobs)) + b',"finish_reason":null}]'
        return start + self.after_text + more + self._tail

    def end(self, index: int, reason: str, fields: Fields) -> bytes:
        """Why one choice ended. `fields` go beside `choices`."""
        choice = b'%d,%b,"logprobs":null,"finish_reason":%b}]' % (index, self.no_text, encode(reason))
        more = b"," + encode(fields)[1:-1] if fields else b""
        return self._head + choice + more + self._tail

    def last(self, fields: Fields) -> bytes:
        """The chunk without choices that carries the usage."""
        return b"data: " + encode({"object": self.stream_object} | self._envelope | {"choices": []} | fields) + b"\n\n"

    @abstractmethod
    def first(self, index: int) -> bytes:
        """What precedes a choice's text; may be empty."""

    @abstractmethod
    def news(self, index: int, delta: Delta) -> bytes:
        """The chunks of one delta; may be empty. Not its end."""

    # --- a whole answer ------------------------------------------------------------------------------------------

    def whole(self, choices: list[Fields], fields: Fields) -> bytes:
        """The answer of a request that does not stream."""
        return encode({"object": self.whole_object} | self._envelope | {"choices": choices} | fields)

    @abstractmethod
    def gather(self, index: int, delta: Delta) -> None:
        """Keeps one delta for `choice`."""

    @abstractmethod
    def choice(self, index: int, reason: str) -> Fields:
        """One finished choice of `whole`."""

    # --- both ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def logprobs(self, index: int, logprobs: Sequence[ChosenLogprob]) -> Fields:
        """Log-probabilities of one choice's next tokens, in the route's own form."""

    def reason(self, index: int, finish: Finish) -> str:
        """Why a choice ended, in OpenAI's words."""
        return Finish.LENGTH.value if finish is Finish.LENGTH else Finish.STOP.value

    def n_thinking(self, index: int) -> int:
        """How many of a choice's tokens were thinking."""
        return 0


def entry(token: ChosenLogprob | TokenLogprob) -> Fields:
    """One token of chat's log-probabilities. `bytes` is there because half a character has no text."""
    return {"token": piece_text(token.piece), "logprob": token.logprob, "bytes": list(token.piece)}


def entries(logprobs: Sequence[ChosenLogprob]) -> list[Fields]:
    """Tokens with their alternatives."""
    return [entry(chosen) | {"top_logprobs": [entry(other) for other in chosen.top]} for chosen in logprobs]


def piece_text(piece: bytes) -> str:
    """A token's text, as far as it has one."""
    return piece.decode("utf-8", errors="replace")
