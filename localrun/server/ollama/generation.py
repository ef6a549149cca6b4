"""From a fitted prompt to Ollama's answer, streamed or whole, for chat and generate alike.

Runs in the task of the request. Per token it does one encode.

Does not: make prompts (`chat.py`, `generate.py`).
"""

from __future__ import annotations

import time

from localrun.errors import Cancelled
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Headers
from localrun.server.jobs import streaming
from localrun.server.jobs.job import Job
from localrun.server.ollama import answer_parts
from localrun.server.ollama import lines as ollama_lines
from localrun.server.ollama.answer_parts import Parts
from localrun.server.ollama.bodies import PromptFields
from localrun.server.ollama.fitting import Fitted, Tokens
from localrun.server.ollama.lines import Fields, Lines, Said
from localrun.server.ollama.options import Options
from localrun.server.parsing.pieces import ReplyParser
from localrun.wire import ChosenLogprob, Delta, Finish, Submit


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
        await exchange.answer(lines.rendered("".join(segment.text for segment in prepared.segments)))
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
    await job.submit(asked, segments=() if fitted.tokens is not None else prepared.segments, tokens=fitted.tokens)
    sender = _Answer(exchange, job, lines, prepared.new_parser(), context=context, n_cut=fitted.n_cut)
    if body.stream is not False:
        await sender.stream()
    else:
        await sender.whole()


class _Answer:
    """One answer, sent once."""

    def __init__(
        self, exchange: Exchange, job: Job, lines: Lines, parser: ReplyParser, *, context: Tokens | None, n_cut: int
    ) -> None:
        self._exchange = exchange
        self._job = job
        self._lines = lines
        self._parser = parser
        self._parts = Parts()
        self._context = context
        self._output_tokens: list[int] = []
        self._headers: Headers = [(b"x-localrun-request", job.id.encode("ascii"))]
        if n_cut:
            # What was left out of the prompt: messages of a chat, or tokens of a plain prompt or an over-long message.
            self._headers.append((b"x-localrun-truncated", str(n_cut).encode("ascii")))

    async def stream(self) -> None:
        """Sends all of it. Raises what the job's iteration raises."""
        await streaming.stream(self._exchange, [self._job], self, self._headers)

    def begin(self) -> bytes:
        return b""

    def take(self, _: int, delta: Delta) -> bytes:
        news = b"".join(self._news(delta))
        return news if delta.finish is None else news + self._lines.end(delta.finish.value, self._last_fields(delta))

    def end(self) -> bytes:
        return b""

    async def whole(self) -> None:
        """Sends all of it at once. Raises what the job's iteration raises, and Cancelled: `stop` would be a lie."""
        parts: list[Said] = []
        logprobs: list[ChosenLogprob] = []
        async for delta in self._job:
            parts += self._take(delta)
            logprobs += delta.logprobs or ()
            if delta.finish is None:
                continue
            if delta.finish is Finish.CANCELLED:
                raise Cancelled("the request was cancelled")
            fields = self._last_fields(delta)
            if logprobs:
                fields["logprobs"] = [ollama_lines.logprob_entry(chosen) for chosen in logprobs]
            line = self._lines.end(delta.finish.value, fields, said=answer_parts.joined(parts))
            await self._exchange.answer(line, headers=self._headers)

    def _news(self, delta: Delta) -> list[bytes]:
        """The lines of a delta. Its log-probabilities are in the first of them, or in an empty one."""
        parts, logprobs = self._take(delta), delta.logprobs
        if not parts:
            return [self._lines.text("", logprobs)] if logprobs else []
        news = []
        for part in parts:
            is_text = not part.thinking and not part.tool_calls
            news.append(self._lines.text(part.text, logprobs) if is_text else self._lines.part(part, logprobs))
            logprobs = None
        return news

    def _take(self, delta: Delta) -> list[Said]:
        self._output_tokens += delta.tokens
        pieces = self._parser.feed(delta.text) if delta.text else []
        is_end = delta.finish is not None
        if is_end:
            pieces = [*pieces, *self._parser.finish()]
        return self._parts.take(pieces, is_end=is_end)

    def _last_fields(self, delta: Delta) -> Fields:
        fields: Fields = {}
        if self._context is not None:
            fields["context"] = [*self._context, *self._output_tokens]
        if delta.usage is not None:
            total_s = time.monotonic() - self._job.arrived_at_s
            fields |= ollama_lines.metrics(delta.usage, load_s=self._job.load_s, total_s=total_s)
        return fields
