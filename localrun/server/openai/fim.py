"""Filling in the middle: POST /v1/fim/completions as Mistral has it, and POST /infill as llama-server has it.

Mistral's request is like that of completions, its answer like that of chat. A model without FIM tokens is refused, also
when there is no suffix: an editor that asks here wants code that fits, not a chat model's continuation.

The editors' plugins for llama-server name no model, as a llama-server has one (`unnamed.py`). They ask for the fields
that they read (`response_fields`, with paths such as `timings/prompt_n`), and warm the cache up with `n_predict` 0. The
rest of llama-server's own routes is in `llama_server/`.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server import tiers
from localrun.server.embedding.bodies import MediaInput
from localrun.server.http import fields
from localrun.server.http.exchange import Exchange
from localrun.server.http.fields import SamplingFields, ask_of, defaults_of
from localrun.server.jobs import streaming
from localrun.server.jobs.job import Job
from localrun.server.jobs.registry import RequestRecord
from localrun.server.openai.answer import Answer, ChatChunks, Fields, encode, ended, headers_of, naming, timings_of
from localrun.server.openai.completions import FimBody
from localrun.server.parsing.pieces import PlainParser, Reply
from localrun.server.prompting.infill import infill
from localrun.server.runtime import Runtime
from localrun.server.tiers import Question
from localrun.server.unnamed import named
from localrun.wire import Delta, Finish


async def complete_fim(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await exchange.read_json(FimBody)
    if body.seed is None and body.random_seed is not None:
        body = msgspec.structs.replace(body, seed=body.random_seed)
    async with exchange.while_connected(), AsyncExitStack() as stack:
        if runtime.must_name(body.model):
            body = await named(runtime, exchange, body, fills_in=True)
        if runtime.settings.tiers:
            question = Question(prompts=[body.prompt + (body.suffix or "")], fills_in=True)
            body, _ = await tiers.routed(runtime, exchange, body, question)
        who = ask_of(exchange, body.model, body)
        jobs = await streaming.enter(runtime, stack, who, n_jobs=1)
        segments = infill(jobs[0].model.header, body.prompt, body.suffix or "", field="model")
        plan = streaming.plan(body, jobs[0], defaults_of(jobs[0].model), max_output=body.max_tokens)
        await jobs[0].submit(plan, segments=segments)
        chunks = ChatChunks(
            request_id=streaming.answer_id(jobs),
            model=body.model,
            replies=[Reply(PlainParser())],
        )
        answer = Answer(exchange, jobs, chunks, n_per_prompt=1, include_usage=False, prompt_field="prompt")
        await answer.send(stream=bool(body.stream))


MAX_FIELDS = 64


class ExtraFile(msgspec.Struct, frozen=True, kw_only=True):
    """One of `input_extra`: another file for context."""

    text: str
    filename: str = ""


class InfillBody(SamplingFields, frozen=True, kw_only=True):
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
    response_fields: Annotated[list[str], Meta(max_length=MAX_FIELDS)] | None = None

    def before_cursor(self) -> str:
        """Raises BadRequest for pictures and sound."""
        has = {"multimodal_data": self.multimodal_data, "images": self.images}
        field = next((field for field, media in has.items() if media), None)
        if isinstance(self.prompt, MediaInput):
            field = "prompt"
        if field is not None:
            raise BadRequest(
                f"{field}: no model that fills in the middle takes pictures or sound; send text only", field=field
            )
        return self.input_prefix + str(self.prompt)


async def complete_infill(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await exchange.read_json(InfillBody)
    before_cursor = body.before_cursor()
    async with exchange.while_connected(), AsyncExitStack() as stack:
        if runtime.must_name(body.model):
            body = await named(runtime, exchange, body, fills_in=True)
        if runtime.settings.tiers:
            others = "".join(file.filename + file.text for file in body.input_extra or ())
            question = Question(prompts=[others + before_cursor + body.input_suffix], fills_in=True)
            body, _ = await tiers.routed(runtime, exchange, body, question)
        model = body.model or ""
        who = ask_of(exchange, model, body)
        (job,) = await streaming.enter(runtime, stack, who, n_jobs=1)
        segments = infill(
            job.model.header,
            before_cursor,
            body.input_suffix,
            extra_files=[(file.filename, file.text) for file in body.input_extra or ()],
            field="model",
        )
        plan = streaming.plan(body, job, defaults_of(job.model), max_output=int(body.n_predict))
        await job.submit(plan, segments=segments)
        with naming("input_prefix"):
            await _Answer(model, body, job).send(exchange, stream=bool(body.stream))


class _Answer:
    """One answer, sent once: a stream of texts of which the last one has all the facts, or that one with all texts."""

    def __init__(self, model: str, body: InfillBody, job: Job) -> None:
        self._model = model
        self._wanted = body.response_fields
        self._job = job

    async def send(self, exchange: Exchange, *, stream: bool) -> None:
        headers = headers_of([self._job])
        if stream:
            await streaming.stream(exchange, [self._job], self, headers)
            return
        deltas = [delta async for delta in self._job]
        text = "".join(delta.text for delta in deltas)
        await exchange.answer(self._last(text, deltas[-1]), headers=headers)

    def begin(self) -> bytes:
        return b""

    def take(self, _: int, delta: Delta) -> bytes:
        if delta.finish is not None:
            return b"data: " + self._last(delta.text, delta) + b"\n\n"
        return _chunk(delta.text) if delta.text else b""

    def end(self) -> bytes:
        return b""

    def _last(self, content: str, delta: Delta) -> bytes:
        last = _last_fields(self._model, content, delta, self._job.record)
        return encode(picked(last, self._wanted))


def _chunk(text: str) -> bytes:
    return b'data: {"index":0,"content":' + encode(text) + b',"tokens":[],"stop":false}\n\n'


def _last_fields(model: str, content: str, delta: Delta, record: RequestRecord) -> Fields:
    finish, usage = ended(delta)
    timings = timings_of(usage, n_drafted=record.n_drafted, n_accepted=record.n_accepted)
    is_word = finish is Finish.STOP and delta.stop_text is not None
    return {
        "index": 0,
        "content": content,
        "tokens": [],
        "stop": True,
        "model": model,
        "tokens_predicted": usage.n_output,
        "tokens_evaluated": usage.n_prompt,
        "tokens_cached": usage.n_cached,
        "truncated": False,
        "stop_type": "limit" if finish is Finish.LENGTH else "word" if is_word else "eos",
        "stopping_word": delta.stop_text or "",
        "timings": msgspec.to_builtins(timings),
    }


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
