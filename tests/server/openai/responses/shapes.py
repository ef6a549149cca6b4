"""Responses and their events as strict structs: OpenAI's fields, and no other."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tests.server.openai.shapes import ErrorBody, Strict, TokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Strict, tag="output_text", tag_field="type"):
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningText(Strict, tag="reasoning_text", tag_field="type"):
    text: str


class SummaryText(Strict, tag="summary_text", tag_field="type"):
    text: str


Part = OutputText | ReasoningText | SummaryText


class Message(Strict, tag="message", tag_field="type"):
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class Reasoning(Strict, tag="reasoning", tag_field="type"):
    id: str
    status: Status
    summary: list[SummaryText]
    content: list[ReasoningText] | msgspec.UnsetType = msgspec.UNSET


class FunctionCall(Strict, tag="function_call", tag_field="type"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


Item = Message | Reasoning | FunctionCall


class InputDetails(Strict):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Strict):
    reasoning_tokens: int


class Usage(Strict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(Strict):
    reason: Literal["max_output_tokens", "content_filter"]


class Failure(Strict):
    code: Literal["server_error", "context_length_exceeded", "rate_limit_exceeded"]
    message: str
    type: str
    param: str | None


class ReasoningConfig(Strict):
    effort: str | None
    summary: str | None


class Tool(Strict):
    type: Literal["function"]
    name: str
    strict: bool
    description: str | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class TextConfig(Strict):
    format: dict[str, Any]


class Response(Strict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: Failure | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningConfig
    service_tier: str
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | dict[str, Any]
    tools: list[Tool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: Usage | None
    completed_at: int | msgspec.UnsetType | None = msgspec.UNSET


class _Event(Strict, tag_field="type"):
    sequence_number: int


class _OfItem(_Event):
    item_id: str
    output_index: int


class Created(_Event, tag="response.created"):
    response: Response


class InProgress(_Event, tag="response.in_progress"):
    response: Response


class Completed(_Event, tag="response.completed"):
    response: Response


class IncompleteEvent(_Event, tag="response.incomplete"):
    response: Response


class Failed(_Event, tag="response.failed"):
    response: Response


class ItemAdded(_Event, tag="response.output_item.added"):
    output_index: int
    item: Item


class ItemDone(_Event, tag="response.output_item.done"):
    output_index: int
    item: Item


class PartAdded(_OfItem, tag="response.content_part.added"):
    content_index: int
    part: Part


class PartDone(_OfItem, tag="response.content_part.done"):
    content_index: int
    part: Part


class TextDelta(_OfItem, tag="response.output_text.delta"):
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_OfItem, tag="response.output_text.done"):
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_OfItem, tag="response.reasoning_text.delta"):
    content_index: int
    delta: str


class ReasoningDone(_OfItem, tag="response.reasoning_text.done"):
    content_index: int
    text: str


class SummaryPartAdded(_OfItem, tag="response.reasoning_summary_part.added"):
    summary_index: int
    part: Part


class SummaryPartDone(_OfItem, tag="response.reasoning_summary_part.done"):
    summary_index: int
    part: Part


class SummaryDelta(_OfItem, tag="response.reasoning_summary_text.delta"):
    summary_index: int
    delta: str


class SummaryDone(_OfItem, tag="response.reasoning_summary_text.done"):
    summary_index: int
    text: str


class ArgumentsDelta(_OfItem, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_OfItem, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class ErrorEvent(_Event, tag="error"):
    error: ErrorBody


Event = (
    Created | InProgress | Completed | IncompleteEvent | Failed | ErrorEvent | ItemAdded | ItemDone | PartAdded
    | PartDone | TextDelta | TextDone | ReasoningDelta | ReasoningDone | SummaryPartAdded | SummaryPartDone
    | SummaryDelta | SummaryDone | ArgumentsDelta | ArgumentsDone
)  # fmt: skip
