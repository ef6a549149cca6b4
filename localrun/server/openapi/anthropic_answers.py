"""The shapes of Anthropic's answers, for the document alone: the routes write them themselves, and a test holds each
answer to its shape.

Does not: encode answers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


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
