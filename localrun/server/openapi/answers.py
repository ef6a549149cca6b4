"""The shapes of answers that are put together from bytes or in pieces, for the document alone: a test holds each answer
to its shape. Other answers are encoded from structs, which their modules have.

Does not: encode answers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from localrun.server.anthropic.messages import AnthropicUsage
from localrun.server.embedding import EmbeddingUsage
from localrun.server.http.failures import Shape, shape_of
from localrun.server.openai.answer import OpenAIUsage, PromptProgress, Timings
from localrun.server.openai.lm_studio import AnswerModel, AnswerRuntime, AnswerStats
from localrun.server.openai.responses.create import TokenUsage


class OllamaError(msgspec.Struct, frozen=True, kw_only=True):
    """An error. In a stream that has begun it is the last line, with the code beside the message."""

    error: str
    code: str | UnsetType = UNSET


class OllamaToolFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function that is to be called."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of the model."""

    id: str
    function: OllamaToolFunction


class TokenChance(msgspec.Struct, frozen=True, kw_only=True):
    """A token that might have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(TokenChance, frozen=True, kw_only=True):
    """A token that was chosen."""

    top_logprobs: list[TokenChance]


class OllamaReply(msgspec.Struct, frozen=True, kw_only=True):
    """The model's message, or the part of it that a line adds."""

    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that chat and generate share. Subclasses must describe them, since the OpenAPI document shows no base
    classes."""

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_cached_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    draft_count: int | UnsetType = UNSET
    draft_accepted_count: int | UnsetType = UNSET
    speedup: float | UnsetType = UNSET
    logprobs: list[ChosenToken] | UnsetType = UNSET
    debug_info: dict[str, Any] | UnsetType = msgspec.field(default=UNSET, name="_debug_info")


class OllamaChat(Counts, frozen=True, kw_only=True):
    """A chat's answer, or one line of it. The last has the counts, and durations in nanoseconds. `done_reason` is stop,
    length, load or unload. Where tokens were drafted, `draft_accepted_count` of `draft_count` are part of the answer,
    which made it `speedup` times as fast."""

    message: OllamaReply


class OllamaGenerate(Counts, frozen=True, kw_only=True):
    """An answer of generate, or one line of it, with the counts of `OllamaChat`. `context` is the conversation as
    tokens, to be sent with the next prompt."""

    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One line on how far a long task is; the last is `success`."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class OpenAIErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`param` names the field; `code` is stable."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(msgspec.Struct, frozen=True, kw_only=True):
    """An error, as the answer or as the last event of a stream."""

    error: OpenAIErrorBody


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


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probabilities of all tokens of the answer."""

    content: list[ChosenToken]
    refusal: None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `finish_reason`: stop, length, tool_calls or function_call."""

    index: int
    message: OpenAIReply
    logprobs: ChatLogprobs | None
    finish_reason: str


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all answers and chunks share. Subclasses must describe them, as those of `Counts`."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    object: str
    usage: OpenAIUsage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


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


class LmStudioChat(ChatCompletion, frozen=True, kw_only=True):
    """A whole answer. Several answers have no statistics."""

    stats: AnswerStats | UnsetType = UNSET
    model_info: AnswerModel | UnsetType = UNSET
    runtime: AnswerRuntime | UnsetType = UNSET


class LmStudioChatChunk(ChatCompletionChunk, frozen=True, kw_only=True):
    """One event of a stream. The last one has the statistics, and facts about the model and the runtime."""

    stats: AnswerStats | UnsetType = UNSET
    model_info: AnswerModel | UnsetType = UNSET
    runtime: AnswerRuntime | UnsetType = UNSET


class LmStudioCompletion(Completion, frozen=True, kw_only=True):
    """A whole answer, or one chunk of it."""

    stats: AnswerStats | UnsetType = UNSET
    model_info: AnswerModel | UnsetType = UNSET
    runtime: AnswerRuntime | UnsetType = UNSET


class LlamaProbability(TokenChance, frozen=True, kw_only=True):
    """A token that might have been chosen."""

    id: int


class LlamaChosen(LlamaProbability, frozen=True, kw_only=True):
    """A token that was chosen."""

    top_logprobs: list[LlamaProbability]


class LlamaCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """llama-server's answer, or one chunk of it. With `response_fields` it has only the fields that are listed there,
    each under the path by which it was asked for."""

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
    id_slot: int | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    completion_probabilities: list[LlamaChosen] | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


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
    usage: TokenUsage | None
    completed_at: int | UnsetType | None = UNSET


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream, with the fields of its type; the numbers count up from 0."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    error: dict[str, Any] | UnsetType = UNSET
    item: dict[str, Any] | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    part: dict[str, Any] | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChosenToken] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What was wrong. The header `X-Localrun-Error` has the stable code."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True, kw_only=True):
    """An error, as the answer or as the last event of a stream."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str | UnsetType | None = UNSET


class AnthropicMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The model's message. `content` has blocks of type text, thinking and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]  # fmt: skip
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream: message_start, content_block_start, content_block_delta, content_block_stop,
    message_delta, message_stop or ping, with the fields of its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    ]
    message: dict[str, Any] | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: dict[str, Any] | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    usage: AnthropicUsage | UnsetType = UNSET


class EmbeddingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One vector of length 1: numbers, or with `base64` its little-endian 32-bit floats."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """One vector for each input, in order."""

    object: Literal["list"]
    data: list[EmbeddingRow]
    model: str
    usage: EmbeddingUsage


class OllamaEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """One vector for each input, in order; durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class LlamaErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is the status; `field` names the field."""

    code: int
    message: str
    type: str
    field: str | None


class LlamaError(msgspec.Struct, frozen=True, kw_only=True):
    """An error, as llama-server has it."""

    error: LlamaErrorBody


class NativeErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is stable; `field` names the field."""

    code: str
    message: str
    field: str | None


class NativeError(msgspec.Struct, frozen=True, kw_only=True):
    """An error."""

    error: NativeErrorBody


_TYPES: dict[Shape, Any] = {
    Shape.OLLAMA: OllamaError,
    Shape.OPENAI: OpenAIError,
    Shape.ANTHROPIC: AnthropicError,
    Shape.LLAMA_SERVER: LlamaError,
    Shape.NATIVE: NativeError,
}


def error_type(path: str) -> Any:
    """The struct of the errors of the family that `path` belongs to."""
    return _TYPES[shape_of(path)]
