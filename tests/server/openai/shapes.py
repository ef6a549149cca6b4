"""The answers of `/v1` as strict structs: OpenAI's fields, and by name the few that stand beside them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A field that is not named is an error."""


class CachedTokens(Strict):
    cached_tokens: int


class OutputTokens(Strict):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Strict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: OutputTokens


class Function(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"]
    function: Function


class TopLogprob(Strict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Strict):
    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None


class ChatMessage(Strict):
    """`reasoning_content` is not OpenAI's."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: Function | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET


ChatReason = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class ChatChoice(Strict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason


class Chat(Strict):
    """`timings` is llama-server's."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(Strict):
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(Strict):
    index: int
    function: FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(Strict):
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET
    function_call: FunctionDelta | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(Strict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason | None


class ChatChunk(Strict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    timings: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(Strict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Strict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(Strict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    timings: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class ModelMeta(Strict):
    """llama-server's, beside OpenAI's fields."""

    n_ctx_train: int
    n_params: int
    n_vocab: int
    size: int
    capabilities: list[str]
    n_ctx: int | msgspec.UnsetType = msgspec.UNSET


class Model(Strict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    meta: ModelMeta
    status: dict[Literal["value"], Literal["loaded", "loading", "unloaded"]]
    architecture: dict[Literal["input_modalities", "output_modalities"], list[str]]
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    context_length: int | msgspec.UnsetType = msgspec.UNSET


class LlamaModel(Strict):
    name: str
    model: str
    capabilities: list[str]


class Models(Strict):
    """`models` is llama-server's."""

    object: Literal["list"]
    data: list[Model]
    models: list[LlamaModel]


class ErrorBody(Strict):
    message: str
    type: str
    param: str | None
    code: str


class Error(Strict):
    error: ErrorBody
