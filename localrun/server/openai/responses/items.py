"""What a response is asked: input items, what they are in the store and what messages they make; and tools, what the
model is given of them, and as what its calls come back.

A conversation is a list of items in OpenAI's own form, a client's and ours alike, so that what was kept and what is
sent anew are read by the same code. An assistant's turn is several items there (reasoning, message, function calls) and
one message in a chat template.

Conversations that were begun elsewhere have kinds of items that no model here makes: calls of tools that OpenAI or a
client's own program runs, searches, pictures, what a service made of a longer conversation. A call that names its
result (`call_id`) is read as a call, and its result as one; the rest only its maker can read.

A local model calls functions. A `namespace` is a group of functions: each is offered under both names, and its calls
come back with `namespace` and `name` apart. A `custom` tool takes one text: it is a function with one argument, and its
calls come back as `custom_tool_call`. What OpenAI or a client's own program runs, and kinds of tools and items that
nobody has heard of yet, are left out, and the answer says so.

Pure. Does not: keep anything (`kept.py`), or render.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from localrun.errors import BadRequest
from localrun.server.openai.bodies import text_of
from localrun.server.prompting.ask import (
    AllowedTools,
    Attachments,
    Choice,
    Function,
    Message,
    NamedChoice,
    Tool,
    arguments_of,
    assistant,
    called,
    checked_tools,
    role_of,
)

Item = dict[str, Any]


def new_id(prefix: str) -> str:
    """An id that no item or response of this machine had before."""
    return f"{prefix}_{uuid.uuid4().hex}"


def items_of(sent: str | Sequence[Item], find: Callable[[str], Item | None]) -> list[Item]:
    """The items of `input`, each with an id; references are replaced by what `find` knows. Raises BadRequest naming the
    item."""
    if isinstance(sent, str) or not sent:  # agents ask with an empty list whether anybody answers
        sent = [{"type": "message", "role": "user", "content": sent or ""}]
    return [_item(item, f"input[{index}]", find) for index, item in enumerate(sent)]


def left_out(items: Sequence[Item]) -> list[str]:
    """A word about each item that the model is given nothing of."""
    return [
        f"input[{index}] ({short(item['type'])})"
        for index, item in enumerate(items)
        if item["type"] not in _READ and not _is_call(item) and not _is_result(item) and not tools_in([item])
    ]


def tools_in(items: Sequence[Item]) -> list[Item]:
    """Tools that come as items: what a search for tools found, or what is offered from there on."""
    found = (item["tools"] for item in items if item["type"] not in _READ and isinstance(item.get("tools"), list))
    return [tool for tools in found for tool in tools if isinstance(tool, dict)]


_READ = frozenset({"message", "function_call", "function_call_output", "reasoning"})
# Their results are texts or parts, as a tool's; those of others are whatever their maker calls a result.
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output"})


def _is_call(item: Item) -> bool:
    return item["type"].endswith("_call") and isinstance(item.get("call_id"), str)


def _is_result(item: Item) -> bool:
    return item["type"].endswith("_output") and isinstance(item.get("call_id"), str)


def messages_of(instructions: str | None, items: Sequence[Item], media: Attachments | None = None) -> list[Message]:
    """What the template is given; pictures and sound go into `media`, where there is one. Raises BadRequest naming the
    item."""
    messages: list[Message] = [] if not instructions else [{"role": "system", "content": instructions}]
    turn = _Turn()
    names: dict[str, str] = {}
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item["type"]
        if _is_call(item):
            names[item["call_id"]] = name = _name_of_call(item)
            turn.calls.append(called(name, _arguments_of_call(item), item["call_id"]))
        elif kind == "reasoning":
            messages += turn.end() if turn.content or turn.calls else ()
            turn.thinking.append(_reasoning_text(item))
        elif kind == "message" and role_of(item["role"], where) == "assistant":
            messages += turn.end() if turn.calls else ()
            turn.content.append(text_of(item["content"], f"{where}.content", media))
        elif kind == "message" or _is_result(item):
            messages += turn.end()
            messages.append(_outside(item, where, names, media))
    return [*messages, *turn.end()]


class _Turn:
    """An assistant's items so far, until one comes that begins another message."""

    def __init__(self) -> None:
        self.thinking: list[str] = []
        self.content: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def end(self) -> list[Message]:
        thinking, content, calls = self.thinking, self.content, self.calls
        self.thinking, self.content, self.calls = [], [], []
        if not (thinking or content or calls):
            return []
        return [assistant("\n".join(content), thinking="\n".join(thinking) if any(thinking) else None, calls=calls)]


def _name_of_call(item: Item) -> str:
    """The model's name of what was called; without any, what kind of call it is: `local_shell`."""
    name = item.get("name")
    name = name if isinstance(name, str) and name else item["type"].removesuffix("_call")
    return name_for_model(name, item.get("namespace"))


def _arguments_of_call(item: Item) -> dict[str, Any]:
    if isinstance(item.get("arguments"), str):
        return arguments_of(item["arguments"])
    if isinstance(item.get("input"), str):
        return {"input": item["input"]}
    for name in ("arguments", "action", "operation"):
        if isinstance(item.get(name), dict):
            return dict(item[name])
    return {}


def _item(item: Item, where: str, find: Callable[[str], Item | None]) -> Item:
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "item_reference":
        found = find(str(item.get("id", "")))
        if found is None:
            raise BadRequest.of(
                f"{where}.id", f"item {str(item.get('id'))[:80]!r} is not kept here; send the item itself"
            )
        return found
    if kind == "message":
        role_of(str(item.get("role") or ""), where)
        return _message(item, where)
    if kind == "function_call":
        _check_texts(item, where, "call_id", "name", "arguments")
        return {"id": new_id("fc"), "status": "completed"} | _known(item)
    if kind == "function_call_output":
        _check_texts(item, where, "call_id")
        return {"id": new_id("fco"), "status": "completed"} | _known(item)
    if kind == "reasoning":
        return {"id": new_id("rs"), "summary": []} | _known(item)
    if not isinstance(kind, str):
        raise BadRequest.of(f"{where}.type", "a text is required, such as message")
    return {"id": new_id("item")} | item


# Of the items that a model here reads or writes. What else they have is not kept.
_FIELDS = frozenset(
    {
        *("type", "id", "status", "role", "content", "phase", "call_id", "name", "namespace", "arguments", "output"),
        *("summary", "encrypted_content"),
    }
)


def _known(item: Item) -> Item:
    return {name: value for name, value in item.items() if name in _FIELDS}


def _message(item: Item, where: str) -> Item:
    content = item.get("content")
    if content is None:
        content = []
    if isinstance(content, str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        part: dict[str, Any] = {"type": kind, "text": content}
        content = [part | {"annotations": []} if kind == "output_text" else part]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise BadRequest.of(f"{where}.content", "must be a text or a list of parts")
    return {"id": new_id("msg"), "status": "completed"} | _known(item) | {"type": "message", "content": content}


def _check_texts(item: Item, where: str, *names: str) -> None:
    for name in names:
        if not isinstance(item.get(name), str):
            raise BadRequest.of(f"{where}.{name}", "a text is required")


def _reasoning_text(item: Item) -> str:
    """The thinking itself, or where only that came along, its summary."""
    for parts in (item.get("content"), item.get("summary")):
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if texts:
            return "\n".join(text for text in texts if isinstance(text, str))
    return ""


def _outside(item: Item, where: str, names: dict[str, str], media: Attachments | None) -> Message:
    """A message that is not the assistant's."""
    if item["type"] == "message":
        return {"role": role_of(item["role"], where), "content": text_of(item["content"], f"{where}.content", media)}
    output = "" if item.get("output", "") is None else item.get("output")
    if item["type"] not in _RESULTS and not isinstance(output, str):
        output = json.dumps(item.get("output", item.get("tools")), ensure_ascii=False)
    if not isinstance(output, str | list) or (
        isinstance(output, list) and not all(isinstance(p, dict) for p in output)
    ):
        raise BadRequest.of(f"{where}.output", "must be a text or a list of parts")
    return {
        "role": "tool",
        "content": text_of(output, f"{where}.output", media),
        "tool_call_id": item["call_id"],
        "name": names.get(item["call_id"], ""),
    }


class Client(NamedTuple):
    """What a tool is to the client: its own name, the namespace that it is in, and whether it takes one text."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    def call(self, item_id: str, call_id: str) -> Item:
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
    written: list[Item]
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


def _named(tool: Item) -> Item:
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


def offered(tools: Sequence[Item]) -> Offered:
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
    tool: Item, where: str, namespace: str | None, left_out: list[str]
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
            raise BadRequest.of(f"{where}.name", "a text is required")
        for index, inner in enumerate(tool["tools"]):
            place = f"{where}.tools[{index}]"
            if not isinstance(inner, dict):
                raise BadRequest.of(place, "must be an object")
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


def _converted(tool: Item, where: str) -> Function:
    try:
        return msgspec.convert(tool, Function)
    except msgspec.ValidationError as error:
        raise BadRequest.of(where, str(error)) from None


def short(kind: object) -> str:
    """A kind of tool or item, fit for a header."""
    return re.sub(r"[^\w.:-]", "?", str(kind)[:40], flags=re.ASCII)
