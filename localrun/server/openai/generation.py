"""From submitted jobs to OpenAI's answer, streamed or whole, for chat and completions alike.

Runs in the task of the request. Per token it does one encode, and one send for all tokens that are there.

Does not: make prompts (`chat.py`, `completions.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from localrun.errors import Cancelled, ContextExceeded, EngineFailed
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Headers
from localrun.server.jobs.job import Job
from localrun.server.openai import choices
from localrun.server.openai import usage as openai_usage
from localrun.server.openai.chunks import DONE, Chunks, Fields
from localrun.wire import ChosenLogprob, Delta, Finish, Usage


class Answer:
    """One answer with a choice per job; `n_per_prompt` jobs in a row have the same prompt, which came as the body's
    `prompt_field`."""

    def __init__(
        self,
        exchange: Exchange,
        jobs: Sequence[Job],
        chunks: Chunks,
        *,
        n_per_prompt: int,
        include_usage: bool,
        prompt_field: str,
    ) -> None:
        self._exchange = exchange
        self._jobs = jobs
        self._chunks = chunks
        self._n_per_prompt = n_per_prompt
        self._include_usage = include_usage
        self._prompt_field = prompt_field
        self._usages: dict[int, Usage] = {}
        ids = ", ".join(job.id for job in jobs)
        self._headers: Headers = [(b"x-localrun-request", ids.encode("ascii"))]

    async def send(self, *, stream: bool) -> None:
        """Sends all of it. Raises what the jobs' iteration raises."""
        try:
            if stream:
                await self._stream()
            else:
                await self._whole()
        except ContextExceeded as error:
            error.field = self._prompt_field  # the engine does not know what the prompt was made of
            raise

    async def _stream(self) -> None:
        pending: list[bytes] = []
        begun: set[int] = set()
        async with aclosing(choices.deltas(self._jobs)) as deltas:
            async for index, delta, more_is_ready in deltas:
                if index not in begun:
                    begun.add(index)
                    pending.append(self._chunks.first(index))
                if delta.text or delta.logprobs:
                    pending.append(self._chunks.text(index, delta.text, delta.logprobs))
                if delta.finish is not None:
                    pending.append(self._end(index, delta))
                if more_is_ready or not pending:
                    continue
                if not self._exchange.started:
                    # Not before the first delta: what the engine refuses still gets its own status.
                    await self._exchange.open_stream(self._headers)
                await self._exchange.write(b"".join(pending))
                pending.clear()
        if self._include_usage:
            pending.append(self._chunks.last(self._counts()))
        await self._exchange.close_stream(b"".join([*pending, DONE]))

    async def _whole(self) -> None:
        texts: list[list[str]] = [[] for _ in self._jobs]
        logprobs: list[list[ChosenLogprob]] = [[] for _ in self._jobs]
        reasons = [""] * len(self._jobs)
        async with aclosing(choices.deltas(self._jobs)) as deltas:
            async for index, delta, _ in deltas:
                texts[index].append(delta.text)
                logprobs[index] += delta.logprobs or ()
                if delta.finish is not None:
                    reasons[index] = self._finish(index, delta)
        finished = [
            self._chunks.choice(index, "".join(texts[index]), logprobs[index], reasons[index])
            for index in range(len(self._jobs))
        ]
        await self._exchange.answer(self._chunks.whole(finished, self._counts()), headers=self._headers)

    def _end(self, index: int, delta: Delta) -> bytes:
        reason = self._finish(index, delta)
        # With a usage chunk to come, the timings are there.
        fields = {} if self._include_usage else self._timings()
        return self._chunks.end(index, reason, fields)

    def _finish(self, index: int, delta: Delta) -> str:
        """The reason in OpenAI's words. A cancelled choice is an error: `stop` would be a lie."""
        if delta.finish is Finish.CANCELLED:
            raise Cancelled("the request was cancelled")
        if delta.usage is None:
            raise EngineFailed("the engine ended a request without saying what it used")
        self._usages[index] = delta.usage
        return Finish.LENGTH.value if delta.finish is Finish.LENGTH else Finish.STOP.value

    def _counts(self) -> Fields:
        by_index = [self._usages[index] for index in range(len(self._jobs))]
        return {"usage": openai_usage.usage(by_index[:: self._n_per_prompt], by_index)} | self._timings()

    def _timings(self) -> Fields:
        """Of several answers at once they would mean nothing."""
        return {"timings": openai_usage.timings(self._usages[0])} if len(self._jobs) == 1 else {}
