"""OpenAI's answers: the SSE chunks of a stream, and the one object that stands for all of them.

Written once per token, so a chunk is put together from bytes made once per answer and the encoded text. Within one
answer the id, the time and the model never change.

In chat a choice's first chunk has the role. A call begins with a chunk of its id and name, and its arguments follow in
pieces, as OpenAI streams them; thinking comes as `reasoning_content`, as DeepSeek, llama-server and vLLM name it.
`functions`, the older form, gets its one call as `function_call`.
Does not: send, know where the deltas come from, or parse what the model wrote. The part of completions is in
`completions.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from localrun import __version__
from localrun.server.parsing.pieces import Call, CallArguments, CallStart, Content, Reply, Thinking
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


class ChatChunks(Chunks):
    """Content, thinking and tool calls, each as a delta of its own; one reply for each choice."""

    id_prefix = "chatcmpl-"
    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    before_text = b'"delta":{"content":'
    after_text = b"}"
    no_text = b'"delta":{}'

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        include_usage: bool,
        replies: Sequence[Reply],
        uses_functions: bool = False,
    ) -> None:
        super().__init__(request_id=request_id, model=model, include_usage=include_usage)
        self._replies = replies
        self._uses_functions = uses_functions

    def first(self, index: int) -> bytes:
        return self._head + b'%d,"delta":{"role":"assistant","content":""' % index + self._after_text

    def news(self, index: int, delta: Delta) -> bytes:
        """Log-probabilities stand with the first content, or alone where there is none, as for a call."""
        logprobs = delta.logprobs
        chunks: list[bytes] = []
        for piece in self._replies[index].take(delta):
            if isinstance(piece, Content):
                chunks.append(self.text(index, piece.text, logprobs))
                logprobs = None
            else:
                chunks.append(self._other(index, piece))
        if logprobs:
            chunks.append(self.text(index, "", logprobs))
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def gather(self, index: int, delta: Delta) -> None:
        self._replies[index].gather(delta)

    def choice(self, index: int, reason: str) -> Fields:
        said = self._replies[index].gathered
        content = said.content_text
        message: Fields = {"role": "assistant", "content": content, "refusal": None}
        if said.thinking:
            message["reasoning_content"] = said.thinking_text
        if said.calls:
            message["content"] = content or None
            if self._uses_functions:
                message["function_call"] = _function(said.calls[0])
            else:
                message["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": _function(call)} for call in said.calls
                ]
        return {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(index, said.logprobs) if said.logprobs else None,
            "finish_reason": reason,
        }

    def logprobs(self, index: int, logprobs: Sequence[ChosenLogprob]) -> Fields:
        return {"content": entries(logprobs), "refusal": None}

    def reason(self, index: int, finish: Finish) -> str:
        if finish is Finish.STOP and self._replies[index].has_calls:
            return "function_call" if self._uses_functions else "tool_calls"
        return super().reason(index, finish)

    def n_thinking(self, index: int) -> int:
        return self._replies[index].n_thinking

    def _other(self, index: int, piece: Thinking | CallStart | CallArguments) -> bytes:
        """A piece that is not content."""
        delta: Fields
        if self._uses_functions and not isinstance(piece, Thinking) and piece.index > 0:
            return b""  # the older form has room for one call
        if isinstance(piece, Thinking):
            delta = {"reasoning_content": piece.text}
        elif isinstance(piece, CallStart):
            function = {"name": piece.name, "arguments": ""}
            started = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
            delta = {"function_call": function} if self._uses_functions else {"tool_calls": [started]}
        else:
            more = {"arguments": piece.text}
            is_old = self._uses_functions
            delta = {"function_call": more} if is_old else {"tool_calls": [{"index": piece.index, "function": more}]}
        return self._head + b'%d,"delta":%b' % (index, encode(delta)[:-1]) + self._after_text


def _function(call: Call) -> Fields:
    return {"name": call.name, "arguments": call.arguments_text}
