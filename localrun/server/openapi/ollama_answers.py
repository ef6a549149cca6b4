"""The shapes of Ollama's answers, for the document alone: the routes write them themselves, and a test holds each
answer to its shape.

Does not: encode answers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


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
