"""The shapes of OpenAI's answers, for the document alone: the routes write them themselves, and a test holds each
answer to its shape.

Does not: encode answers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class OpenAIErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`param` names the field; `code` is stable."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(msgspec.Struct, frozen=True, kw_only=True):
    """An error, as the answer or as the last event of a stream."""

    error: OpenAIErrorBody


class OpenAIModelMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Of the model's file, as llama-server has it."""

    n_ctx_train: int
    n_params: int
    n_vocab: int
    size: int


class OpenAIModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is here."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    meta: OpenAIModelMeta


class OpenAIModels(msgspec.Struct, frozen=True, kw_only=True):
    """The models that are here."""

    object: Literal["list"]
    data: list[OpenAIModel]


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


class OpenAICalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a call; `arguments` is the text of a JSON object, in a stream a piece of it."""

    name: str | UnsetType = UNSET
    arguments: str


class OpenAICall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of the model. In a stream the first chunk of a call has its id, name and `index`."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: OpenAICalledFunction


class OpenAIReply(msgspec.Struct, frozen=True, kw_only=True):
    """The model's message, or the part of it that a chunk adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[OpenAICall] | UnsetType = UNSET
    function_call: OpenAICalledFunction | UnsetType = UNSET


class OpenAIAlternative(msgspec.Struct, frozen=True, kw_only=True):
    """A token that might have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class OpenAILogprob(OpenAIAlternative, frozen=True, kw_only=True):
    """A token that was chosen."""

    top_logprobs: list[OpenAIAlternative]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of all tokens of the answer."""

    content: list[OpenAILogprob]
    refusal: None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `finish_reason`: stop, length, tool_calls or function_call."""

    index: int
    message: OpenAIReply
    logprobs: ChatLogprobs | None
    finish_reason: str


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What every answer has."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    object: str
    usage: OpenAIUsage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


class ChatCompletion(Envelope, frozen=True, kw_only=True):
    """A whole answer."""

    choices: list[ChatChoice]


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What one chunk adds to one answer."""

    index: int
    delta: OpenAIReply
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletionChunk(Envelope, frozen=True, kw_only=True):
    """One event of a stream. With `stream_options.include_usage` the last one has the usage and no choices."""

    choices: list[ChatChunkChoice]


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Four lists with one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or what one chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(Envelope, frozen=True, kw_only=True):
    """A whole answer, or one chunk of it."""

    choices: list[CompletionChoice]


class InfillAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """llama-server's answer. With `response_fields` it has only those, under the paths that they are asked for by."""

    index: int | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tokens: list[int] | UnsetType = UNSET
    stop: bool | UnsetType = UNSET
    model: str | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Literal["limit", "word", "eos"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response: what was asked, and what came of it. `output` has message, reasoning and function_call items."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    completed_at: int | UnsetType | None = UNSET


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream, with the fields of its type; the numbers count up from 0."""

    type: str
    sequence_number: int


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """The response is forgotten."""

    id: str
    object: Literal["response"]
    deleted: bool


class ResponseItems(msgspec.Struct, frozen=True, kw_only=True):
    """The conversation that a response answered, newest item first."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
