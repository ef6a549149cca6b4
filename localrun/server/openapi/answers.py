"""The shapes of answers, for the document alone: the routes write them themselves, and a test holds each answer to its
shape.

Does not: encode answers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from localrun.server.http.failures import Shape, shape_of
from localrun.snapshot import PullRow, RequestRow


class OllamaError(msgspec.Struct, frozen=True, kw_only=True):
    """An error. In a stream that has begun it is the last line, with the code beside the message."""

    error: str
    code: str | UnsetType = UNSET


class OllamaVersion(msgspec.Struct, frozen=True, kw_only=True):
    """`version` is the level of Ollama's API that clients may count on; `localrun` the daemon's own version."""

    version: str
    localrun: str


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """A model in short."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int
    embedding_length: int


class TagRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model that is here."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    capabilities: list[str]
    source: str
    loaded: bool


class UnusableFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is no usable model, and why."""

    path: str
    problem: str


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """The models that are here."""

    models: list[TagRow]
    unusable: list[UnusableFile]


class PsRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model that is loaded."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class Ps(msgspec.Struct, frozen=True, kw_only=True):
    """The models that are loaded."""

    models: list[PsRow]


class ShowMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One of a model's own first messages."""

    role: str
    content: str


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the file; with `verbose`."""

    name: str
    type: str
    shape: list[int]


class Show(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a model. `model_info` is the metadata of its file under its own keys; `localrun` has its
    path, types of tensors and the memory that it needs at several contexts."""

    license: str
    modelfile: str
    parameters: str
    template: str
    system: str
    details: Details
    messages: list[ShowMessage]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    requires: str
    localrun: dict[str, Any]
    tensors: list[Tensor] | UnsetType = UNSET


class OllamaToolFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function that is to be called."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of the model."""

    id: str
    function: OllamaToolFunction


class OllamaAlternative(msgspec.Struct, frozen=True, kw_only=True):
    """A token that might have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaAlternative, frozen=True, kw_only=True):
    """A token that was chosen."""

    top_logprobs: list[OllamaAlternative]


class OllamaReply(msgspec.Struct, frozen=True, kw_only=True):
    """The model's message, or the part of it that a line adds."""

    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What every answer has, and its last line's counts; durations are nanoseconds. `done_reason` is stop, length, load
    or unload."""

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
    logprobs: list[OllamaLogprob] | UnsetType = UNSET
    debug_info: dict[str, Any] | UnsetType = msgspec.field(default=UNSET, name="_debug_info")


class OllamaChat(Counts, frozen=True, kw_only=True):
    """A chat's answer, or one line of it."""

    message: OllamaReply


class OllamaGenerate(Counts, frozen=True, kw_only=True):
    """An answer of generate, or one line of it. `context` is the conversation as tokens, to be sent with the next
    prompt."""

    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One line on how far a long task is; the last is `success`."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class KeptFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was not deleted, and why."""

    path: str
    reason: str


class DeletedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the removal freed and kept."""

    freed_bytes: int
    deleted: list[str]
    kept: list[KeptFile]


class CloudStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether models run elsewhere: never."""

    disabled: bool
    source: str


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What of Ollama's own services there is: nothing."""

    cloud: CloudStatus


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


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What was wrong. The header `X-Localrun-Error` has the stable code."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True, kw_only=True):
    """An error, as the answer or as the last event of a stream."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str | UnsetType | None = UNSET


class AnthropicUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. The prompt is `input_tokens` and `cache_read_input_tokens` together; the latter were not computed."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]


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


class CountedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """How long the prompt would be."""

    input_tokens: int


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the inputs."""

    prompt_tokens: int
    total_tokens: int


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


class LegacyEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt's vector; empty without a prompt."""

    embedding: list[float]


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document's text, with `return_documents`."""

    text: str


class RankedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A document by its place in the request, and how well it answers the query."""

    index: int
    relevance_score: float
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """The documents, best first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RankedRow]
    usage: EmbeddingUsage
    meta: dict[str, Any]


class NativeErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is stable; `field` names the field."""

    code: str
    message: str
    field: str | None


class NativeError(msgspec.Struct, frozen=True, kw_only=True):
    """An error."""

    error: NativeErrorBody


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon is up."""

    status: Literal["ok"]
    version: str


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon is about to end."""

    status: Literal["stopping"]


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that run, wait, or ended in the last minute."""

    requests: list[RequestRow]


class CancelledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request ends within a step."""

    id: str
    cancelled: bool


class Pulls(msgspec.Struct, frozen=True, kw_only=True):
    """The downloads that run, and those that ended lately."""

    pulls: list[PullRow]


class CancelledPull(msgspec.Struct, frozen=True, kw_only=True):
    """The download ends; what came is kept for the next one."""

    model: str
    cancelled: bool


class CatalogAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of the catalogue."""

    models: list[dict[str, Any]]


class SearchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in the catalogue and on the hub; `problem` says why the hub did not answer."""

    catalog: list[dict[str, Any]]
    hub: list[dict[str, Any]]
    problem: str | None


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What was deleted."""

    freed_bytes: int
    deleted: list[str]
    kept_blobs: int


class FitAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How a model would be opened here; `problem` is the refusal that a request would get."""

    model: str
    fits: bool
    slots: int
    kv_cells: int
    kv_type: str
    context: int
    gpu_layers: int
    layers: int
    devices: list[dict[str, Any]]
    total_bytes: int
    resident_bytes: int
    process_bytes: int
    background_bytes: int
    prefix_cache_bytes: int
    idle_bytes: int
    notes: list[str]
    problem: str | None


_TYPES: dict[Shape, Any] = {
    Shape.OLLAMA: OllamaError,
    Shape.OPENAI: OpenAIError,
    Shape.ANTHROPIC: AnthropicError,
    Shape.NATIVE: NativeError,
}


def error_type(path: str) -> Any:
    """The struct of the errors of the family that `path` belongs to."""
    return _TYPES[shape_of(path)]
