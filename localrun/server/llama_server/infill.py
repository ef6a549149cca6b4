"""POST /infill: filling in the middle as llama-server has it, with the answer of `/completion`.

The editors' plugins for llama-server name no model, as a llama-server has one (`targets.py`). They ask for the fields
that they read (`response_fields`, with paths such as `timings/prompt_n`), and warm the cache up with `n_predict` 0.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server import streaming
from localrun.server.embedding.bodies import MediaInput
from localrun.server.http import fields
from localrun.server.http.exchange import Exchange
from localrun.server.http.fields import SamplingFields, defaults_of
from localrun.server.llama_server.completion import MAX_FIELDS, CompletionAnswer, with_defaults
from localrun.server.openai.answer import naming
from localrun.server.prompting.infill import infill
from localrun.server.routing import RoutingInput
from localrun.server.runtime import Runtime


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
    n_probs: fields.NProbs | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
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
            await CompletionAnswer(body, jobs, plan, [prompt], is_list=False).send(exchange)
