"""From a request's body to its jobs, as many as it has answers, and the loop that every API's stream goes through.

Runs in the request's task. One job, the usual case, is iterated as it is; several (the answers to `n` and to several
prompts) are waited for together. Whatever has come by the time that something is sent goes in one send.
Does not: make prompts, know what an API's stream looks like (its writer does), or keep a silent stream alive
(`exchange.py` does).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Protocol

import msgspec

from localrun.config import NOTHING_ASKED, LoadSettings
from localrun.errors import LocalrunError
from localrun.server import notices
from localrun.server.engines.resident import Use, use_of
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Headers
from localrun.server.http.fields import ModelDefaults, SamplingFields, check_biases, defaults_of, job_request_of
from localrun.server.jobs.job import Job
from localrun.server.media.decoder import check_taken, kinds_of
from localrun.server.prompting.ask import ChatRequest
from localrun.server.prompting.prepare import Prepared
from localrun.server.routing import Body, RoutingInput, routed
from localrun.server.runtime import Runtime
from localrun.wire import Delta, Grammar, Segment, Submit


@asynccontextmanager
async def entered(
    runtime: Runtime,
    exchange: Exchange,
    body: Body,
    question: RoutingInput,
    *,
    n_jobs: int = 1,
    use: Use | None = Use.TEXT,
    load: LoadSettings = NOTHING_ASKED,
    needs_name: bool = False,
    is_for_one: bool = False,
) -> AsyncIterator[tuple[Body, ChatRequest, list[Job]]]:
    """While the client is there: the body with the model that answers, the conversation for that one, and `n_jobs`
    jobs; the first waits for the model, the others find it loaded. What the model cannot take is refused before it is
    loaded.

    Without a `use` it is what the model was made for. `needs_name` is of APIs that have no requests without a
    model's name. What `is_for_one` model no tier answers. Raises what `Targets`, `routed`, `job_request_of`,
    `MediaDecoder.read` and entering a job raise, and BadRequest for media that the model does not take.
    """
    async with exchange.while_connected(), AsyncExitStack() as stack:
        name, ask = getattr(body, "model", None) or "", question.ask
        if use is None:
            model = await asyncio.to_thread(runtime.targets.here, name) if name else None
            use = Use.TEXT if model is None else use_of(model.header)
        if not needs_name and (not name or runtime.settings.default_model):
            name = await runtime.targets.named(exchange.caller, name, use, fills_in=question.fills_in)
            body = msgspec.structs.replace(body, model=name)
        if runtime.settings.tiers and use is Use.TEXT and not is_for_one:
            name, body, ask = await routed(runtime, exchange, name, body, question, load)
        who = job_request_of(exchange, name, body, use=use, load=load)
        if ask.media:
            await runtime.media.read(ask.media)
            if (model := await asyncio.to_thread(runtime.targets.here, name)) is not None:
                check_taken(model, kinds_of(model), ask.media)
        yield body, ask, [await stack.enter_async_context(runtime.job(who)) for _ in range(n_jobs)]


async def plan(
    fields: SamplingFields,
    job: Job,
    *,
    max_output: int | None,
    prepared: Prepared | None = None,
    defaults: ModelDefaults | None = None,
    stop: Sequence[str] = (),
    grammar: Grammar | None = None,
    logprobs: bool = False,
    n_probs: int = 0,
    prediction: str = "",
) -> Submit:
    """What `fields`, `prepared` and the model's own parameters (or `defaults` for these) say together, as a request
    without a prompt; `stop` goes besides what they say. Raises BadRequest for what the model does not know."""
    if passed_over := fields.passed_over():
        notices.note(*passed_over)
    defaults = defaults_of(job.model) if defaults is None else defaults
    if prepared is not None:
        stop, grammar = (*stop, *prepared.stop), prepared.grammar
    return Submit(
        id=0,
        sampling=fields.sampling(job.ready.n_vocab, defaults, await _tokens_of(fields.biased_texts(), job)),
        n_predict=defaults.n_predict(max_output),
        stop=(*fields.stop_strings(defaults), *stop),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        n_probs=n_probs,
        grammar=grammar,
        show_control=prepared is not None and prepared.show_control,
        prediction=prediction,
        caches=fields.cache_prompt is not False,
    )


async def _tokens_of(texts: Sequence[str], job: Job) -> dict[str, Sequence[int]]:
    """Of texts that are biased. Raises BadRequest as soon as there are too many."""
    found: dict[str, Sequence[int]] = {}
    for text in texts:
        found[text] = (await job.tokenize([Segment(text, trusted=False)], is_prompt=False)).tokens
        check_biases(sum(map(len, found.values())))
    return found


def answer_id(jobs: Sequence[Job]) -> str:
    """What the answer's id is made of."""
    return jobs[0].id.removeprefix("req_")


class Writer(Protocol):
    """How one API says what the jobs say. All may be empty; what they raise ends the stream."""

    def begin(self) -> bytes:
        """What comes first. Made when the first delta is there, and not before: until then a refusal of the engine
        still gets its own status."""
        return b""

    def take(self, index: int, delta: Delta) -> bytes:
        """The news of job `index`, and of its end."""

    def end(self) -> bytes:
        """What comes last, when all jobs have ended."""
        return b""


async def stream(exchange: Exchange, jobs: Sequence[Job], writer: Writer, headers: Headers) -> None:
    """Sends all of it. Raises what the jobs' iteration and the writer raise; what was written by then is sent."""
    pending: list[bytes] = []
    n_running = len(jobs)
    async with aclosing(deltas(jobs)) as arriving:
        try:
            async for index, delta, more_is_ready in arriving:
                if not exchange.started:
                    await exchange.open_stream(headers)
                    pending.append(writer.begin())
                pending.append(writer.take(index, delta))
                n_running -= delta.finish is not None
                # What comes last goes with the end.
                if n_running and not more_is_ready and any(pending):
                    await exchange.write(b"".join(pending))
                    pending.clear()
        except LocalrunError:
            if any(pending):
                await exchange.write(b"".join(pending))
            raise
    await exchange.close_stream(b"".join([*pending, writer.end()]))


async def deltas(jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Delta, bool], None]:
    """(index of the job, its delta, whether more can follow without waiting), until every job has ended.

    Raises what any job's iteration raises.
    """
    if len(jobs) == 1:
        job = jobs[0]
        async for delta in job:
            yield 0, delta, job.has_ready
        return
    waiting = {asyncio.ensure_future(job.__anext__()): index for index, job in enumerate(jobs)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            n_left = len(done)
            for task in done:
                index, delta = waiting.pop(task), task.result()
                n_left -= 1
                if delta.finish is None:
                    waiting[asyncio.ensure_future(jobs[index].__anext__())] = index
                yield index, delta, n_left > 0
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
