"""The body of `POST /v1/responses`.

What only OpenAI's service can do (background runs, stored prompts, conversations as objects) is refused with the
field's name.

Does not: read the input items (`items.py`) or the tools (`tools.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server.http import fields
from localrun.server.openai.bodies import JsonSchema, LimitFields, ResponseFormat, grammar_of_format
from localrun.server.openai.chat import ChatReasoning, Effort
from localrun.server.prompting.ask import MAX_MESSAGES, MAX_TOOLS, Choice
from localrun.wire import Grammar

LOGPROBS = "message.output_text.logprobs"

_Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`text.format`."""

    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: Any = msgspec.UNSET
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`text`."""

    format: TextFormat | None = None


class Reasoning(ChatReasoning, frozen=True, kw_only=True):
    """With `summary`, the thinking comes as the summary, which is what many clients show."""

    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(LimitFields, frozen=True, kw_only=True):
    """POST /v1/responses. What has another name in chats is taken by that name as well."""

    model: fields.ModelName = ""
    input: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: Effort | None = None
    include: list[str] | None = None
    top_logprobs: fields.TopLogprobs | None = None
    metadata: _Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None

    @property
    def is_kept(self) -> bool:
        """Whether `previous_response_id` can name it later. It can unless the client says otherwise."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def summarizes(self) -> bool:
        """Whether thinking is to be sent as the summary of the reasoning."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)

    @property
    def effort(self) -> str | None:
        return (self.reasoning and self.reasoning.effort) or self.reasoning_effort

    def check_supported(self) -> None:
        """Raises BadRequest for what this build does not do."""
        if self.background:
            raise BadRequest("background: not supported; leave it out, and stream to see progress", field="background")
        if self.conversation is not None:
            raise BadRequest(
                "conversation: not supported; use previous_response_id, or send the items as input",
                field="conversation",
            )
        if self.prompt is not None:
            raise BadRequest("prompt: stored prompts are not supported; send input and instructions", field="prompt")

    def answer_grammar(self) -> Grammar | None:
        """Of `text.format`, and as in chats; None for free text. Raises BadRequest for what a grammar cannot hold an
        answer to."""
        asked = self.text.format if self.text is not None else None
        if asked is None or asked.type == "text":
            return super().answer_grammar()
        described = JsonSchema(name=asked.name, schema=asked.schema, strict=asked.strict)
        wanted = ResponseFormat(type=asked.type, json_schema=described)
        return grammar_of_format(wanted, path=("text.format", "schema"))
