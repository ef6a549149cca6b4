"""What bodies of OpenAI's API have in common: messages as chat templates want them, choices, streaming, and the shape
that an answer must have (`response_format`, and llama-server's `json_schema` and `grammar`).

Pure. Does not: know the model, render a template, or compile a grammar (the engine does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server import structured
from localrun.server.http import fields
from localrun.server.http.fields import AnswerLimit, SamplingFields
from localrun.server.prompting.ask import (
    Attachments,
    CalledFunction,
    Message,
    ToolCall,
    arguments_of,
    assistant,
    called,
    joined,
    role_of,
)
from localrun.wire import Grammar, MediaKind

_KINDS = "text, json_object or json_schema"


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format.json_schema`, and with `type` beside it the `text.format` of responses.

    `schema` is UNSET where it is not there: `true` and `{}` are schemas.
    """

    name: str | None = None
    schema: Any = msgspec.UNSET
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format`. `schema` beside `type` is llama-server's."""

    type: str = "text"
    json_schema: JsonSchema | None = None
    schema: Any = msgspec.UNSET


class RunningFields(SamplingFields, frozen=True, kw_only=True):
    """What a stream is to tell while it runs, as llama-server has it."""

    return_progress: bool | None = None
    timings_per_token: bool | None = None


class FormatFields(RunningFields, frozen=True, kw_only=True):
    """A body that says how to sample, and what shape the answer must have."""

    response_format: ResponseFormat | None = None
    json_schema: Any = None
    grammar: str | None = None

    def answer_grammar(self) -> Grammar | None:
        """None for free text. Raises BadRequest for an unknown kind, for more than one of the fields, and for what a
        grammar cannot hold an answer to."""
        asked = [name for name in ("response_format", "json_schema", "grammar") if self._asks(name)]
        if len(asked) > 1:
            raise BadRequest.of(asked[1], f"not together with {asked[0]}; send one of them")
        if self.response_format is not None and asked == ["response_format"]:
            return grammar_of_format(self.response_format)
        if self.json_schema is not None:
            return structured.json_schema(self.json_schema, field="json_schema")
        return structured.gbnf(self.grammar) if self.grammar else None

    def _asks(self, name: str) -> bool:
        if name == "response_format":
            return self.response_format is not None and self.response_format.type != "text"
        return getattr(self, name) not in (None, "")


def grammar_of_format(
    asked: ResponseFormat, *, path: Sequence[str] = ("response_format", "json_schema", "schema")
) -> Grammar:
    """Of a format that is not text. `path` is where its schema stands in the body."""
    if asked.type == "json_object":
        if asked.schema is msgspec.UNSET:
            return structured.json_object()
        return structured.json_schema(asked.schema, field=f"{path[0]}.schema")
    if asked.type != "json_schema":
        raise BadRequest.of(f"{path[0]}.type", f"{asked.type[:40]!r} is not known; use {_KINDS}")
    described = asked.json_schema or JsonSchema(schema=asked.schema)
    if described.schema is msgspec.UNSET:
        field = ".".join(path)
        raise BadRequest(f"{field} is required; use json_object for any object", field=field)
    return structured.json_schema(described.schema, field=".".join(path), strict=described.strict or None)


# Each answer is a job; this many may come of one request, whatever `n` and the number of prompts.
MAX_ANSWERS = 64

Choices = Annotated[int, Meta(ge=1, le=fields.MAX_CHOICES)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None


class LimitFields(FormatFields, frozen=True, kw_only=True):
    """The most tokens of an answer, by each of its names; with -1 it ends when the model ends it."""

    max_completion_tokens: AnswerLimit | None = None
    max_output_tokens: AnswerLimit | None = None
    max_tokens: AnswerLimit | None = None
    n_predict: AnswerLimit | None = None

    @property
    def max_output(self) -> int | None:
        """By the first name that is given."""
        names = (self.max_completion_tokens, self.max_output_tokens, self.max_tokens, self.n_predict)
        return next((int(limit) for limit in names if limit is not None), None)


class CommonFields(LimitFields, frozen=True, kw_only=True):
    """What chat and completions both take."""

    model: fields.ModelName = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None

    @property
    def n_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


_TEXT_PARTS = ("text", "input_text", "output_text")


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One of `messages`. `content` is text, or parts of which each has its own type."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    prefix: bool | None = None


def for_template(messages: Sequence[ChatMessage], media: Attachments | None = None) -> list[Message]:
    """Their pictures and sound go into `media`, where there is one. Raises BadRequest naming the message."""
    if not messages:
        raise BadRequest.of("messages", "at least one message is required")
    result: list[Message] = []
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        result.append(_for_template(message, f"messages[{index}]", names, media))
    return result


def text_of(content: str | Sequence[dict[str, Any]] | None, where: str, media: Attachments | None = None) -> str:
    """Templates take one text; llama-server joins parts in the same way. Pictures and sound go into `media`, where
    there is one. Raises BadRequest for a part that is neither."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined([part_text(part, f"{where}[{index}]", media) for index, part in enumerate(content)], "\n")


def _for_template(message: ChatMessage, where: str, names: dict[str, str], media: Attachments | None) -> Message:
    """`names` of the calls so far, by id: a tool's answer is told which function it answers for."""
    role = role_of(message.role, where)
    if role == "assistant":
        return _assistant(message, where, names, media)
    content = text_of(message.content, f"{where}.content", media)
    made: Message = {"role": role, "content": content}
    if role == "tool":
        made["tool_call_id"] = message.tool_call_id or message.name or ""
        made["name"] = message.name or names.get(made["tool_call_id"], "")
    return made


_THINKING_PARTS = ("thinking", "reasoning")


def _assistant(message: ChatMessage, where: str, names: dict[str, str], media: Attachments | None) -> Message:
    said, thoughts = message.content, [message.reasoning_content or message.reasoning or ""]
    if isinstance(said, list):
        thoughts += [_thinking(part, part["type"]) for part in said if part.get("type") in _THINKING_PARTS]
        said = [part for part in said if part.get("type") not in _THINKING_PARTS]
    content = text_of(said, f"{where}.content", media)
    if message.refusal and not message.content:
        content = message.refusal
    calls = message.tool_calls or []
    if message.function_call is not None:
        # The answer to an older call names the function, and has no id.
        calls = [ToolCall(id=message.function_call.name, function=message.function_call)]
    made = []
    for at, call in enumerate(calls):
        made.append(called(call.function.name, arguments_of(call.function.arguments), call.id or f"call_{at}"))
        names[made[-1]["id"]] = call.function.name
    return assistant(content, thinking="\n".join(filter(None, thoughts)), calls=made)


def _thinking(part: dict[str, Any], kind: str) -> str:
    """Of a part that holds thinking: a text, or as Mistral has it, parts of text."""
    held = part.get(kind, part.get("text"))
    if isinstance(held, list):
        held = "\n".join(str(inner.get("text", "")) for inner in held if isinstance(inner, dict))
    return held if isinstance(held, str) else ""


# Pictures with little detail are shrunk to this.
_LOW_DETAIL_SIDE = 512


def part_text(part: dict[str, Any], where: str, media: Attachments | None) -> str:
    """Of one part, or the marker of what it shows. Raises as `text_of`."""
    kind = part.get("type")
    if media is not None and kind in ("image_url", "input_image"):
        return _picture(part, where, media)
    if media is not None and kind == "input_audio":
        return media.add(_text(part.get("input_audio"), "data", f"{where}.input_audio"), f"{where}.input_audio.data",
                         MediaKind.AUDIO)  # fmt: skip
    text = part.get("text") if kind in _TEXT_PARTS else part.get("refusal") if kind == "refusal" else None
    if kind not in (*_TEXT_PARTS, "refusal"):
        takes = "text" if media is None else "text, image_url or input_audio"
        raise BadRequest.of(where, f"{str(kind)[:40]!r} parts are not supported; send {takes}")
    if not isinstance(text, str):
        raise BadRequest.of(f"{where}.text", "expected a text")
    return text


def _picture(part: dict[str, Any], where: str, media: Attachments) -> str:
    """In chat's form, an object with a URL, or in that of responses, the URL itself; clients send both to both."""
    field, given = f"{where}.image_url", part.get("image_url")
    if given is None and part.get("file_id") is not None:
        raise BadRequest.of(f"{where}.file_id", "no files are kept here; send image_url")
    detail = part.get("detail")
    if isinstance(given, dict):
        detail = given.get("detail", detail)
        given, field = _text(given, "url", field), f"{field}.url"
    if not isinstance(given, str):
        raise BadRequest.of(field, "expected a data URI, or an object with one as url")
    return media.add(given, field, MediaKind.IMAGE, max_side=_LOW_DETAIL_SIDE if detail == "low" else 0)


def _text(holder: Any, name: str, where: str) -> str:
    text = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(text, str):
        raise BadRequest.of(f"{where}.{name}", "expected a text")
    return text
