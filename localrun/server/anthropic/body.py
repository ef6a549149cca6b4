"""Bodies of Anthropic's `/v1/messages` and of the counting of its tokens.

Unknown fields, and those that are about Anthropic's service (`metadata`, `service_tier`, `container`), are ignored.
What is known and cannot be done is refused with its name. Beside Anthropic's fields stand localrun's own and those of
its sampling, by the names that the other APIs of `/v1` have.

Does not: know the model, or render the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server import notices, structured
from localrun.server.anthropic import conversation
from localrun.server.anthropic.conversation import AskedMessage, Content
from localrun.server.http import fields
from localrun.server.http.fields import SamplingFields
from localrun.server.prompting.ask import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Attachments,
    ChatRequest,
    Function,
    Tool,
    ToolChoice,
    check_goes_on,
    checked_tools,
)
from localrun.wire import Grammar


class AskedTool(msgspec.Struct, frozen=True, kw_only=True):
    """One of `tools`. Those that Anthropic defines or runs have a type with a date and no schema."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AskedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


AskedTools = Annotated[list[AskedTool], Meta(max_length=MAX_TOOLS)]


def tools_of(tools: Sequence[AskedTool]) -> tuple[Tool, ...]:
    """Those that Anthropic defines are left out, and the answer says so. Raises BadRequest naming the tool."""
    functions = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            notices.note(f"{where} ({str(tool.type)[:40]})")
            continue
        if tool.input_schema is None:
            raise BadRequest(f"{where}.input_schema is required", field=f"{where}.input_schema")
        described = Function(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        functions.append((where, described))
    return checked_tools(functions, schema="input_schema")


def choice_of(choice: AskedChoice | None, tools: Sequence[Tool]) -> ToolChoice:
    """Raises BadRequest for a choice that the tools do not allow."""
    if choice is None or choice.type in ("auto", "none"):
        return "auto" if choice is None or choice.type == "auto" else "none"
    if not tools:
        raise BadRequest(
            f"tool_choice: {choice.type!r} needs tools; send some, or leave tool_choice out", field="tool_choice"
        )
    if choice.type == "any":
        return "required"
    if choice.name is None:
        raise BadRequest("tool_choice.name is required", field="tool_choice.name")
    if choice.name not in {tool.name for tool in tools}:
        listed = ", ".join(tool.name for tool in tools)[:200]
        raise BadRequest(
            f"tool_choice.name: {choice.name[:128]!r} is not one of the tools ({listed})", field="tool_choice.name"
        )
    return ("function", choice.name)


# 0 reads the prompt and says nothing, which leaves it in the cache.
_MaxTokens = Annotated[int, Meta(ge=0, le=fields.MAX_TOKENS)]
_StopSequences = Annotated[list[fields.StopString], Meta(max_length=fields.MAX_STOPS)]


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """`thinking`. A budget is checked and not kept: models here end their thinking by themselves. Only one that is
    asked for counts: agents send 0, or their last one, beside another type."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A format of the answer. `schema` is UNSET where it is not there."""

    type: Literal["json_schema"]
    schema: Any = msgspec.UNSET


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: what decides about the prompt."""

    model: fields.ModelName = ""
    messages: Annotated[list[AskedMessage], Meta(max_length=MAX_MESSAGES)]
    system: Content | None = None
    tools: AskedTools | None = None
    tool_choice: AskedChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # What `output_config.format` was called before.
    output_format: OutputFormat | None = None

    def ask(self) -> ChatRequest:
        """The conversation and what is wanted next; an assistant's last message is gone on with. Raises BadRequest."""
        media = Attachments()
        messages = conversation.conversation_of(self.system, self.messages, media)
        tools = tools_of(self.tools or ())
        choice = choice_of(self.tool_choice, tools)
        continues = messages[-1]["role"] == "assistant"
        if continues and "tool_calls" in messages[-1]:
            raise BadRequest(
                "messages: the last message calls a tool; its tool_result must follow", field="messages"
            )  # fmt: skip
        if continues:
            check_goes_on(choice)
        return ChatRequest(
            messages=messages,
            tools=tools,
            tool_choice=choice,
            parallel_calls=not (self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use),
            response_grammar=self._answer_grammar(),
            think=self._think(),
            passed_over="thinking",  # clients set for Claude ask every model to think
            continue_last=continues,
            media=media.all(),
        )

    @property
    def effort(self) -> str | None:
        """What the client asks for, whether or not it asks for thinking."""
        return self.output_config.effort if self.output_config is not None else None

    @property
    def omits_thinking(self) -> bool:
        """Whether the client wants to know that there was thinking, but not what."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def _think(self) -> bool | str | None:
        """Not unless it is asked for; None leaves it to the model."""
        if self.thinking is None or self.thinking.type == "disabled":
            return False
        if self.output_config is not None and self.output_config.effort is not None:
            return self.output_config.effort
        return True if self.thinking.type == "enabled" else None

    def _answer_grammar(self) -> Grammar | None:
        asked, field = self.output_format, "output_format"
        if self.output_config is not None and self.output_config.format is not None:
            asked, field = self.output_config.format, "output_config.format"
        if asked is None:
            return None
        if asked.schema is msgspec.UNSET:
            raise BadRequest(f"{field}.schema is required", field=f"{field}.schema")
        return structured.json_schema(asked.schema, field=f"{field}.schema")


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: _MaxTokens
    stream: bool | None = None
    stop_sequences: _StopSequences | None = None

    def check_supported(self) -> None:
        """Raises BadRequest for fields that contradict each other."""
        if self.thinking is None or self.thinking.type != "enabled":
            return
        budget = self.thinking.budget_tokens
        if not budget:
            raise BadRequest("thinking.budget_tokens: 'enabled' needs 1 or more", field="thinking.budget_tokens")
        if budget >= self.max_tokens:
            raise BadRequest(
                f"thinking.budget_tokens: {budget} must be less than max_tokens, which is {self.max_tokens}",
                field="thinking.budget_tokens",
            )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop sequences; an empty one would match everywhere and is left out."""
        return fields.stop_strings(self.stop_sequences)
