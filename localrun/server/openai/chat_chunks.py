"""The chunks of `/v1/chat/completions`: content, thinking and tool calls, each as a delta of its own.

A choice's first chunk has the role. A call begins with a chunk of its id and name, and its arguments follow in pieces,
as OpenAI streams them; thinking comes as `reasoning_content`, as DeepSeek, llama-server and vLLM name it. `functions`,
the older form, gets its one call as `function_call`.

Does not: send, or parse what the model wrote.
"""

from __future__ import annotations

from collections.abc import Sequence

from localrun.server.openai.chunks import Chunks, Fields, encode, entries
from localrun.server.parsing.pieces import Call, CallArguments, CallStart, Content, Reply, Thinking
from localrun.wire import ChosenLogprob, Delta, Finish


class ChatChunks(Chunks):
    """See the module. One reply for each choice."""

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
