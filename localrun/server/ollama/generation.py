"""From a submitted job to Ollama's answer, streamed or whole, for chat and generate alike.

Runs in the task of the request. Per token it does one encode, and one send for all tokens that are there.

Does not: make prompts (`chat.py`, `generate.py`).
"""

from __future__ import annotations

import time
from typing import Any

from localrun.errors import Cancelled
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Headers
from localrun.server.jobs.job import Job
from localrun.server.ollama import lines as ollama_lines
from localrun.server.ollama.lines import Lines
from localrun.wire import ChosenLogprob, Delta, Finish


class Answer:
    """One answer. With `prompt_tokens`, the last line has `context`: these and the generated tokens."""

    def __init__(
        self, exchange: Exchange, job: Job, lines: Lines, *, prompt_tokens: tuple[int, ...] | None, n_cut: int
    ) -> None:
        self._exchange = exchange
        self._job = job
        self._lines = lines
        self._prompt_tokens = prompt_tokens
        self._output_tokens: list[int] = []
        self._headers: Headers = [(b"x-localrun-request", job.id.encode("ascii"))]
        if n_cut:
            # What was left out of the prompt: messages of a chat, or tokens of a plain prompt or an over-long message.
            self._headers.append((b"x-localrun-truncated", str(n_cut).encode("ascii")))

    async def send(self, *, stream: bool) -> None:
        """Sends all of it. Raises what the job's iteration raises."""
        if stream:
            await self._stream()
        else:
            await self._whole()

    async def _stream(self) -> None:
        pending: list[bytes] = []
        async for delta in self._job:
            self._output_tokens += delta.tokens
            if delta.text or delta.logprobs:
                pending.append(self._lines.text(delta.text, delta.logprobs))
            if delta.finish is None and self._job.has_ready:
                continue
            if not self._exchange.started:
                # Not before the first delta: what the engine refuses still gets its own status.
                await self._exchange.open_stream(self._headers)
            if delta.finish is not None:
                pending.append(self._lines.end(delta.finish.value, self._last_fields(delta)))
                await self._exchange.close_stream(b"".join(pending))
            elif pending:
                await self._exchange.write(b"".join(pending))
                pending.clear()

    async def _whole(self) -> None:
        texts: list[str] = []
        logprobs: list[ChosenLogprob] = []
        async for delta in self._job:
            self._output_tokens += delta.tokens
            texts.append(delta.text)
            logprobs += delta.logprobs or ()
            if delta.finish is None:
                continue
            if delta.finish is Finish.CANCELLED:
                raise Cancelled("the request was cancelled")
            fields = self._last_fields(delta)
            if logprobs:
                fields["logprobs"] = [ollama_lines.logprob_entry(chosen) for chosen in logprobs]
            line = self._lines.end(delta.finish.value, fields, text="".join(texts))
            await self._exchange.answer(line, headers=self._headers)

    def _last_fields(self, delta: Delta) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._prompt_tokens is not None:
            fields["context"] = [*self._prompt_tokens, *self._output_tokens]
        if delta.usage is not None:
            total_s = time.monotonic() - self._job.arrived_at_s
            fields |= ollama_lines.metrics(delta.usage, load_s=self._job.load_s, total_s=total_s)
        return fields
