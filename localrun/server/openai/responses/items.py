"""Input items of a response: what they are in the store, and what messages they make.

A conversation is a list of items in OpenAI's own form, a client's and ours alike, so that what was kept and what is
sent anew are read by the same code. An assistant's turn is several items there (reasoning, message, function calls) and
one message in a chat template.

Conversations that were begun elsewhere have kinds of items that no model here makes: calls of tools that OpenAI or a
client's own program runs, searches, pictures, what a service made of a longer conversation. A call that names its
result (`call_id`) is read as a call, and its result as one; of the rest, which only its maker can read, the answer says
that it was left out.

Pure. Does not: keep anything (`kept.py`), or render.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from localrun.errors import bad_field
from localrun.server.openai.bodies import text_of
from localrun.server.openai.responses.tools import name_for_model, short
from localrun.server.prompting.ask import Attachments, Message, arguments_of, assistant, called, role_of

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
    """A word about each item that the model is not given."""
    return [
        f"input[{index}] ({short(item['type'])})"
        for index, item in enumerate(items)
        if item["type"] not in _READ and not _is_call(item) and not _is_result(item)
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
            messages += turn.before_thinking()
            turn.thinking.append(_reasoning_text(item))
        elif kind == "message" and role_of(item["role"], where) == "assistant":
            messages += turn.before_content()
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

    def before_thinking(self) -> list[Message]:
        return self.end() if self.content or self.calls else []

    def before_content(self) -> list[Message]:
        return self.end() if self.calls else []

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
            raise bad_field(f"{where}.id", f"item {str(item.get('id'))[:80]!r} is not kept here; send the item itself")
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
        raise bad_field(f"{where}.type", "a text is required, such as message")
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
        raise bad_field(f"{where}.content", "must be a text or a list of parts")
    return {"id": new_id("msg"), "status": "completed"} | _known(item) | {"type": "message", "content": content}


def _check_texts(item: Item, where: str, *names: str) -> None:
    for name in names:
        if not isinstance(item.get(name), str):
            raise bad_field(f"{where}.{name}", "a text is required")


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
        raise bad_field(f"{where}.output", "must be a text or a list of parts")
    return {
        "role": "tool",
        "content": text_of(output, f"{where}.output", media),
        "tool_call_id": item["call_id"],
        "name": names.get(item["call_id"], ""),
    }
