"""Conversations as real templates want them.

Templates differ in what they take of a message: `fitted` changes what the text of the template says it needs, and
`milder` gives, one after the other, other ways to say the same to a template that refused. Tools for a model whose
template does not describe any become text in the system message: their calls are asked for in the model's own format
where its template knows one, else as Hermes models write them, which most models have seen.
Pure. Does not: render.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from localrun.models.storage.model import Model
from localrun.server.parsing import formats
from localrun.server.parsing.parser import CallFormat
from localrun.server.parsing.pieces import dump_json
from localrun.server.parsing.written import NAME, Written
from localrun.server.prompting.ask import Message, UnreadArguments, arguments_of
from localrun.server.prompting.profile import Profile

_KIMI_ID = re.compile(r"functions\.[\w.-]+:\d+")


def spelled_out(messages: Sequence[Message], profile: Profile, written: Written | None = None) -> Sequence[Message]:
    """Calls and results told apart by ids and names. For a template that does not know any, calls as text: as its own
    model writes them, or as `written` has it. Its results stay a tool's, where the template takes that role."""
    if not has_calls(messages):
        return messages
    result = with_names(messages)
    if profile.knows_calls:
        return result
    written = written or (profile.call_format or formats.HERMES).written
    takes_results = profile.call_format is not None and profile.takes_any_role
    return [_as_text(message, written, takes_results=takes_results) for message in result]


def fitted(messages: Sequence[Message], profile: Profile) -> list[Message]:
    """What the template can be expected to take, of messages that are spelled out."""
    result = messages
    if has_calls(messages):
        result = _one_call_each(result) if profile.takes_one_call else result
        if profile.call_ids is not None:
            result = _renamed(
                result, (_nine_characters if profile.call_ids == "nine characters" else _kimi_ids)(result)
            )
        if profile.calls_without_content:
            result = [part for message in result for part in _content_apart(message)]
    return [_finished(message, profile) for message in result]


def has_calls(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def milder(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Other ways to say the same, for a template that raised an exception: each is what some templates insist on.

    Results that belong to no call are the user's words in all of them. In turn: one system message, at the beginning;
    no system messages; each with roles that alternate as well; one call in each message. What the system said first
    keeps its rank as long as it can, and its place: what is cached of the conversation begins with it.
    """
    seen = [list(messages)]
    messages = _results_of_calls(messages)
    one, none = one_system(messages), without_system(messages)
    ways = (messages, one, alternating(one), none, alternating(messages), alternating(none), _one_call_each(messages))
    for variant in ways:
        if variant not in seen:
            seen.append(variant)
            yield variant


def _results_of_calls(messages: Sequence[Message]) -> list[Message]:
    """With results that belong to no call as user messages."""
    return [
        {"role": "user", "content": message["content"]} if is_stray else dict(message)
        for message, is_stray in _with_strays(messages)
    ]


def _with_strays(messages: Sequence[Message]) -> Iterator[tuple[Message, bool]]:
    """Each message, and whether it is a result that belongs to no call."""
    known: set[str] = set()
    for message in messages:
        known |= {call["id"] for call in message.get("tool_calls") or ()}
        yield message, message["role"] == "tool" and message.get("tool_call_id") not in known


def with_other_arguments(messages: Sequence[Message]) -> list[Message] | None:
    """The messages with the arguments of calls as text instead of objects, or the other way; None without any call."""
    if not any(message.get("tool_calls") for message in messages):
        return None
    return [_with_calls(message, _turned) for message in messages]


def with_names(messages: Sequence[Message]) -> list[Message]:
    """Every call with an id, every result with the id and the name of its call: by id, else by order."""
    result: list[Message] = []
    waiting = _Waiting()
    n_calls = 0
    for message in messages:
        made = dict(message)
        if made.get("tool_calls"):
            calls = []
            for call in made["tool_calls"]:
                function = dict(call.get("function") or {})
                function.setdefault("arguments", {})
                call_id = call.get("id") or f"call_{n_calls}"
                n_calls += 1
                calls.append({"id": call_id, "type": "function", "function": function})
                waiting.add(call_id, str(function.get("name", "")))
            made["tool_calls"] = calls
        elif made.get("role") == "tool":
            call_id, name = made.get("tool_call_id") or "", made.get("name") or ""
            found = waiting.take(call_id, name)
            if found is not None:
                call_id, name = call_id or found[0], name or found[1]
            made["tool_call_id"], made["name"] = call_id, name
        result.append(made)
    return result


class _Waiting:
    """Calls without results, in order: found by their id, by their name, or as the first of all. What was taken by one
    of these stays in the other lines until it is their first."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, str]] = []
        self._lines: dict[tuple[str, str], deque[int]] = {}
        self._taken: set[int] = set()

    def add(self, call_id: str, name: str) -> None:
        number = len(self._calls)
        self._calls.append((call_id, name))
        for line in {("id", call_id), ("name", name), _ALL}:
            self._lines.setdefault(line, deque()).append(number)

    def take(self, call_id: str, name: str) -> tuple[str, str] | None:
        """The id and the name of the call that a result belongs to."""
        for key in (("id", call_id), ("name", name) if name else _ALL):
            line = self._lines.get(key, ())
            while line:
                number = line.popleft()
                if number not in self._taken:
                    self._taken.add(number)
                    return self._calls[number]
        return None


_ALL = ("", "")


def one_system(messages: Sequence[Message]) -> list[Message]:
    """System messages at the beginning as one, later ones as user messages in their place."""
    n_first = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    head = [_text(message) for message in messages[:n_first]]
    first: list[Message] = [{"role": "system", "content": "\n\n".join(filter(None, head))}] if head else []
    rest = [{**message, "role": "user"} if message["role"] == "system" else message for message in messages[n_first:]]
    return [*first, *rest]


def without_system(messages: Sequence[Message]) -> list[Message]:
    """System texts at the beginning of the next user message; at the end of the last one where none follows."""
    result: list[Message] = []
    pending: list[str] = []
    for message in messages:
        if message["role"] == "system":
            pending.append(_text(message))
        elif message["role"] == "user" and pending:
            result.append({**message, "content": "\n\n".join((*pending, _text(message)))})
            pending = []
        else:
            result.append(dict(message))
    if pending:
        result.append({"role": "user", "content": "\n\n".join(pending)})
    return result


def alternating(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message; a conversation that an assistant begins gets a user's word before it, and
    a user who speaks right behind a tool's result an assistant's."""
    result: list[Message] = []
    texts: list[str] = []  # of the last message there, if several came together
    for message in messages:
        last = result[-1] if result else None
        is_plain = not message.get("tool_calls") and message["role"] in ("user", "assistant", "system")
        if last is not None and is_plain and last["role"] == message["role"] and not last.get("tool_calls"):
            texts = texts or [_text(last)]
            texts.append(_text(message))
            result[-1] = last | message
        else:
            _put_together(result, texts)
            texts = []
            if last is not None and last["role"] == "tool" and message["role"] == "user":
                result.append({"role": "assistant", "content": "."})
            result.append(dict(message))
    _put_together(result, texts)
    first = next((index for index, message in enumerate(result) if message["role"] != "system"), None)
    if first is not None and result[first]["role"] == "assistant":
        result.insert(first, {"role": "user", "content": "."})
    return result


def _put_together(result: list[Message], texts: list[str]) -> None:
    if texts:
        result[-1]["content"] = "\n\n".join(filter(None, texts))


_WRITTEN_ROLES = frozenset({"user", "assistant", "tool"})


def as_user(messages: Sequence[Message], texts: frozenset[str]) -> list[Message]:
    """The messages of these texts as user messages, where they stand: for a template that leaves their role out."""
    return [
        {**message, "role": "user"}
        if (is_stray or message["role"] not in _WRITTEN_ROLES) and _text(message) in texts else dict(message)
        for message, is_stray in _with_strays(messages)
    ]  # fmt: skip


def texts_to_find(messages: Sequence[Message]) -> list[str]:
    """Texts that not every template writes: the system's, results of no call, and those of roles that few know."""
    return [
        _text(message)
        for message, is_stray in _with_strays(messages)
        if is_stray or message["role"] not in _WRITTEN_ROLES
    ]


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def _finished(message: Message, profile: Profile) -> Message:
    made = dict(message)
    text = _text(message)
    made["content"] = [{"type": "text", "text": text}] if profile.takes_parts else text
    thinking = made.get("thinking")
    if thinking and profile.takes_thinking_parts:
        made["content"] = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": text}]
    elif thinking:
        made["reasoning_content"] = thinking
    elif "thinking" in made:
        del made["thinking"]
    if profile.calls_without_content and made.get("tool_calls"):
        made["content"] = None
    return _with_calls(made, _with_text_arguments) if profile.takes_text_arguments else made


def _with_calls(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    """The message with each of its calls changed."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [change(call) for call in calls]} if calls else dict(message)


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"])}}


def _json(arguments: Any) -> str:
    if isinstance(arguments, UnreadArguments):
        return arguments.text
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _turned(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    other = arguments_of(arguments) if isinstance(arguments, str) else _json(arguments)
    return {**call, "function": {**call["function"], "arguments": other}}


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """A message for every call, each followed by its result; content besides thinking gets a message of its own."""
    result: list[Message] = []
    answers = {message.get("tool_call_id"): message for message in messages if message["role"] == "tool"}
    moved: set[int] = set()
    for message in messages:
        calls = message.get("tool_calls") or []
        if id(message) in moved:
            continue
        if not calls or (len(calls) == 1 and not (message.get("thinking") and _text(message))):
            result.append(dict(message))
            continue
        if message.get("thinking") and _text(message):
            result.append({"role": "assistant", "content": _text(message)})
            message = {**message, "content": ""}
        for index, call in enumerate(calls):
            kept = message if index == 0 else {"role": "assistant", "content": ""}
            result.append({**kept, "tool_calls": [call]})
            answer = answers.get(call.get("id"))
            if answer is not None and len(calls) > 1:
                result.append(dict(answer))
                moved.add(id(answer))
    return result


def _content_apart(message: Message) -> list[Message]:
    """A message with calls as two, the content in the first: R1's template shows either the one or the other."""
    text = _text(message)
    if not message.get("tool_calls") or not text:
        return [message]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return [rest, {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}]


def _as_text(message: Message, written: Written, *, takes_results: bool) -> Message:
    if message["role"] == "tool":
        if takes_results:
            return {"role": "tool", "content": _text(message)}
        return {"role": "user", "content": f"<tool_response>\n{_text(message)}\n</tool_response>"}
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    if not functions:
        return message
    calls = written.calls([(str(function.get("name", "")), function["arguments"]) for function in functions])
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, (_text(message), calls)))}


def _renamed(messages: Sequence[Message], names: dict[str, str]) -> list[Message]:
    result = []
    for message in messages:
        made = _with_calls(message, lambda call: {**call, "id": names.get(call["id"], call["id"])})
        if made.get("role") == "tool":
            made["tool_call_id"] = names.get(made["tool_call_id"], made["tool_call_id"])
        result.append(made)
    return result


def _call_ids(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            yield call["id"], str(call["function"].get("name", ""))
        if message.get("role") == "tool":
            yield message["tool_call_id"], str(message.get("name", ""))


def _nine_characters(messages: Sequence[Message]) -> dict[str, str]:
    """Mistral's templates refuse ids that are not nine letters and digits."""
    return {
        call_id: hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]
        for call_id, _ in _call_ids(messages)
        if not (len(call_id) == 9 and call_id.isalnum())
    }


def _kimi_ids(messages: Sequence[Message]) -> dict[str, str]:
    """Kimi's ids say which function was called and count the calls of a conversation."""
    names: dict[str, str] = {}
    for call_id, name in _call_ids(messages):
        if call_id not in names:
            names[call_id] = call_id if _KIMI_ID.fullmatch(call_id) else f"functions.{name}:{len(names)}"
    return names


# A small model goes on and invents the tool's answer; the client has the real one.
STOP_AT_RESULT = ("<tool_response>",)


def with_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], call_format: CallFormat
) -> list[Message]:
    """The messages with the tools described at the end of the first system message, or in a new one before all."""
    as_json = ", with its arguments as JSON" if call_format.written.arguments is None else ""
    text = "\n".join(
        (
            "# Tools",
            "",
            "These functions may be called to help the user, one JSON description on each line:",
            "<tools>",
            *(dump_json(tool) for tool in tools),
            "</tools>",
            "",
            f"To call a function, write nothing but the call{as_json}:",
            example(call_format.written),
            "The result comes in the next message. When no function is needed, answer the user directly.",
        )
    )
    first = messages[0] if messages else None
    if first is not None and first["role"] == "system":
        joined = "\n\n".join(part for part in (first.get("content") or "", text) if part)
        return [{**first, "content": joined}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def described(tool: Mapping[str, Any], *, has_types: bool = True) -> dict[str, Any]:
    """The tool with a description on every parameter, empty if need be, and with a type unless it `has_types` only
    where it says them: some templates fail without, and one of these with a type that it does not know, as "null"."""
    function = dict(tool["function"])
    function["parameters"] = _described(function["parameters"], has_types=has_types)
    return {**tool, "function": function}


def _described(schema: Any, depth: int = 0, *, has_types: bool) -> Any:
    if not isinstance(schema, Mapping) or depth > 16:
        return schema
    missing = {"description": ""} | ({"type": _type_of(schema)} if has_types else {})
    made = missing | dict(schema) if depth else dict(schema)
    if isinstance(made.get("type"), list):
        types = [one for one in made["type"] if one != "null"]
        made["type"] = types[0] if len(types) == 1 else types
    properties = made.get("properties")
    if isinstance(properties, Mapping):
        made["properties"] = {
            name: _described(value, depth + 1, has_types=has_types) for name, value in properties.items()
        }
    return made


def _type_of(schema: Mapping[str, Any]) -> str:
    """A word for what a schema without a type lets through."""
    ways = schema.get("anyOf") or schema.get("oneOf")
    ways = ways if isinstance(ways, list) else []
    types = [way.get("type") for way in ways if isinstance(way, Mapping) and way.get("type") != "null"]
    return next((one for one in types if isinstance(one, str)), "any")


def example(written: Written) -> str:
    """A call as it should be written, with placeholders."""
    arguments = "{arguments}"
    if written.arguments is not None:
        before, after = written.arguments.texts_round(is_text=True)
        arguments = f"{before.replace(NAME, 'argument name')}value{after}"
    before = written.before.replace(NAME, "function name")
    return f"{written.opening}{written.lead}{before}{arguments}{written.after}{written.closing}"


def begun(model: Model, messages: Sequence[Message]) -> Sequence[Message]:
    """The conversation with the model's own messages before it. The model's system prompt counts where the
    conversation does not begin with one, as with Ollama."""
    if not model.system and not model.messages:
        return messages
    # One that the client brings stays the first message: templates refuse it anywhere else.
    head = list(messages[:1]) if messages and messages[0]["role"] == "system" else []
    rest = messages[len(head) :]
    if not head and model.system:
        head = [{"role": "system", "content": model.system}]
    return [*head, *({"role": message.role, "content": message.content} for message in model.messages), *rest]
