"""GET /api/v0/models and /api/v0/models/{model}; POST /api/v0/chat/completions, /completions and /embeddings.

Bodies and answers are OpenAI's (`openai/`, `embedding.py`). Beside these, a body may have `ttl` (seconds for which the
model stays loaded), and `draft_model`; an answer has `stats`, `model_info` and `runtime`, of a stream in the last
chunk. Models are told of from file headers, nothing is loaded.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from localrun import __version__
from localrun.errors import told_of
from localrun.server.http import fields
from localrun.server.http.exchange import Exchange
from localrun.server.openai.answer import Answer, Fields, timings_of
from localrun.server.openai.chat import ChatBody, answer_chat
from localrun.server.openai.completions import CompletionBody, answer_completion
from localrun.server.prompting.profile import capabilities
from localrun.server.runtime import Runtime
from localrun.server.targets import Target
from localrun.wire import Delta, Finish


class LmStudioModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is here; `loaded_context_length` of one that is loaded."""

    id: str
    type: Literal["llm", "vlm", "embeddings"]
    publisher: str
    arch: str
    quantization: str
    state: Literal["loaded", "not-loaded"]
    max_context_length: int
    loaded_context_length: int | UnsetType = UNSET
    capabilities: list[Literal["tool_use"]] = []
    object: Literal["model"] = "model"
    compatibility_type: Literal["gguf"] = "gguf"


class LmStudioModels(msgspec.Struct, frozen=True, kw_only=True):
    """The models that are here."""

    data: list[LmStudioModel]
    object: Literal["list"] = "list"


class AnswerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and rates of one answer; the counts of drafts are absent where nothing was drafted."""

    tokens_per_second: float
    time_to_first_token: float
    generation_time: float
    stop_reason: Literal[
        "eosFound", "stopStringFound", "toolCalls", "maxPredictedTokensReached", "contextLengthReached"
    ]
    total_draft_tokens_count: int | UnsetType = UNSET
    accepted_draft_tokens_count: int | UnsetType = UNSET
    rejected_draft_tokens_count: int | UnsetType = UNSET


class AnswerModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model that answered. `context_length` is the most tokens that one request may have."""

    arch: str
    quant: str
    context_length: int
    format: Literal["gguf"] = "gguf"


class AnswerRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """The program that answered."""

    name: str = "localrun"
    version: str = __version__
    supported_formats: list[str] = msgspec.field(default_factory=lambda: ["gguf"])


_Ttl = Annotated[float, Meta(ge=0, le=fields.MAX_TOKENS)]


class LmStudioChatBody(ChatBody, frozen=True, kw_only=True):
    """POST /api/v0/chat/completions."""

    ttl: _Ttl | None = None
    draft_model: fields.DraftName | None = None


class LmStudioCompletionBody(CompletionBody, frozen=True, kw_only=True):
    """POST /api/v0/completions."""

    ttl: _Ttl | None = None
    draft_model: fields.DraftName | None = None


_Body = TypeVar("_Body", LmStudioChatBody, LmStudioCompletionBody)


def _in_openais_words(body: _Body) -> _Body:
    """With its own fields as those of OpenAI's routes."""
    return msgspec.structs.replace(
        body,
        keep_alive=body.ttl if body.keep_alive is None else body.keep_alive,
        draft=body.draft_model if body.draft is None else body.draft,
    )


class _Answer(Answer):
    """OpenAI's, with what LM Studio adds. Statistics of several answers at once would mean nothing."""

    _stop_reason = ""

    def finished(self, index: int, delta: Delta) -> str:
        reason = super().finished(index, delta)
        usage = self.usages[index]
        if delta.finish is Finish.LENGTH:
            is_full = usage.n_prompt + usage.n_output >= self.jobs[0].ready.n_ctx
            self._stop_reason = "contextLengthReached" if is_full else "maxPredictedTokensReached"
        elif reason in ("tool_calls", "function_call"):
            self._stop_reason = "toolCalls"
        else:
            self._stop_reason = "eosFound" if delta.stop_text is None else "stopStringFound"
        return reason

    def more(self) -> Fields:
        job = self.jobs[0]
        header = job.model.header
        about = AnswerModel(arch=header.architecture, quant=header.quantization, context_length=job.ready.n_ctx)
        facts = super().more() | {"model_info": about, "runtime": AnswerRuntime()}
        if len(self.jobs) == 1:
            facts["stats"] = self._stats()
        return facts

    def _stats(self) -> AnswerStats:
        usage, record = self.usages[0], self.jobs[0].record
        n_drafted, n_accepted = record.n_drafted, record.n_accepted
        return AnswerStats(
            tokens_per_second=timings_of(usage).predicted_per_second,
            time_to_first_token=record.ttft_s or 0.0,
            generation_time=usage.decode_s,
            stop_reason=self._stop_reason,  # type: ignore[arg-type]
            total_draft_tokens_count=n_drafted or UNSET,
            accepted_draft_tokens_count=n_accepted if n_drafted else UNSET,
            rejected_draft_tokens_count=n_drafted - n_accepted if n_drafted else UNSET,
        )


async def chat(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(LmStudioChatBody)
    with told_of("draft_model" if body.draft is None else "draft", instead_of="draft"):
        await answer_chat(runtime, exchange, _in_openais_words(body), _Answer)


async def complete(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(LmStudioCompletionBody)
    with told_of("draft_model" if body.draft is None else "draft", instead_of="draft"):
        await answer_completion(runtime, exchange, _in_openais_words(body), _Answer)


async def list_models(runtime: Runtime, exchange: Exchange) -> None:
    loaded = runtime.contexts()

    def rows() -> list[LmStudioModel]:
        targets = runtime.targets.visible(exchange.caller)
        return [_row(target, loaded) for target in targets if not target.parent]

    await exchange.answer_redacted(LmStudioModels(data=await asyncio.to_thread(rows)))


async def one_model(runtime: Runtime, exchange: Exchange) -> None:
    target = await asyncio.to_thread(runtime.targets.find, exchange.caller, exchange.path_id)
    await exchange.answer_redacted(await asyncio.to_thread(_row, target, runtime.contexts()))


def _row(target: Target, loaded: dict[str, int]) -> LmStudioModel:
    """In a thread: `capabilities` reads the file."""
    model, header, can = target.model, target.model.header, capabilities(target.model)
    owner, slash, _ = model.name.rpartition("/")
    return LmStudioModel(
        id=target.name,
        type="embeddings" if not header.generates else "vlm" if "vision" in can else "llm",
        publisher=owner.rpartition("/")[2] if slash else "localrun",
        arch=header.architecture,
        quantization=header.quantization,
        state="loaded" if model.name in loaded else "not-loaded",
        max_context_length=header.n_ctx_train,
        loaded_context_length=loaded.get(model.name, UNSET),
        capabilities=["tool_use"] if "tools" in can else [],
    )
