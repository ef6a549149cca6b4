"""From submitted jobs to OpenAI's answer, streamed or whole, for chat and completions alike; its `usage`, and the
`timings` that llama-server puts beside it.

Runs in the task of the request. Per token it does one encode.
Does not: make prompts (`chat.py`, `completions.py`), or know the form of a chunk (`chunks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager

import msgspec

from localrun.errors import BadRequest, Cancelled, ContextExceeded, EngineFailed
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Headers
from localrun.server.jobs import streaming
from localrun.server.jobs.job import Job
from localrun.server.openai.chunks import DONE, Chunks, Fields
from localrun.wire import Delta, Finish, Usage


@contextmanager
def naming(field: str, *, effort: str = "reasoning_effort") -> Iterator[None]:
    """A prompt that is too long is named as `field`; thinking that the model does not know, as `effort`."""
    try:
        yield
    except ContextExceeded as error:
        error.field = field
        raise
    except BadRequest as error:
        if error.field != "think":
            raise
        raise BadRequest(
            f"{effort}: this model does not support thinking; leave it out, or use 'none'", field=effort
        ) from None


class PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`cached_tokens` of the prompt were not computed again."""

    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning_tokens` of the output were thinking."""

    reasoning_tokens: int


class OpenAIUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: OutputDetails


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds and rates of one answer, as llama-server names them."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float | None


def usage_of(prompts: Sequence[Usage], choices: Sequence[Usage], *, n_thinking: int = 0) -> OpenAIUsage:
    """`prompts` has one entry per prompt, `choices` one per answer: a prompt with several answers counts once.
    `n_thinking` of the answers' tokens were thinking."""
    n_prompt = sum(one.n_prompt for one in prompts)
    n_output = sum(one.n_output for one in choices)
    return OpenAIUsage(
        prompt_tokens=n_prompt,
        completion_tokens=n_output,
        total_tokens=n_prompt + n_output,
        prompt_tokens_details=PromptDetails(cached_tokens=sum(one.n_cached for one in prompts)),
        completion_tokens_details=OutputDetails(reasoning_tokens=n_thinking),
    )


def timings_of(one: Usage) -> Timings:
    """Milliseconds and rates of one answer. `prompt_n` counts what was computed, `cache_n` what was not."""
    n_computed = one.n_prompt - one.n_cached
    return Timings(
        cache_n=one.n_cached,
        prompt_n=n_computed,
        prompt_ms=one.prefill_s * 1000,
        prompt_per_second=_rate(n_computed, one.prefill_s),
        predicted_n=one.n_output,
        predicted_ms=one.decode_s * 1000,
        # The time runs from the first token to the last, so it is that of all but one.
        predicted_per_second=_rate(one.n_output - 1, one.decode_s),
    )


def _rate(n_tokens: int, seconds: float) -> float | None:
    return n_tokens / seconds if seconds > 0 and n_tokens > 0 else None


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
        counts = usage_of(by_index[:: self._n_per_prompt], by_index, n_thinking=n_thinking)
        return {"usage": counts} | self._timings()

    def _timings(self) -> Fields:
        """Of several answers at once they would mean nothing."""
        return {"timings": timings_of(self._usages[0])} if len(self._jobs) == 1 else {}


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
