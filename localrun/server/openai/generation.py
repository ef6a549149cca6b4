"""From submitted jobs to OpenAI's answer, streamed or whole, for chat and completions alike.

Runs in the task of the request. Per token it does one encode.

Does not: make prompts (`chat.py`, `completions.py`), or know the form of a chunk (`chunks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from localrun.errors import Cancelled, EngineFailed
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Headers
from localrun.server.jobs import streaming
from localrun.server.jobs.job import Job
from localrun.server.openai import usage as openai_usage
from localrun.server.openai.chunks import DONE, Chunks, Fields
from localrun.server.openai.prompt_field import naming
from localrun.wire import Delta, Finish, Usage


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
        self._headers = headers_of(jobs)

    async def send(self, *, stream: bool) -> None:
        """Sends all of it. Raises what the jobs' iteration raises."""
        if stream:
            with naming(self._prompt_field):
                await streaming.stream(self._exchange, self._jobs, self, self._headers)
        else:
            reasons = await self.gather()
            await self.send_choices([self._chunks.choice(index, reason) for index, reason in enumerate(reasons)])

    async def gather(self) -> list[str]:
        """Waits for all choices, which the chunks keep. Why each of them ended. Raises what the iteration raises."""
        reasons = [""] * len(self._jobs)
        with naming(self._prompt_field):
            async with aclosing(streaming.deltas(self._jobs)) as deltas:
                async for index, delta, _ in deltas:
                    self._chunks.gather(index, delta)
                    if delta.finish is not None:
                        reasons[index] = self._finish(index, delta)
        return reasons

    async def send_choices(self, finished: list[Fields]) -> None:
        """The whole answer, of these choices."""
        await self._exchange.answer(self._chunks.whole(finished, self._counts()), headers=self._headers)

    # --- as the writer of a stream -------------------------------------------------------------------------------

    def begin(self) -> bytes:
        """All choices begin at once and in order: OpenAI's own client takes the first chunk for choice 0."""
        return b"".join(self._chunks.first(index) for index in range(len(self._jobs)))

    def take(self, index: int, delta: Delta) -> bytes:
        news = self._chunks.news(index, delta)
        return news if delta.finish is None else news + self._end(index, delta)

    def end(self) -> bytes:
        return self._chunks.last(self._counts()) + DONE if self._include_usage else DONE

    # --- inside --------------------------------------------------------------------------------------------------

    def _end(self, index: int, delta: Delta) -> bytes:
        reason = self._finish(index, delta)
        # With a usage chunk to come, the timings are there.
        fields = {} if self._include_usage else self._timings()
        return self._chunks.end(index, reason, fields)

    def _finish(self, index: int, delta: Delta) -> str:
        """The reason in OpenAI's words."""
        finish, self._usages[index] = ended(delta)
        return self._chunks.reason(index, finish)

    def _counts(self) -> Fields:
        by_index = [self._usages[index] for index in range(len(self._jobs))]
        n_thinking = sum(self._chunks.n_thinking(index) for index in range(len(self._jobs)))
        counts = openai_usage.usage(by_index[:: self._n_per_prompt], by_index, n_thinking=n_thinking)
        return {"usage": counts} | self._timings()

    def _timings(self) -> Fields:
        """Of several answers at once they would mean nothing."""
        return {"timings": openai_usage.timings(self._usages[0])} if len(self._jobs) == 1 else {}


def ended(delta: Delta) -> tuple[Finish, Usage]:
    """How a final delta ended its job. Raises Cancelled: `stop` would be a lie; and EngineFailed without counts."""
    if delta.finish is None or delta.finish is Finish.CANCELLED:
        raise Cancelled("the request was cancelled")
    if delta.usage is None:
        raise EngineFailed("the engine ended a request without saying what it used")
    return delta.finish, delta.usage


def headers_of(jobs: Sequence[Job]) -> Headers:
    """The header that names an answer's requests."""
    return [(b"x-localrun-request", ", ".join(job.id for job in jobs).encode("ascii"))]
