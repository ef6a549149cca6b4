"""Ollama's answers: the NDJSON lines of a stream, and the one object that stands for all of them.

Runs in the task of the request. Written once per token, so a line is put together from bytes made once per request, the
time, and the encoded text. The same code makes the single answer of `stream: false`, so both have the same fields.
Does not: make prompts (`chat.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from localrun.server import streaming
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Headers
from localrun.server.jobs.generation import Generation
from localrun.server.jobs.job import Job
from localrun.server.ollama.bodies import Options, PromptFields
from localrun.server.openai.answer import Fields, encode, entries, headers_of
from localrun.server.parsing.pieces import Call, CallArguments, CallStart, Content, Piece, Reply, Thinking, ended
from localrun.server.prompting.fitting import Fitted, Tokens
from localrun.server.prompting.places import shown
from localrun.wire import ChosenLogprob, Delta, Segment, Submit, Usage

# {"id": ..., "function": {"index": 0, "name": ..., "arguments": {...}}}
ToolCall = dict[str, Any]


class Said(NamedTuple):
    """What an answer said, or a part of it."""

    text: str = ""
    thinking: str = ""
    tool_calls: Sequence[ToolCall] = ()


class Lines:
    """One answer's lines. `model` is shown as the client wrote it. The text of a chat is in `message`, that of generate
    in `response`."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._head = b'{"model":' + encode(model) + b',"created_at":"'
        self._before_text = b'","message":{"role":"assistant","content":' if is_chat else b'","response":'
        self._after_text = b"}" if is_chat else b""
        self._more = self._after_text + b',"done":false}\n'

    def text(self, text: str, logprobs: Sequence[ChosenLogprob] | None = None) -> bytes:
        if not logprobs:
            return self._head + rfc3339_now() + self._before_text + encode(text) + self._more
        return self.part(Said(text), logprobs)

    def part(self, said: Said, logprobs: Sequence[ChosenLogprob] | None = None) -> bytes:
        beside: Fields = {"logprobs": entries(logprobs)} if logprobs else {}
        return self._with_fields(said, beside | {"done": False})

    def end(self, reason: str, fields: Fields, *, said: Said | None = None) -> bytes:
        """The last line, or with `said` the only one."""
        return self._with_fields(said or Said(), {"done": True, "done_reason": reason} | fields)

    def rendered(self, segments: Sequence[Segment]) -> bytes:
        """The answer to who only wants to see the prompt."""
        prompt, n_media = shown(segments)
        told = {"rendered_template": prompt, "image_count": n_media}
        return self._with_fields(Said(), {"done": False, "_debug_info": told})

    def _with_fields(self, said: Said, fields: Fields) -> bytes:
        beside: Fields = {}
        if said.thinking:
            beside["thinking"] = said.thinking
        if said.tool_calls:
            beside["tool_calls"] = said.tool_calls
        # Chat has them in the message, generate beside the response: both times right behind the text.
        more = b"," + encode(beside)[1:-1] if beside else b""
        rest = self._after_text + b"," + encode(fields)[1:] + b"\n"
        return self._head + rfc3339_now() + self._before_text + encode(said.text) + more + rest


def figures(usage: Usage, *, load_s: float, total_s: float) -> dict[str, int]:
    """Counts and integer nanoseconds. All of them are always there, and no duration that clients divide by is 0."""
    return {
        "total_duration": _ns(total_s),
        "load_duration": _ns(load_s),
        "prompt_eval_count": usage.n_prompt,
        "prompt_eval_cached_count": usage.n_cached,
        "prompt_eval_duration": max(1, _ns(usage.prefill_s)),
        "eval_count": usage.n_output,
        "eval_duration": max(1, _ns(usage.decode_s)),
    }


def draft_counts(record: Generation) -> Fields:
    """Not Ollama's: what came of drafting, where anything was drafted."""
    if not record.n_drafted:
        return {}
    said: Fields = {"draft_count": record.n_drafted, "draft_accepted_count": record.n_accepted}
    return said if record.speedup is None else said | {"speedup": round(record.speedup, 3)}


def rfc3339(moment_ns: int) -> bytes:
    """Nanoseconds since 1970 as UTC text."""
    seconds, rest = divmod(moment_ns, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)).encode("ascii") + b".%09dZ" % rest


_second = -1
_second_text = b""


def rfc3339_now() -> bytes:
    """As `rfc3339`, now; the part above the second is made once a second."""
    global _second, _second_text
    seconds, rest = divmod(time.time_ns(), 1_000_000_000)
    if seconds != _second:
        _second_text = rfc3339(seconds * 1_000_000_000)[:19]
        _second = seconds
    return _second_text + b".%09dZ" % rest


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class Parts:
    """One answer's. A call is whole when the next piece is another's."""

    def __init__(self) -> None:
        self._open: Call | None = None
        self.n_calls = 0

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
        whole = tool_call(call, self.n_calls)
        if whole is None:
            return []
        self.n_calls += 1
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
    return Said(
        text="".join(part.text for part in parts),
        thinking="".join(part.thinking for part in parts),
        tool_calls=[call for part in parts for call in part.tool_calls],
    )


async def answer(
    exchange: Exchange,
    job: Job,
    body: PromptFields,
    options: Options,
    fitted: Fitted,
    lines: Lines,
    *,
    context: Tokens | None = None,
) -> None:
    """Sends the prompt to the engine and the answer to the client. With `context`, which is the whole prompt, the last
    line has it and the generated tokens. Raises what the engine refuses."""
    prepared = fitted.prepared
    if body.debug_render_only:
        await exchange.answer(lines.rendered(prepared.segments))
        return
    asked = Submit(
        id=0,
        sampling=options.sampling(),
        n_predict=options.n_predict,
        stop=(*options.stop_strings, *prepared.stop),
        logprobs=bool(body.logprobs),
        n_probs=body.top_logprobs or 0,
        grammar=prepared.grammar,
        show_control=prepared.show_control,
    )
    await fitted.submit(job, asked)
    headers = [*headers_of([job]), *fitted.headers]
    sender = _Answer(exchange, job, lines, Reply(prepared.new_parser()), context, headers)
    if body.stream is not False:
        await streaming.stream(exchange, [job], sender, headers)
    else:
        await sender.whole()


@dataclass
class _Answer(streaming.Writer):
    """One answer, sent once."""

    exchange: Exchange
    job: Job
    lines: Lines
    reply: Reply
    context: Tokens | None
    headers: Headers
    parts: Parts = field(default_factory=Parts)
    output_tokens: list[int] = field(default_factory=list)

    def take(self, _: int, delta: Delta) -> bytes:
        update = b"".join(self._update(delta))
        if delta.finish is None:
            return update
        return update + self.lines.end(delta.finish.value, self._last_fields(delta))

    async def whole(self) -> None:
        """Sends all of it at once. Raises what the job's iteration raises, and Cancelled: `stop` would be a lie."""
        parts: list[Said] = []
        logprobs: list[ChosenLogprob] = []
        async for delta in self.job:
            parts += self._take(delta)
            logprobs += delta.logprobs or ()
            if delta.finish is None:
                continue
            finish, _ = ended(delta)
            fields = self._last_fields(delta)
            if logprobs:
                fields["logprobs"] = entries(logprobs)
            line = self.lines.end(finish.value, fields, said=joined(parts))
            await self.exchange.answer(line, headers=self.headers)

    def _update(self, delta: Delta) -> list[bytes]:
        """The lines of a delta. Its log-probabilities are in the first of them, or in an empty one."""
        parts, logprobs = self._take(delta), delta.logprobs
        if not parts:
            return [self.lines.text("", logprobs)] if logprobs else []
        update = []
        for part in parts:
            is_text = not part.thinking and not part.tool_calls
            update.append(self.lines.text(part.text, logprobs) if is_text else self.lines.part(part, logprobs))
            logprobs = None
        return update

    def _take(self, delta: Delta) -> list[Said]:
        self.output_tokens += delta.tokens
        return self.parts.take(self.reply.take(delta), is_end=delta.finish is not None)

    def _last_fields(self, delta: Delta) -> Fields:
        if self.parts.n_calls:
            self.job.record.called()
        fields: Fields = {}
        if self.context is not None:
            fields["context"] = [*self.context, *self.output_tokens]
        if delta.usage is not None:
            total_s = time.monotonic() - self.job.arrived_at_s
            fields |= figures(delta.usage, load_s=self.job.load_s, total_s=total_s) | draft_counts(self.job.record)
        return fields
