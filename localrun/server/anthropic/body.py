"""Bodies of Anthropic's `/v1/messages` and of the counting of its tokens, and their conversations for chat templates.

Unknown fields, and those that are about Anthropic's service (`metadata`, `service_tier`, `container`), are ignored.
What is known and cannot be done is refused with its name. Beside Anthropic's fields stand localrun's own and those of
its sampling, by the names that the other APIs of `/v1` have.

A user's message may hold results of tools beside its text: each becomes a message of its own, in its place. System
messages in the middle stay where they are, so that the prompt before them, and what is cached of it, stays the same.
They may add tools, and take some away: what is offered is what is left at the end. Kinds of blocks that nobody has
heard of yet, and that hold nothing to read, are left out, and the answer says so.

Pure. Does not: know the model, or render a template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server import notices, structured
from localrun.server.http import fields
from localrun.server.http.fields import SamplingFields
from localrun.server.prompting.ask import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Attachments,
    ChatRequest,
    Function,
    Message,
    NamedChoice,
    Tool,
    ToolChoice,
    arguments_of,
    assistant,
    called,
    check_goes_on,
    checked_tools,
    choose_tools,
    joined,
)
from localrun.wire import Grammar, MediaKind


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One block of any type; each type has some of the fields."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | str | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    title: str | None = None
    context: str | None = None
    source: Any = None
    tool: Any = None


Content = str | list[Block]


def text_of(content: Content | None, where: str, media: Attachments | None = None) -> str:
    """The text of blocks that are text or hold it. Pictures go into `media`, where there is one. Raises BadRequest
    naming any other."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined([block_text(block, f"{where}[{index}]", media) for index, block in enumerate(content)], "\n\n")


def block_text(block: Block, where: str, media: Attachments | None = None) -> str:
    """Of one block. Raises BadRequest for one that no model can read."""
    if block.type == "text":
        return str(required(block.text, f"{where}.text"))
    if block.type == "document":
        return _lines(block.title, block.context, _document(block.source, where))
    if block.type == "search_result":
        source = block.source if isinstance(block.source, str) else None
        return _lines(block.title, source, text_of(block.content, f"{where}.content"))
    if block.type == "tool_reference":  # of a search for tools, whose find is among the tools
        return f"Loaded: {block.tool_name or block.name or 'a tool'}"
    if block.type in _CHANGES:
        return f"{_CHANGES[block.type]}: {_name_in(block) or 'a tool'}"
    if block.type == "image":
        if media is None:
            raise BadRequest.of(where, "no image can stand here; put it into a message or a tool_result")
        return _picture(block.source, f"{where}.source", media)
    if _HOLDS.search(block.type) or (block.text, block.content, block.source) != (None, None, None):
        raise BadRequest.of(
            f"{where}.type", f"{block.type[:40]!r} blocks are not supported here; send text, or leave the block out"
        )
    notices.note(f"{where} ({block.type[:40]})")
    return ""


# What blocks are called that hold something to read, by whatever field; those of OpenAI's API among them.
_HOLDS = re.compile("audio|document|file|image|media|text|upload|video")
# Of system messages: what they do to the tools, in the model's words.
_CHANGES = {"tool_addition": "Loaded", "tool_removal": "Removed"}


def _name_in(block: Block) -> str:
    """Of the tool that is added, by its name or its definition, or taken away."""
    tool = block.tool if isinstance(block.tool, dict) else {}
    named = tool.get("definition", tool)
    return str(named.get("name") or "") if isinstance(named, dict) else ""


def _picture(source: Any, where: str, media: Attachments) -> str:
    """Its `media_type` does not count: the bytes say what it is."""
    kind = source.get("type") if isinstance(source, dict) else None
    name = {"base64": "data", "url": "url"}.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise BadRequest.of(f"{where}.type", "use base64, with data, or url")
    if not isinstance(source.get(name), str):
        raise BadRequest.of(f"{where}.{name}", "a text is required")
    return media.add(source[name], f"{where}.{name}", MediaKind.IMAGE)


def _document(source: Any, where: str) -> str:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    if kind == "content":
        try:
            return text_of(msgspec.convert(source.get("content"), Content), f"{where}.source.content")
        except msgspec.ValidationError as error:
            raise BadRequest.of(f"{where}.source.content", str(error)) from None
    raise BadRequest.of(f"{where}.source", "only documents of text can be read here; send the document's text")


def _lines(*texts: str | None) -> str:
    return "\n".join(text for text in texts if text)


def required(value: Any, field: str) -> Any:
    """Raises BadRequest where a block lacks what its type needs."""
    if value is None:
        raise BadRequest(f"{field} is required", field=field)
    return value


def joined_texts(texts: Sequence[str]) -> str:
    """Texts of neighbouring blocks as one."""
    return joined([text for text in texts if text], "\n\n")


# Claude Code puts a line for its maker's accounts before the system prompt. It is another one in every request, is not
# meant for the model, and would make every cached prefix useless.
_ACCOUNTING = "x-anthropic-billing-header:"


class AskedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One of `messages`."""

    role: str
    content: Content


def conversation_of(system: Content | None, messages: Sequence[AskedMessage], media: Attachments) -> list[Message]:
    """Pictures go into `media`. Raises BadRequest naming the message or the block."""
    if not messages:
        raise BadRequest.of("messages", "at least one message is required")
    result: list[Message] = []
    told = system_text(system, "system")
    if told:
        result.append({"role": "system", "content": told})
    begins = max((at for at, message in enumerate(messages) if _has_summary(message.content)), default=0)
    for index, message in enumerate(messages[begins:], begins):
        result += _made(message, f"messages[{index}]", media)
    return result


def _has_summary(content: Content) -> bool:
    """Whether a service made a summary of all that comes before."""
    return not isinstance(content, str) and any(block.type == "compaction" and block.content for block in content)


def system_text(system: Content | None, where: str) -> str:
    """The system prompt, without what Claude Code puts before it."""
    if isinstance(system, list):
        return text_of([block for block in system if not (block.text or "").startswith(_ACCOUNTING)], where)
    if system is not None and system.startswith(_ACCOUNTING):
        return system.partition("\n")[2]
    return system or ""


def _made(message: AskedMessage, where: str, media: Attachments) -> list[Message]:
    if message.role == "system":
        return [{"role": "system", "content": system_text(message.content, f"{where}.content")}]
    if message.role not in ("user", "assistant"):
        raise BadRequest.of(f"{where}.role", f"{message.role[:40]!r} is not a role; use user, assistant or system")
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return _assistant(message.content, f"{where}.content", media)
    return _user(message.content, f"{where}.content", media)


def _user(blocks: Sequence[Block], where: str, media: Attachments) -> list[Message]:
    result: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            result.append({"role": "user", "content": joined_texts(texts)})
            texts.clear()

    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.type != "tool_result":
            texts.append(block_text(block, at, media))
            continue
        flush()
        answered = required(block.tool_use_id, f"{at}.tool_use_id")
        said = text_of(block.content, f"{at}.content", media)
        # No template has a place for it.
        text = f"Error: {said}" if block.is_error else said
        result.append({"role": "tool", "tool_call_id": answered, "name": "", "content": text})
    flush()
    return result or [{"role": "user", "content": ""}]


# Tools that a service ran for a conversation that was begun there, and their results. What it found is in its answer.
_OF_SERVICE = ("server_tool_use", "mcp_tool_use", "_tool_result")


def _assistant(blocks: Sequence[Block], where: str, media: Attachments) -> list[Message]:
    summary: list[Message] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.type == "thinking":
            thoughts.append(required(block.thinking, f"{at}.thinking"))
        elif block.type == "compaction" and block.content:
            summary = [{"role": "user", "content": text_of(block.content, f"{at}.content")}]
            texts, thoughts, calls = [], [], []
        elif block.type in ("redacted_thinking", "compaction"):
            continue  # nobody but its maker can read it
        elif block.type == "tool_use":
            name = required(block.name, f"{at}.name")
            calls.append(called(name, arguments_of(block.input), required(block.id, f"{at}.id")))
        elif block.type.endswith(_OF_SERVICE):
            notices.note(f"{at} ({block.type[:40]})")
        else:
            texts.append(block_text(block, at, media))
    said = assistant(joined_texts(texts), thinking=joined_texts(thoughts), calls=calls)
    return [*summary, said] if texts or thoughts or calls else summary or [said]


class AskedTool(msgspec.Struct, frozen=True, kw_only=True):
    """One of `tools`. Those that Anthropic defines or runs have a type with a date and no schema."""

    name: str | None = None
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


def offered(tools: Sequence[AskedTool], messages: Sequence[AskedMessage]) -> list[tuple[str, AskedTool]]:
    """Where each stands in the body, and the tool: `tools`, with what system messages add and take away. Raises
    BadRequest naming a definition that is none."""
    found = [(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    gone: set[str] = set()
    for index, message in enumerate(messages):
        blocks = message.content if message.role == "system" and isinstance(message.content, list) else ()
        for at, block in enumerate(blocks):
            name = _name_in(block)
            if block.type == "tool_removal":
                gone.add(name)
            if block.type != "tool_addition":
                continue
            gone.discard(name)
            if isinstance(block.tool, dict) and "definition" in block.tool:
                where = f"messages[{index}].content[{at}].tool.definition"
                try:
                    definition = msgspec.convert(block.tool["definition"], AskedTool)
                except msgspec.ValidationError as error:
                    raise BadRequest.of(where, str(error)) from None
                found = [(there, tool) for there, tool in found if tool.name != name] + [(where, definition)]
    return [(where, tool) for where, tool in found if tool.name not in gone]


def tools_of(tools: Sequence[tuple[str, AskedTool]]) -> tuple[Tool, ...]:
    """Those that Anthropic defines are left out, and the answer says so. Raises BadRequest naming the tool."""
    functions = []
    for where, tool in tools:
        if _is_defined(tool):
            notices.note(f"{where} ({str(tool.type)[:40]})")
            continue
        described = Function(
            name=required(tool.name, f"{where}.name"),
            description=tool.description,
            parameters=required(tool.input_schema, f"{where}.input_schema"),
            strict=tool.strict,
        )
        functions.append((where, described))
    return checked_tools(functions, schema="input_schema")


def _is_defined(tool: AskedTool) -> bool:
    """Whether Anthropic defines it."""
    return tool.type not in (None, "custom")


def choice_of(choice: AskedChoice | None, tools: tuple[Tool, ...], left_out: Sequence[AskedTool]) -> ToolChoice:
    """Raises BadRequest for a choice that the tools do not allow."""
    if choice is None:
        return "auto"
    if choice.type == "tool" and choice.name is None:
        raise BadRequest("tool_choice.name is required", field="tool_choice.name")
    forced = {"any": not tools, "tool": choice.name not in [tool.name for tool in tools]}.get(choice.type, False)
    wanted = [tool for tool in left_out if choice.name in (None, tool.name)] if forced else []
    if wanted:
        raise BadRequest.of(
            "tool_choice" if choice.type == "any" else "tool_choice.name",
            f"{str(wanted[0].name)[:128]!r} ({str(wanted[0].type)[:40]}) is a tool of Anthropic's, which this server "
            f"does not run; send a tool of your own with an input_schema in its place, or leave tool_choice out",
        )
    if choice.type != "tool":
        return choose_tools(choice.type, tools)[1]
    return choose_tools(NamedChoice(name=choice.name), tools, field="tool_choice.name")[1]


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
        messages = conversation_of(self.system, self.messages, media)
        asked = offered(self.tools or (), self.messages)
        tools = tools_of(asked)
        choice = choice_of(self.tool_choice, tools, [tool for _, tool in asked if _is_defined(tool)])
        continues = messages[-1]["role"] == "assistant"
        if continues and "tool_calls" in messages[-1]:
            raise BadRequest.of("messages", "the last message calls a tool; its tool_result must follow")
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
            thinking_limit="thinking.budget_tokens" if self.thinking and self.thinking.type == "enabled" else "",
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
            raise BadRequest.of("thinking.budget_tokens", "'enabled' needs 1 or more")
        if budget >= self.max_tokens:
            raise BadRequest.of(
                "thinking.budget_tokens", f"{budget} must be less than max_tokens, which is {self.max_tokens}"
            )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop sequences; an empty one would match everywhere and is left out."""
        return fields.stop_strings(self.stop_sequences)
