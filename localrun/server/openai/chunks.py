"""OpenAI's answers: the SSE chunks of a stream, and the one object that stands for all of them.

Written once per token, so a chunk is put together from bytes made once per answer and the encoded text. Within one
answer the id, the time and the model never change, and a chat's role is in each choice's first chunk alone.

Does not: send, or know where the deltas come from.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from localrun import __version__
from localrun.wire import ChosenLogprob, TokenLogprob

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode

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
        envelope = _encode({"object": self.stream_object} | self._envelope)
        self._head = b"data: " + envelope[:-1] + b',"choices":[{"index":'
        self._usage = b',"usage":null' if include_usage else b""
        self._tail = self._usage + b"}\n\n"
        self._after_text = self.after_text + b',"logprobs":null,"finish_reason":null}]' + self._tail

    def text(self, index: int, text: str, logprobs: Sequence[ChosenLogprob] | None = None) -> bytes:
        """New text of one choice."""
        start = self._head + b"%d," % index + self.before_text + _encode(text)
        if not logprobs:
            return start + self._after_text
        more = b',"logprobs":' + _encode(self.logprobs(index, logprobs)) + b',"finish_reason":null}]'
        return start + self.after_text + more + self._tail

    def end(self, index: int, reason: str, fields: Fields) -> bytes:
        """Why one choice ended. `fields` go beside `choices`."""
        choice = b'%d,%b,"logprobs":null,"finish_reason":%b}]' % (index, self.no_text, _encode(reason))
        more = b"," + _encode(fields)[1:-1] if fields else b""
        return self._head + choice + more + self._tail

    def last(self, fields: Fields) -> bytes:
        """The chunk without choices that carries the usage."""
        return b"data: " + _encode({"object": self.stream_object} | self._envelope | {"choices": []} | fields) + b"\n\n"

    def whole(self, choices: list[Fields], fields: Fields) -> bytes:
        """The answer of a request that does not stream."""
        return _encode({"object": self.whole_object} | self._envelope | {"choices": choices} | fields)

    @abstractmethod
    def first(self, index: int) -> bytes:
        """What precedes a choice's text; may be empty."""

    @abstractmethod
    def choice(self, index: int, text: str, logprobs: Sequence[ChosenLogprob], reason: str) -> Fields:
        """One finished choice of `whole`."""

    @abstractmethod
    def logprobs(self, index: int, logprobs: Sequence[ChosenLogprob]) -> Fields:
        """Log-probabilities of one choice's next tokens, in the route's own form."""


class ChatChunks(Chunks):
    """Of `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    before_text = b'"delta":{"content":'
    after_text = b"}"
    no_text = b'"delta":{}'

    def first(self, index: int) -> bytes:
        return self._head + b'%d,"delta":{"role":"assistant","content":""' % index + self._after_text

    def choice(self, index: int, text: str, logprobs: Sequence[ChosenLogprob], reason: str) -> Fields:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self.logprobs(index, logprobs) if logprobs else None,
            "finish_reason": reason,
        }

    def logprobs(self, index: int, logprobs: Sequence[ChosenLogprob]) -> Fields:
        content = [_entry(chosen) | {"top_logprobs": [_entry(other) for other in chosen.top]} for chosen in logprobs]
        return {"content": content, "refusal": None}


class CompletionChunks(Chunks):
    """Of `/v1/completions`. `echoes` are the prompts to put before the choices' text, by index; empty for none."""

    id_prefix = "cmpl-"
    stream_object = "text_completion"
    whole_object = "text_completion"
    before_text = b'"text":'
    after_text = b""
    no_text = b'"text":""'

    def __init__(self, *, request_id: str, model: str, include_usage: bool, echoes: Sequence[str]) -> None:
        super().__init__(request_id=request_id, model=model, include_usage=include_usage)
        self._echoes = echoes
        self._offsets: dict[int, int] = {}

    def first(self, index: int) -> bytes:
        return self.text(index, self._echoes[index]) if self._echoes else b""

    def choice(self, index: int, text: str, logprobs: Sequence[ChosenLogprob], reason: str) -> Fields:
        echoed = self._echoes[index] if self._echoes else ""
        return {
            "index": index,
            "text": echoed + text,
            "logprobs": self.logprobs(index, logprobs) if logprobs else None,
            "finish_reason": reason,
        }

    def logprobs(self, index: int, logprobs: Sequence[ChosenLogprob]) -> Fields:
        """`text_offset` counts characters from the start of the choice's text."""
        offset = self._offsets.get(index, 0)
        offsets: list[int] = []
        for chosen in logprobs:
            offsets.append(offset)
            offset += len(_text(chosen.piece))
        self._offsets[index] = offset
        return {
            "tokens": [_text(chosen.piece) for chosen in logprobs],
            "token_logprobs": [chosen.logprob for chosen in logprobs],
            "top_logprobs": [{_text(other.piece): other.logprob for other in chosen.top} for chosen in logprobs],
            "text_offset": offsets,
        }


def _entry(token: ChosenLogprob | TokenLogprob) -> Fields:
    """`bytes` is there because half a character has no text."""
    return {"token": _text(token.piece), "logprob": token.logprob, "bytes": list(token.piece)}


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", errors="replace")
