"""POST /completion and /completions: llama-server's own completion, with its fields and its answer; and POST /infill,
filling in the middle with the same answer.

A prompt is a text, token ids, both in one list, or an object with pictures or sound (`MediaInput`); a list of these is
as many prompts, whose answers come in a list. Where neither the request nor the model says how to sample,
llama-server's defaults count. Some of its fields choose how it computes (`id_slot`, `n_keep`, ...): they have no
effect, since every prefix is shared by all slots and no context is shifted. Those that would change the answer and
cannot be honoured are refused by name.

The editors' plugins for llama-server name no model, as a llama-server has one (`targets.py`). They ask for the fields
that they read (`response_fields`, with paths such as `timings/prompt_n`), and warm the cache up with `n_predict` 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server import notices, streaming
from localrun.server.embedding import MEDIA_PLACE, MediaInput
from localrun.server.http import fields
from localrun.server.http.exchange import Exchange, apart
from localrun.server.http.fields import ModelDefaults, defaults_of
from localrun.server.jobs.job import Job
from localrun.server.llama_server.tokens import Mixed
from localrun.server.openai.answer import Fields, Running, encode, entry, headers_of, naming, timings_of, timings_so_far
from localrun.server.openai.bodies import MAX_ANSWERS, Choices, LimitFields, RunningFields
from localrun.server.parsing.pieces import ended
from localrun.server.prompting.ask import Attachments, ChatRequest
from localrun.server.prompting.segments import infill, is_one, placed, segments_of, shown
from localrun.server.routing import RoutingInput
from localrun.server.runtime import Runtime
from localrun.wire import ChosenLogprob, Delta, Finish, Sampling, Segment, Submit, TokenLogprob

# One of the prompts of a request.
Prompt = Mixed | MediaInput

MAX_FIELDS = 64

# Of a llama-server that was started without flags about sampling.
_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_RANDOM_SEED = 2**32 - 1
# llama-server's names, in the order in which they are applied here and, unless it is told otherwise, there.
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
# What a sampler that is left out has instead of its value.
_OFF: dict[str, dict[str, Any]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
}
_OTHER_NAMES = {"typical_p": "typ_p", "typical": "typ_p", "temp": "temperature", "top-k": "top_k", "top-p": "top_p"}
_LETTERS = dict(zip("edskypmxt", SAMPLERS, strict=True))
# What chooses among what is computed, and cannot be done here, with the value that means nothing of it.
_UNSUPPORTED: dict[str, Any] = {
    "adaptive_target": -1.0,
    "min_keep": 0,
    "n_indent": 0,
    "t_max_predict_ms": -1,
    "grammar_lazy": False,
    "post_sampling_probs": False,
}


class LlamaCompletionBody(LimitFields, frozen=True, kw_only=True):
    """POST /completion."""

    prompt: str | list[str | fields.TokenId | MediaInput | list[str | fields.TokenId]] | MediaInput
    model: str | None = None
    n: Choices | None = None
    stream: bool | None = None
    n_probs: fields.NProbs | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Meta(max_length=MAX_FIELDS)] | None = None
    samplers: Annotated[list[str], Meta(max_length=32)] | Annotated[str, Meta(max_length=32)] | None = None
    adaptive_target: float | None = None
    min_keep: int | None = None
    n_indent: int | None = None
    t_max_predict_ms: int | None = None
    grammar_lazy: bool | None = None
    post_sampling_probs: bool | None = None
    multimodal_data: list[Any] | None = None
    image_data: list[Any] | None = None
    images: list[Any] | None = None

    def check_supported(self) -> None:
        """Raises BadRequest for what this build does not do."""
        for name in ("multimodal_data", "image_data", "images"):
            if getattr(self, name):
                raise BadRequest.of(
                    name,
                    f"pictures and sound belong to a prompt; send prompt as an object of a prompt_string, with "
                    f"{MEDIA_PLACE} for each of them, and multimodal_data",
                )
        for name, neutral in _UNSUPPORTED.items():
            value = getattr(self, name)
            if value is not None and value != neutral and not (name == "adaptive_target" and value < 0):
                raise BadRequest.of(name, f"not supported; leave it out, or send {neutral}")

    def prompts(self) -> list[Prompt]:
        """Each prompt. Raises BadRequest for none, for a list that is neither one prompt nor several, and for too
        many."""
        asked = self.prompt
        if isinstance(asked, str | MediaInput) or is_one(asked):
            prompts: list[Any] = [asked]
        else:
            prompts = list(asked)
        if not prompts or not all(prompts) or any(isinstance(prompt, int) for prompt in prompts):
            raise BadRequest.of(
                "prompt",
                "must be a text, token ids, both in one list, an object with pictures or sound, or a list of "
                "such prompts, not empty",
            )
        if len(prompts) * (self.n or 1) > MAX_ANSWERS:
            raise BadRequest.of("prompt", f"more than {MAX_ANSWERS} answers in one request; send several")
        return prompts

    def wanted_samplers(self) -> list[str]:
        """Their names; `samplers` may have other ones, or be one text of their letters. Those that are not here are
        left out, as llama-server does: chat programs list all that any version had."""
        names = _LETTERS if isinstance(self.samplers, str) else _OTHER_NAMES
        wanted = [names.get(name, name) for name in self.samplers or ()]
        return [name for name in wanted if name in SAMPLERS]

    def is_changed(self) -> bool:
        """Whether samplers are wanted that are not here, or in another order than theirs here."""
        wanted = self.wanted_samplers()
        return sorted(wanted, key=SAMPLERS.index) != wanted or len(wanted) < len(self.samplers or ())


async def complete(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(LlamaCompletionBody)
    body.check_supported()
    media = Attachments()
    asked = body.prompts()
    prompts = [
        prompt.text(f"prompt[{at}]" if len(asked) > 1 else "prompt", media)
        if isinstance(prompt, MediaInput)
        else prompt
        for at, prompt in enumerate(asked)
    ]
    prompts = [prompt for prompt in prompts for _ in range(body.n or 1)]
    grammar = await apart(body.answer_grammar)
    ask = ChatRequest(messages=(), media=media.all())
    question = RoutingInput(ask=ask, prompts=prompts, is_raw=True, has_schema=grammar is not None)
    async with streaming.entered(runtime, exchange, body, question, n_jobs=len(prompts)) as (body, _, jobs):
        plan = await streaming.plan(
            body,
            jobs[0],
            defaults=with_defaults(defaults_of(jobs[0].model)),
            max_output=body.max_output,
            grammar=grammar,
            logprobs=bool(body.n_probs),
            n_probs=body.n_probs or 0,
        )
        plan = msgspec.structs.replace(plan, sampling=_sampling(body, plan.sampling))
        decoded = await runtime.media.attach(jobs[0], media.all()) if media.all() else {}
        texts: list[str] = []
        for index, (job, prompt) in enumerate(zip(jobs, prompts, strict=True)):
            segments = await apart(segments_of, prompt, job.ready.n_vocab, field="prompt")
            if own := [one for one in media.all() if isinstance(prompt, str) and one.marker in prompt]:
                segments = placed(segments, own, decoded, ())
                texts.append(shown(segments)[0])
            else:
                texts.append(await _text(job, segments))
            await job.submit(plan, segments=segments, choice=index % (body.n or 1))
        if body.is_changed():
            notices.note("samplers")
        with naming("prompt"):
            await CompletionAnswer(body, jobs, plan, texts, is_list=len(prompts) > 1).send(exchange)


def with_defaults(defaults: ModelDefaults) -> ModelDefaults:
    """With those of llama-server where the model says nothing."""
    missing = {name: value for name, value in _DEFAULTS.items() if getattr(defaults, name) is None}
    return msgspec.structs.replace(defaults, **missing)


def _sampling(body: LlamaCompletionBody, said: Sampling) -> Sampling:
    """Without the samplers that are not wanted."""
    off: dict[str, Any] = {}
    if body.samplers is not None:
        for name in SAMPLERS:
            off |= {} if name in body.wanted_samplers() else _OFF[name]
    if said.seed == _RANDOM_SEED:
        off["seed"] = None
    return msgspec.structs.replace(said, **off)


async def _text(job: Job, prompt: Sequence[Segment]) -> str:
    """With what token ids stand for in their places."""
    ids = [segment for segment in prompt if segment.tokens]
    counted = await job.tokenize(ids, is_prompt=False, wants_pieces=True) if ids else None
    pieces = iter(() if counted is None else counted.pieces)
    parts = [b"".join(islice(pieces, len(one.tokens))) if one.tokens else one.text.encode() for one in prompt]
    return b"".join(parts).decode("utf-8", errors="replace")


@dataclass
class CompletionAnswer(streaming.Writer):
    """The answers to all `prompts`, sent once: streams of texts whose last chunk has all the facts, or those with all
    texts."""

    body: LlamaCompletionBody | InfillBody
    jobs: Sequence[Job]
    plan: Submit
    prompts: list[str]
    is_list: bool = False

    async def send(self, exchange: Exchange) -> None:
        headers = headers_of(self.jobs)
        if self.body.stream:
            writer: streaming.Writer = self
            if self.body.return_progress:
                writer = Running(self, self.jobs, self.body, self._told, times_chunks=False)
            await streaming.stream(exchange, self.jobs, writer, headers)
            return
        texts, tokens, probabilities = ([[] for _ in self.jobs] for _ in range(3))  # type: ignore[var-annotated]
        answers: list[Fields] = [{}] * len(self.jobs)
        async with aclosing(streaming.deltas(self.jobs)) as deltas:
            async for index, delta, _ in deltas:
                texts[index].append(delta.text)
                tokens[index] += delta.tokens
                probabilities[index] += delta.logprobs or ()
                if delta.finish is not None:
                    kept = tokens[index] if self.body.return_tokens else []
                    answers[index] = self._whole(index, "".join(texts[index]), kept, probabilities[index], delta)
        await exchange.answer(encode(answers if self.is_list else answers[0]), headers=headers)

    # --- as the writer of a stream -------------------------------------------------------------------------------

    def take(self, index: int, delta: Delta) -> bytes:
        chunks = []
        if delta.text or delta.tokens:
            chunks.append(self._chunk(index, delta))
        if delta.finish is not None:
            chunks.append(self._whole(index, "", [], (), delta))
        return b"".join(b"data: " + encode(chunk) + b"\n\n" for chunk in chunks)

    # --- inside --------------------------------------------------------------------------------------------------

    def _chunk(self, index: int, delta: Delta) -> Fields:
        chunk = self._head(index) | {"content": delta.text, "tokens": delta.tokens}
        if delta.logprobs:
            chunk["completion_probabilities"] = _probabilities(delta.logprobs)
        if self.body.timings_per_token:
            chunk["timings"] = timings_so_far(self.jobs[index].record, delta.n_output)
        return chunk

    def _told(self, index: int, fields: Fields) -> bytes:
        """A chunk without text."""
        return b"data: " + encode(self._head(index) | fields) + b"\n\n"

    def _head(self, index: int) -> Fields:
        record = self.jobs[index].record
        return {
            "index": index, "content": "", "tokens": [], "stop": False,
            # Where it runs or ran; -1 before it had a slot.
            "id_slot": -1 if record.last_slot is None else record.last_slot,
            "tokens_predicted": record.n_output, "tokens_evaluated": record.n_prompt or 0,
        }  # fmt: skip

    def _whole(
        self, index: int, content: str, tokens: list[int], logprobs: Sequence[ChosenLogprob], delta: Delta
    ) -> Fields:
        finish, usage = ended(delta)
        record = self.jobs[index].record
        is_word = finish is Finish.STOP and delta.stop_text is not None
        answer = self._head(index) | {
            "content": content,
            "tokens": tokens,
            "stop": True,
            "model": self.jobs[index].ask.model,
            "tokens_predicted": usage.n_output,
            "tokens_evaluated": usage.n_prompt,
            "generation_settings": generation_settings(
                self.plan,
                is_streamed=bool(self.body.stream),
                lora=self.body.lora or (),
                banned=self.jobs[index].ready.eog_tokens if self.plan.ignore_eos else (),
            ),
            "prompt": self.prompts[index],
            "has_new_line": record.has_new_line,
            # By the context: the answer was to have more tokens, or as many as the model wants.
            "truncated": finish is Finish.LENGTH and not 0 <= self.plan.n_predict <= usage.n_output,
            "stop_type": "limit" if finish is Finish.LENGTH else "word" if is_word else "eos",
            "stopping_word": delta.stop_text or "",
            "tokens_cached": usage.n_prompt + max(usage.n_output - 1, 0),
            "timings": msgspec.to_builtins(timings_of(usage, n_drafted=record.n_drafted, n_accepted=record.n_accepted)),
        }
        if logprobs:
            answer["completion_probabilities"] = _probabilities(logprobs)
        return picked(answer, self.body.response_fields)


def _probabilities(logprobs: Sequence[ChosenLogprob]) -> list[Fields]:
    return [_probability(chosen) | {"top_logprobs": [_probability(top) for top in chosen.top]} for chosen in logprobs]


def _probability(one: ChosenLogprob | TokenLogprob) -> Fields:
    return {"id": one.token} | entry(one)


def picked(answer: Fields, wanted: list[str] | None) -> Fields:
    """The fields that are asked for, under the paths that they are asked for by; unknown ones are left out. All where
    none is asked for."""
    if not wanted:
        return answer
    picked: Fields = {}
    for path in wanted:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET
        if value is not msgspec.UNSET:
            picked[path] = value
    return picked


def generation_settings(
    plan: Submit, *, is_streamed: bool = False, lora: Sequence[fields.LoraEntry] = (), banned: Sequence[int] = ()
) -> Fields:
    """How an answer is sampled, by llama-server's names. Those that localrun does not have are at their defaults."""
    said = msgspec.structs.asdict(plan.sampling)
    biases = [*said.pop("logit_bias"), *((token, -math.inf) for token in banned)]
    seed, last_n = said.pop("seed"), said.pop("penalty_last_n")
    return said | {
        "seed": _RANDOM_SEED if seed is None else seed,
        "repeat_last_n": last_n,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "stop": plan.stop,
        "max_tokens": plan.n_predict,
        "n_predict": plan.n_predict,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": plan.ignore_eos,
        "stream": is_streamed,
        "logit_bias": [{"token": token, "bias": None if math.isinf(bias) else bias} for token, bias in biases],
        "n_probs": plan.n_probs,
        "min_keep": 0,
        "grammar": "" if plan.grammar is None else plan.grammar.text,
        "samplers": SAMPLERS,
        "timings_per_token": False,
        "post_sampling_probs": False,
        "lora": [{"id": entry.id, "scale": entry.scale} for entry in lora],
    }


class ExtraFile(msgspec.Struct, frozen=True, kw_only=True):
    """One of `input_extra`: another file for context."""

    text: str
    filename: str = ""


class InfillBody(RunningFields, frozen=True, kw_only=True):
    """POST /infill. `prompt` is what stands right before the cursor, after `input_prefix`."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] | None = None
    prompt: str | MediaInput = ""
    multimodal_data: list[str] | None = None
    images: list[str] | None = None
    model: str | None = None
    n_predict: fields.AnswerLimit = -1
    stream: bool | None = None
    n_probs: fields.NProbs | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Meta(max_length=MAX_FIELDS)] | None = None

    def before_cursor(self) -> str:
        """Raises BadRequest for pictures and sound."""
        has = {"multimodal_data": self.multimodal_data, "images": self.images}
        field = next((field for field, media in has.items() if media), None)
        if isinstance(self.prompt, MediaInput):
            field = "prompt"
        if field is not None:
            raise BadRequest.of(field, "no model that fills in the middle takes pictures or sound; send text only")
        return self.input_prefix + str(self.prompt)


async def complete_infill(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(InfillBody)
    before_cursor = body.before_cursor()
    others = "".join(file.filename + file.text for file in body.input_extra or ())
    question = RoutingInput(prompts=[others + before_cursor], suffix=body.input_suffix, fills_in=True)
    async with streaming.entered(runtime, exchange, body, question) as (body, _, jobs):
        segments = infill(
            jobs[0].model.header,
            before_cursor,
            body.input_suffix,
            extra_files=[(file.filename, file.text) for file in body.input_extra or ()],
            field="model",
        )
        plan = await streaming.plan(
            body,
            jobs[0],
            defaults=with_defaults(defaults_of(jobs[0].model)),
            max_output=int(body.n_predict),
            logprobs=bool(body.n_probs),
            n_probs=body.n_probs or 0,
        )
        await jobs[0].submit(plan, segments=segments)
        prompt = "".join(segment.text for segment in segments)
        with naming("input_prefix"):
            await CompletionAnswer(body, jobs, plan, [prompt]).send(exchange)
