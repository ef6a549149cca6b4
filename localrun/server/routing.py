"""Which of the two models of a tier answers a request.

The rules, in this order; the first that says something counts:

1. `media`, `fim`: the small model cannot take the pictures or the sound, or cannot fill in; the large one answers
2. `reasoning_effort`: the effort that the client asks for
3. `thinking`: the client asks for thinking, which only the large model can do
4. `tools`: the request has tools
5. `schema`: the answer has to be JSON, or to match a schema or a grammar
6. `length`: the prompt has more than `prompt_tokens_over` tokens
7. `unsure`, `sure`: how probable the small model finds the beginning of its own answer
8. `default`: nothing says otherwise; the small one answers

Whoever was chosen, a prompt that leaves less than a quarter of the small model's context goes to the large one
(`context`).

Runs in the request's task, before there is a job for the answer. Rules 6, 7 and the context need the small model's
template and tokenizer, so it is loaded for them, by a job of its own whose route is called `tier`.

`unsure_below` is deferral by the mean log-probability of the output, "Chow-Average" in Gupta et al., Language Model
Cascades: Token-level uncertainty and beyond (ICLR 2024). Here it is of the first `PROBE_TOKENS` tokens of a greedy
answer: that bounds the cost, and the prompt, which is most of it, is in the prefix cache when the small model is to
answer. It asks nothing of the model but its logits, so it works in any language and for models that follow no
instruction. It says what the model is sure of, not what is true.

Invariants: the same request to the same models goes to the same one; nothing of a probe reaches the client.
Does not: answer (the API's module does, with the body and the conversation that come from here).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from localrun.config import LoadSettings, Size, Tier
from localrun.errors import BadRequest
from localrun.models.name import split_adapters
from localrun.models.storage.model import Model
from localrun.server.http.exchange import Exchange
from localrun.server.http.fields import SamplingFields, ServiceFields, job_request_of
from localrun.server.jobs.job import Job
from localrun.server.media.decoder import check_taken, kinds_of
from localrun.server.prompting.ask import ChatRequest
from localrun.server.prompting.conversation import begun
from localrun.server.prompting.prepare import prepare
from localrun.server.prompting.profile import capabilities
from localrun.server.runtime import Runtime
from localrun.wire import Lane, Sampling, Segment, Submit

PROBE_TOKENS = 32
# The name of the route in the rows of requests and in metrics.
API = "tier"
# No tokenizer makes more tokens than bytes, but for a BOS and a leading space.
_EXTRA_TOKENS = 8

NO_CONVERSATION = ChatRequest(messages=())

Body = TypeVar("Body", bound=ServiceFields | SamplingFields)


@dataclass(frozen=True, kw_only=True)
class RoutingInput:
    """What the rules look at. `ask` is the conversation; without one, or if it `is_raw`, `prompts`, each a text or with
    token ids, and the `suffix` go to the model as they are. `context` says whether there are token ids of an earlier
    answer. With `fills_in`, only models that can fill in will do. `may_probe` is off where no answer is wanted."""

    ask: ChatRequest = NO_CONVERSATION
    prompts: Sequence[object] = ()
    suffix: str = ""
    context: bool = False
    is_raw: bool = False
    effort: str | None = None
    has_schema: bool = False
    fills_in: bool = False
    may_probe: bool = True

    @property
    def token_field(self) -> str:
        """Where token ids are; empty without any."""
        if self.context:
            return "context"
        return "" if all(isinstance(prompt, str) for prompt in self.prompts) else "prompt"

    @property
    def has_tools(self) -> bool:
        return bool(self.ask.tools) and self.ask.tool_choice != "none"

    @property
    def is_constrained(self) -> bool:
        return self.has_schema or self.ask.response_grammar is not None


NO_QUESTION = RoutingInput()


class Choice(NamedTuple):
    """Which model, by which rule; `facts` are what the rule went by."""

    size: Size
    reason: str
    facts: tuple[tuple[str, str], ...] = ()


async def routed(
    runtime: Runtime, exchange: Exchange, name: str, body: Body, question: RoutingInput, load: LoadSettings
) -> tuple[str, Body, ChatRequest]:
    """The name, the body and the conversation as they go to a model: unchanged, unless the name is a tier's. Then it is
    that of the model that answers, in the body as well, and the exchange's answer says why.

    To be called while the client is watched. Raises what loading and preparing for the small model raise, and
    BadRequest for what only makes sense with one model.
    """
    tier = runtime.targets.tier(exchange.caller, name)
    if tier is None:
        return name, body, question.ask
    if getattr(body, "lora", None):
        raise BadRequest.of("lora", f"'{tier.name}' is a tier, and adapters are made for one model; name that")
    if field := question.token_field:
        raise BadRequest.of(
            field, f"'{tier.name}' is a tier, and token ids are those of one model; send text, or name that model"
        )
    # Before anything is computed; the lane is for the jobs to find.
    exchange.caller.begin(tier.small, Lane.DEFAULT)
    if question.ask.media:
        await runtime.media.read(question.ask.media)
    small, large = await asyncio.to_thread(runtime.targets.models_of, tier)
    choice = _by_fields(tier, question, small, large)
    if choice is None or choice.size == "small":
        choice = await _by_prompt(runtime, exchange, body, tier, question, small, choice, load)
    chosen, model = (tier.small, small) if choice.size == "small" else (tier.large, large)
    runtime.telemetry.metrics.routed.labels(tier.name, choice.size, choice.reason).inc()
    why = "; ".join(f"{key}={value}" for key, value in (("reason", choice.reason), *choice.facts))
    exchange.tier = f"{tier.name}: {choice.size}, {choice.reason}"
    exchange.more_headers.append((b"x-localrun-tier", f"{choice.size}; {why}".encode("ascii")))
    ask = question.ask
    if ask.think and question.effort in tier.reasoning_effort and "thinking" not in capabilities(model):
        # The effort only chose the model, and the chosen one cannot think.
        ask = msgspec.structs.replace(ask, think=None)
    changes: dict[str, Any] = {"model": chosen}
    if choice.size == "small" and body.draft == split_adapters(tier.small).model:
        changes["draft"] = None  # it drafts for the large model
    return chosen, msgspec.structs.replace(body, **changes), ask


def _by_fields(tier: Tier, question: RoutingInput, small: Model, large: Model) -> Choice | None:
    """What can be said without counting; None when nothing of it says anything."""
    ask = question.ask
    if ask.media:
        try:
            check_taken(small, kinds_of(small), ask.media)
        except BadRequest:
            return Choice("large", "media")
    can, large_can = capabilities(small), capabilities(large)
    if (question.fills_in or question.suffix) and "insert" not in can:
        return Choice("large", "fim")
    by_effort = tier.reasoning_effort.get(question.effort) if question.effort else None  # type: ignore[call-overload]
    if by_effort is not None:
        return Choice(by_effort, "reasoning_effort")
    if ask.think and "thinking" not in can and "thinking" in large_can:
        return Choice("large", "thinking")
    if question.has_tools and tier.tools is not None:
        return Choice(tier.tools, "tools")
    if question.is_constrained and tier.schema is not None:
        return Choice(tier.schema, "schema")
    return None


async def _by_prompt(
    runtime: Runtime,
    exchange: Exchange,
    body: Body,
    tier: Tier,
    question: RoutingInput,
    small: Model,
    choice: Choice | None,
    load: LoadSettings,
) -> Choice:
    """The rules that need the small model. With a `choice` only whether the prompt fits it is left to be seen."""
    who = job_request_of(exchange, tier.small, body, load=load)
    who = msgspec.structs.replace(
        who,
        api=API,
        # Unloaded when it has answered, not before.
        keep_alive_s=who.keep_alive_s or None,
        speculates=False,
        draft="",
    )
    async with runtime.job(who) as job:
        prompts, stop = await _prompts(runtime, job, question)
        limit = job.ready.n_ctx - job.ready.n_ctx // 4
        over = tier.prompt_tokens_over if choice is None else None
        n_tokens = await _count(job, prompts, at_most=limit if over is None else min(limit, over))
        facts: tuple[tuple[str, str], ...] = () if n_tokens is None else (("prompt_tokens", str(n_tokens)),)
        if n_tokens is not None and over is not None and n_tokens > over:
            return Choice("large", "length", facts)
        if n_tokens is not None and n_tokens > limit:
            return Choice("large", "context", facts)
        if choice is not None:
            return choice
        if tier.unsure_below is None or not question.may_probe or question.ask.media:
            return Choice("small", "default")
        began_s = time.monotonic()
        mean, n_probed = await _probe(job, prompts[0], stop)
        metrics = runtime.telemetry.metrics
        metrics.probe_tokens.labels(tier.name).inc(n_probed)
        metrics.probe_seconds.labels(tier.name).inc(time.monotonic() - began_s)
        is_unsure = mean < tier.unsure_below
        facts = (("mean_logprob", f"{mean:.3f}"), ("probe_tokens", str(n_probed)))
        return Choice("large" if is_unsure else "small", "unsure" if is_unsure else "sure", facts)


async def _prompts(
    runtime: Runtime, job: Job, question: RoutingInput
) -> tuple[list[tuple[Segment, ...]], tuple[str, ...]]:
    """As the small model would get them, without pictures and sound, and what besides ends its answer."""
    ask = question.ask
    if question.is_raw or ask is NO_CONVERSATION:
        return [(Segment(f"{prompt}{question.suffix}"),) for prompt in question.prompts], ()
    # Grammars take time to make, and nothing of them is in the prompt. What this model cannot think, it is not asked.
    messages = begun(job.model, ask.messages)
    think = ask.think if "thinking" in capabilities(job.model) else None
    ask = msgspec.structs.replace(ask, messages=messages, media=(), response_grammar=None, think=think)
    prepared = await prepare(runtime, job, ask)
    return [prepared.segments], prepared.stop


async def _count(job: Job, prompts: Sequence[Sequence[Segment]], *, at_most: int) -> int | None:
    """Tokens of the longest prompt; None if none can have more than `at_most`."""
    lengths = [sum(len(segment.text.encode()) for segment in prompt) for prompt in prompts]
    longest = max(lengths, default=0)
    if longest + _EXTRA_TOKENS <= at_most:
        return None
    return len(await job.count(prompts[lengths.index(longest)]))


async def _probe(job: Job, prompt: Sequence[Segment], stop: Sequence[str]) -> tuple[float, int]:
    """The mean log-probability of the first tokens of a greedy answer, and how many there were. An answer without a
    token is one that the model is sure of."""
    wanted = Submit(id=0, sampling=Sampling(temperature=0), n_predict=PROBE_TOKENS, stop=tuple(stop), logprobs=True)
    await job.submit(wanted, segments=prompt)
    found: list[float] = []
    async for delta in job:
        found += [chosen.logprob for chosen in delta.logprobs or ()]
    return (sum(found) / len(found) if found else 0.0), len(found)
