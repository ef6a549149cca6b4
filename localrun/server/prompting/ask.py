"""What is asked of a model in a chat, whatever API it came by, and tools as clients of every API write them.

Function tools have three spellings: chat's (`{"type": "function", "function": {...}}`), the older `functions` of chat,
and that of responses (`{"type": "function", "name": ...}`). All become the same `Tool`.

Pictures and sound stand in the text of messages as markers, which are random for each request: no text that a client
writes can be one. What is behind them is in `media/`.
Pure. Does not: know a model, put tools into a prompt, or constrain a call.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server import notices
from localrun.wire import Grammar, MediaKind

# {"role": "system" | "user" | "assistant" | "tool", "content": str}; for an assistant also `thinking` and `tool_calls`
# (arguments as objects), for a tool `tool_call_id` and `name`.
Message = dict[str, Any]


def called(name: str, arguments: Mapping[str, Any], call_id: str | None) -> dict[str, Any]:
    """A call of an assistant's message. Without an id, results are told apart by their names and their order."""
    named = {"id": call_id} if call_id else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: str, *, thinking: str | None = None, calls: Sequence[dict[str, Any]] = ()) -> Message:
    """An assistant's message, with what there is."""
    made: Message = {"role": "assistant", "content": content}
    if thinking:
        made["thinking"] = thinking
    if calls:
        made["tool_calls"] = list(calls)
    return made


# More are more than any context holds of most models.
MAX_MEDIA = 16


class Marker(str):
    """A text that stands for a picture or sound."""

    __slots__ = ()


class Attached(msgspec.Struct, eq=False):
    """A picture or sound that a message's text has `marker` for. `source` is what the client sent as the body's
    `field`: base64, a data URI or a URL. `kind` is what belongs there, None if both do. A picture is shrunk to
    `max_side`, if that is not 0. `content` is what the source turned out to hold, once it was read
    (`media/decoder.py`)."""

    marker: Marker
    field: str
    source: str
    kind: MediaKind | None = None
    max_side: int = 0
    content: Any = None


class Attachments:
    """Collects those of one request."""

    def __init__(self) -> None:
        self._found: list[Attached] = []
        self._nonce = ""

    def add(self, source: str, field: str, kind: MediaKind | None = None, *, max_side: int = 0) -> Marker:
        """What to write into the text. Raises BadRequest beyond `MAX_MEDIA`."""
        if len(self._found) == MAX_MEDIA:
            raise BadRequest.of(field, f"the limit is {MAX_MEDIA} pictures and recordings; send fewer")
        self._nonce = self._nonce or secrets.token_hex(16)
        marker = Marker(f"media{self._nonce}n{len(self._found):02d}")
        self._found.append(Attached(marker, field, source, kind, max_side))
        return marker

    def all(self) -> tuple[Attached, ...]:
        """Those that were added, in their order."""
        return tuple(self._found)


def joined(parts: Sequence[str], separator: str) -> str:
    """The parts of a message as one text. Nothing stands beside a picture: that is how models have seen them."""
    text, after_media = "", True
    for part in parts:
        is_media = isinstance(part, Marker)
        text += part if is_media or after_media else separator + part
        after_media = is_media
    return text


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a call. OpenAI has the arguments as JSON text, Ollama as an object; clients send both to both."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One of an assistant's `tool_calls`."""

    function: CalledFunction
    id: str | None = None


class UnreadArguments(dict[str, Any]):
    """Arguments that are no JSON object: models write such, and answers end in the middle of them. A template that
    writes arguments as text is given `text`, any other an object that holds it."""

    def __init__(self, text: str) -> None:
        super().__init__(arguments=text)
        self.text = text


def arguments_of(text: str | dict[str, Any] | None) -> dict[str, Any]:
    """A call's arguments as templates take them. What a client got of a model, here or elsewhere, it may send back."""
    if isinstance(text, dict):
        return text
    if text is None or text.strip() in ("", "null"):
        return {}
    try:
        parsed = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else UnreadArguments(text)


_ROLES = {"developer": "system", "function": "tool"}
_ROLE = re.compile(r"[a-z][a-z0-9_.-]{0,31}", re.ASCII)


def role_of(role: str, where: str) -> str:
    """A message's role as templates know it. One that is none of the usual is the template's to judge: Granite's knows
    `control` and `document`. Raises BadRequest for what is no word."""
    known = role.strip().lower()
    if not _ROLE.fullmatch(known):
        raise BadRequest.of(
            f"{where}.role", f"{role[:40]!r} is not a role; use system, developer, user, assistant or tool"
        )
    return _ROLES.get(known, known)


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call. `parameters` is a JSON schema of an object, of which a call that must come
    may leave nothing out if it `is_strict`. `field` is where it stands in the body."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    is_strict: bool = False
    field: str = "tools"

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


ToolChoice = Literal["auto", "none", "required"] | tuple[Literal["function"], str]


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation and what is wanted of the next message.

    `think` None leaves it to the template; a text is an effort ("low", "high"), of which the template has its own words
    (`Profile.effort`). With `continue_last` the last message is an assistant's, and the reply goes on where it ends.
    `response_grammar` is what the content must match; thinking before it is free. `template` is one to use instead of
    the model's own. `media` is what markers in the messages stand for. Without `adds_prompt` nobody asks for the next
    message, and the prompt ends with the last one. A model that does not think is asked all the same where the wish
    came as the field `passed_over`, and the answer says that it was; so it does of a `thinking_limit`, a field with the
    tokens that the thinking may take, which nothing holds a model to.
    """

    messages: Sequence[Message]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_calls: bool = True
    response_grammar: Grammar | None = None
    think: bool | str | None = None
    documents: Sequence[Mapping[str, Any]] = ()
    template_variables: Mapping[str, Any] = {}
    continue_last: bool = False
    template: str | None = None
    media: tuple[Attached, ...] = ()
    adds_prompt: bool = True
    passed_over: str = ""
    thinking_limit: str = ""


MAX_TOOLS = 512
# More than fit into any context; a million would hold up every stream for a second before a template refuses them.
MAX_MESSAGES = 32_768

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}", re.ASCII)
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool is, without its type."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct, frozen=True, kw_only=True):
    """One of chat's `tools`."""

    type: str = "function"
    function: Function | None = None


class FunctionName(msgspec.Struct, frozen=True, kw_only=True):
    """A function, named."""

    name: str


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True):
    """`allowed_tools`: some of the tools, and whether one of them must be called."""

    tools: list[dict[str, Any]]
    mode: Literal["auto", "required"] = "auto"


class NamedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A `tool_choice` that is an object, in chat's spelling or in that of responses."""

    type: str = "function"
    function: FunctionName | None = None
    name: str | None = None
    namespace: str | None = None
    allowed_tools: AllowedTools | None = None
    tools: list[dict[str, Any]] | None = None
    mode: Literal["auto", "required"] = "auto"


# `any` is Mistral's.
Choice = Literal["auto", "none", "required", "any"] | NamedChoice
ChatTools = Annotated[list[ChatTool], Meta(max_length=MAX_TOOLS)]
Functions = Annotated[list[Function], Meta(max_length=MAX_TOOLS)]


def tools_of_chat(tools: Sequence[ChatTool]) -> tuple[Tool, ...]:
    """Of chat's `tools`. Raises BadRequest naming the tool."""
    functions = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            raise BadRequest.of(
                f"{where}.type", f"{tool.type[:40]!r} tools are not supported; describe it as a function"
            )
        if tool.function is None:
            raise BadRequest(f"{where}.function is required", field=f"{where}.function")
        functions.append((f"{where}.function", tool.function))
    return checked_tools(functions)


def tools_of_functions(functions: Sequence[Function]) -> tuple[Tool, ...]:
    """Of chat's older `functions`. Raises BadRequest naming the function."""
    return checked_tools([(f"functions[{index}]", function) for index, function in enumerate(functions)])


def checked_tools(functions: Sequence[tuple[str, Function]], *, schema: str = "parameters") -> tuple[Tool, ...]:
    """Of (where it stands in the body, function); `schema` is what the API calls the parameters. Raises BadRequest for
    a bad name, and for the same name twice."""
    tools: dict[str, Tool] = {}
    for where, function in functions:
        if not _NAME.fullmatch(function.name):
            raise BadRequest.of(
                f"{where}.name",
                f"{function.name[:40]!r} is not a function's name; use up to 128 of A-Z, a-z, 0-9 and _ . : / -",
            )
        if function.name in tools:
            raise BadRequest.of(f"{where}.name", f"{function.name!r} is there twice")
        tools[function.name] = Tool(
            function.name,
            function.description or "",
            _NO_ARGUMENTS | (function.parameters or {}),
            is_strict=function.strict is True or notices.STRICT_SCHEMAS.get(),
            field=f"{where}.{schema}",
        )
    return tuple(tools.values())


def choose_tools(
    choice: Choice | None, tools: tuple[Tool, ...], *, field: str = "tool_choice"
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that may be called, and whether one must be. Raises BadRequest for a choice that the tools do not
    allow."""
    if choice is None:
        return tools, "auto"
    if isinstance(choice, str):
        wanted = "required" if choice == "any" else choice
        if wanted == "required" and not tools:
            raise BadRequest.of(field, f"'{choice}' needs tools; send some, or leave {field} out")
        return tools, wanted
    if choice.type == "allowed_tools":
        return _allowed(choice, tools, field)
    name = choice.function.name if choice.function is not None else choice.name
    if choice.type != "function" or name is None:
        raise BadRequest.of(field, "use 'auto', 'none', 'required', or an object that names a function of tools")
    _check_known([name], tools, field)
    return tools, ("function", name)


def check_goes_on(choice: ToolChoice, *, field: str = "tool_choice") -> None:
    """Raises BadRequest where a call is wanted of an answer that goes on from an assistant's message."""
    if choice not in ("auto", "none"):
        raise BadRequest.of(
            field, "an answer that goes on from an assistant's message cannot be a call; use 'auto' or 'none'"
        )


def _allowed(choice: NamedChoice, tools: tuple[Tool, ...], field: str) -> tuple[tuple[Tool, ...], ToolChoice]:
    inner = choice.allowed_tools or AllowedTools(tools=choice.tools or [], mode=choice.mode)
    names = [_name_of(tool) for tool in inner.tools]
    _check_known(names or [""], tools, field)
    return tuple(tool for tool in tools if tool.name in names), inner.mode


def _name_of(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name", ""))


def _check_known(names: Sequence[str], tools: tuple[Tool, ...], field: str) -> None:
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            listed = ", ".join(sorted(known))[:200] or "none was sent"
            raise BadRequest.of(field, f"{name[:128]!r} is not one of the tools ({listed})")
