"""The jobs behind one request to `/v1`: as many as it has answers, on one model.

Does not: make their prompts (each route has its own).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec

from localrun.server.http import caller, keep_alive
from localrun.server.http.exchange import Exchange
from localrun.server.http.sampling_fields import SamplingFields
from localrun.server.jobs.job import Job
from localrun.server.jobs.model_defaults import ModelDefaults
from localrun.server.runtime import Runtime
from localrun.wire import Grammar, Sampling, Segment


async def enter(
    runtime: Runtime,
    exchange: Exchange,
    stack: AsyncExitStack,
    *,
    model: str,
    fields: SamplingFields,
    n_jobs: int,
) -> list[Job]:
    """`n_jobs` jobs, entered on `stack`: the first waits for the model, the others find it loaded."""
    ask = caller.ask(exchange, model, keep_alive_s=keep_alive.seconds(fields.keep_alive), fields=fields)
    return [await stack.enter_async_context(runtime.job(ask)) for _ in range(n_jobs)]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How the jobs of one request are to generate. `stop` goes besides what the request says."""

    sampling: Sampling
    n_predict: int
    stop: tuple[str, ...]
    ignore_eos: bool = False
    logprobs: bool = False
    n_probs: int = 0
    grammar: Grammar | None = None
    show_control: bool = False

    async def submit(
        self, job: Job, *, choice: int, segments: Sequence[Segment] = (), tokens: Sequence[int] | None = None
    ) -> None:
        """Sends one job to the engine: answer number `choice` to its prompt. Raises EngineDied."""
        await job.submit(
            segments=segments,
            tokens=tokens,
            sampling=for_choice(self.sampling, choice),
            n_predict=self.n_predict,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            n_probs=self.n_probs,
            grammar=self.grammar,
            show_control=self.show_control,
        )


def plan(
    fields: SamplingFields,
    job: Job,
    defaults: ModelDefaults,
    *,
    max_output: int | None,
    stop: Sequence[str] = (),
    grammar: Grammar | None = None,
    show_control: bool = False,
    logprobs: bool = False,
    n_probs: int = 0,
) -> Plan:
    """What `fields` and the model's `defaults` say together. Raises BadRequest for what the model does not know."""
    return Plan(
        sampling=fields.sampling(job.n_vocab, defaults),
        n_predict=defaults.n_predict(max_output),
        stop=(*fields.stop_strings(defaults), *stop),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        n_probs=n_probs,
        grammar=grammar,
        show_control=show_control,
    )


def for_choice(sampling: Sampling, index: int) -> Sampling:
    """Parameters of one of several answers to a prompt: with one seed for all, all would be the same."""
    if sampling.seed is None or index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=sampling.seed + index)


def answer_id(jobs: Sequence[Job]) -> str:
    """What the answer's id is made of."""
    return jobs[0].id.removeprefix("req_")
