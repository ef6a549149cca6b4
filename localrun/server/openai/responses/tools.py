"""The tools of a response: what the model is given of them, and as what its calls come back.

A local model calls functions. A `namespace` is a group of functions: each is offered under both names, and its calls
come back with `namespace` and `name` apart. A `custom` tool takes one text: it is a function with one argument, and its
calls come back as `custom_tool_call`. What OpenAI or a client's own program runs, and kinds that nobody has heard of
yet, are left out, and the answer says so.

Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from localrun.errors import bad_field
from localrun.server.openai.answer import Fields
from localrun.server.prompting.ask import AllowedTools, Choice, Function, NamedChoice, Tool, checked_tools


class Client(NamedTuple):
    """What a tool is to the client: its own name, the namespace that it is in, and whether it takes one text."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    def call(self, item_id: str, call_id: str) -> Fields:
        """The item of a call that begins."""
        if self.is_custom:
            return {"id": item_id, "type": "custom_tool_call", "status": "in_progress", "call_id": call_id,
                    "name": self.name, "input": ""}  # fmt: skip
        inside = {} if self.namespace is None else {"namespace": self.namespace}
        return {"id": item_id, "type": "function_call", "status": "in_progress", "call_id": call_id, **inside,
                "name": self.name, "arguments": ""}  # fmt: skip


class Offered(NamedTuple):
    """`tools` for the model, what each of them is to the client by the model's name, the tools as the client wrote
    them, and a word about each that is left out."""

    tools: tuple[Tool, ...]
    clients: dict[str, Client]
    written: list[Fields]
    left_out: list[str]

    def choice(self, asked: Choice | None) -> Choice | None:
        """`tool_choice` by the model's names. One that names only what is left out leaves the choice to the model."""
        if not isinstance(asked, NamedChoice):
            return asked
        if asked.type == "allowed_tools":
            inner = asked.allowed_tools or AllowedTools(tools=asked.tools or [], mode=asked.mode)
            named = [_named(tool) for tool in inner.tools if tool.get("type", "function") in _CALLED]
            if inner.tools and not named:
                return None
            return NamedChoice(type="allowed_tools", allowed_tools=AllowedTools(tools=named, mode=inner.mode))
        if asked.type not in _CALLED:
            return None
        name = asked.function.name if asked.function is not None else asked.name
        return NamedChoice(name=None if name is None else name_for_model(name, asked.namespace))


# Kinds of tools that a model can call.
_CALLED = ("function", "custom")


def _named(tool: Fields) -> Fields:
    function = tool.get("function")
    inner = function if isinstance(function, dict) else tool
    return {"type": "function", "name": name_for_model(str(inner.get("name", "")), tool.get("namespace"))}


def name_for_model(name: str, namespace: object) -> str:
    """Both names of a function in a namespace, as one."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def input_of(arguments: str) -> str:
    """The text that a custom tool was called with; what there is of it where the call was cut off."""
    try:
        text = json.loads(arguments)["input"]
    except (ValueError, LookupError, TypeError):
        return arguments
    return text if isinstance(text, str) else arguments


def offered(tools: Sequence[Fields]) -> Offered:
    """See the module. Raises BadRequest naming the tool that is malformed."""
    found = Offered((), {}, [], [])
    functions: list[tuple[str, Function]] = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        before = len(functions)
        for place, function, client in _functions(tool, where, None, found.left_out):
            functions.append((place, function))
            found.clients[function.name] = client
        if len(functions) > before:
            found.written.append(tool)
    return found._replace(tools=checked_tools(functions))


def _functions(
    tool: Fields, where: str, namespace: str | None, left_out: list[str]
) -> Iterator[tuple[str, Function, Client]]:
    kind = tool.get("type", "function")
    if kind == "function":
        function = _converted(tool, where)
        name = name_for_model(function.name, namespace)
        yield where, msgspec.structs.replace(function, name=name), Client(function.name, namespace)
    elif kind == "custom":
        function = _converted({name: tool[name] for name in ("name", "description") if name in tool}, where)
        name = name_for_model(function.name, namespace)
        described = "\n\n".join(filter(None, (function.description, _format(tool.get("format")))))
        yield (
            where,
            Function(name=name, description=described, parameters=_ONE_TEXT),
            Client(function.name, namespace, is_custom=True),
        )
    elif kind == "namespace" and namespace is None and isinstance(tool.get("tools"), list):
        if not isinstance(tool.get("name"), str):
            raise bad_field(f"{where}.name", "a text is required")
        for index, inner in enumerate(tool["tools"]):
            place = f"{where}.tools[{index}]"
            if not isinstance(inner, dict):
                raise bad_field(place, "must be an object")
            yield from _functions(inner, place, tool["name"], left_out)
    else:
        left_out.append(f"{where} ({short(kind)})")


_ONE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def _format(asked: object) -> str:
    """What a custom tool's text must be like, in words."""
    if not isinstance(asked, dict) or not isinstance(asked.get("definition"), str):
        return ""
    return f"The input follows this {short(asked.get('syntax', ''))} grammar:\n{asked['definition']}"


def _converted(tool: Fields, where: str) -> Function:
    try:
        return msgspec.convert(tool, Function)
    except msgspec.ValidationError as error:
        raise bad_field(where, str(error)) from None


def short(kind: object) -> str:
    """A kind of tool or item, fit for a header."""
    return re.sub(r"[^\w.:-]", "?", str(kind)[:40], flags=re.ASCII)
