"""How a template writes calls and thinking that no family known here does, found in what it renders.

It renders conversations that differ in one thing, such as a second call, and of words that stand nowhere else. What is
between the words is how its model writes: a format to read, to force, and to write the past in. What does not read
back what it was found in is given up.

Pure: `probe` asks for renders through what it is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localrun.server.parsing.parser import CallFormat, ParserPlan, ThinkingTags
from localrun.server.parsing.pieces import Reply
from localrun.server.parsing.written import NAME, Listed, Written, loose_reader, parts_of
from localrun.server.prompting.ask import Message, Tool, assistant, called
from localrun.server.prompting.profile import Profile
from localrun.wire import Delta, Finish, Phase

_QUESTION, _ANSWER, _THOUGHT = "uquestion", "canswer", "tthought"
_IDS = ("a1b2c3d4e", "f5g6h7i8j")
_TEXTS = {"kone": "vone", "ktwo": "vtwo", "kthree": "vthree"}
_NUMBERS = {"kone": 111, "ktwo": 222, "kthree": 333}
_SCHEMA = {
    "type": "object",
    "properties": {key: {"type": ["string", "integer"], "description": "a value"} for key in _TEXTS},
}
TOOLS = tuple(Tool(name, "a tool", _SCHEMA) for name in ("lookone", "looktwo"))
_WORD = re.compile("(" + "|".join((*_TEXTS, *_TEXTS.values(), _ANSWER, _THOUGHT, *(tool.name for tool in TOOLS))) + ")")
_USER: Message = {"role": "user", "content": _QUESTION}

# Renders a conversation with `TOOLS`; empty where the template refuses it. Raises TemplateOverrunError.
Render = Callable[[Sequence[Message]], Awaitable[str]]


@dataclass(frozen=True)
class Found:
    """What a template turned out to write: of None it writes nothing that could be told."""

    call_format: CallFormat | None = None
    tags: ThinkingTags | None = None
    answer_marks: frozenset[str] = frozenset()


def with_found(profile: Profile, found: Found) -> Profile:
    tags = profile.tags or found.tags
    return replace(
        profile,
        call_format=found.call_format,
        takes_tools=profile.takes_tools and found.call_format is not None,
        tags=tags,
        answer_marks=profile.answer_marks | found.answer_marks,
        marks_replies=profile.marks_replies or tags is not None,
    )


def _calls(n_calls: int, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    return [called(tool.name, arguments, call_id) for tool, call_id in zip(TOOLS[:n_calls], _IDS, strict=False)]


async def probe(render: Render, profile: Profile) -> Found:
    """What the template of `render` writes besides what `profile` says. Raises BadTemplate."""

    async def reply(message: Message) -> list[str]:
        """The parts of a message as the model would write it, from the role's header on."""
        rendered = await render([_USER, message])
        return _parts(rendered.rpartition(_QUESTION)[2].replace(_IDS[1], _IDS[0]))

    plain = await reply(assistant(_ANSWER))
    if _ANSWER not in plain:
        return Found(profile.call_format)
    one = await reply(assistant(_ANSWER, calls=_calls(1, _TEXTS))) if not profile.is_format_certain else []
    thinking = await reply(assistant(_ANSWER, thinking=_THOUGHT)) if not profile.are_tags_certain else []
    tags = _tags(thinking)
    begins = _same_beginning(plain[: plain.index(_ANSWER)], one)  # the header of the role
    end = plain[plain.index(_ANSWER) + 1 :]
    written_so = "".join(_behind(one, begins))
    calls = [(TOOLS[0].name, dict(_TEXTS))]
    is_known = profile.call_format is not None and (not one or reads_back(profile.call_format, written_so, calls))
    call_format = profile.call_format
    if not is_known:
        two = await reply(assistant(_ANSWER, calls=_calls(2, _TEXTS)))
        numbers = await reply(assistant(_ANSWER, calls=_calls(1, _NUMBERS)))
        written = _written(_behind(one, begins), _behind(two, begins), _behind(numbers, begins), end)
        call_format = (None if written is None else _checked(written, _behind(one, begins))) or call_format
    return Found(call_format, tags, _answer_marks(thinking, tags, end, one))


async def texts_round_thinking(render: Render, tags: ThinkingTags) -> tuple[str, str]:
    """What the template writes before thinking and between it and the answer, tags and white space; as most do where it
    leaves the thinking out. Raises TemplateOverrunError."""
    rendered = await render([_USER, assistant(_ANSWER, thinking=_THOUGHT)])
    before, _, behind = rendered.partition(_THOUGHT)
    before, behind = before.rpartition(tags.opening)[2], behind.partition(_ANSWER)[0]
    if before.strip() or not behind.strip().startswith(tags.closing) or _ANSWER not in rendered:
        return f"{tags.opening}\n", f"\n{tags.closing}\n\n"
    return tags.opening + before, behind


def _parts(text: str) -> list[str]:
    return [part for piece in _WORD.split(text) for part in ([piece] if _WORD.fullmatch(piece) else parts_of(piece))]


def _behind(parts: list[str], n_begins: int) -> list[str]:
    return parts[parts.index(_ANSWER) + 1 :] if _ANSWER in parts else parts[n_begins:]


def _written(one: list[str], two: list[str], numbers: list[str], end: list[str]) -> Written | None:
    """The fixed texts of calls. `end` is what follows a message without any."""
    first, second = (tool.name for tool in TOOLS)
    if first not in one:
        return None
    head, rest = _split(one, first)
    n_ends = _same_beginning(end, head)  # what ends the answer before the calls is not theirs
    head, end = head[n_ends:], end[n_ends:] or end
    arguments, behind_name, tail = _arguments(rest, _split(numbers, first)[1] if first in numbers else [])
    if behind_name is None:
        return None
    tail = tail[: len(tail) - _same_end(tail, end)] if end else tail
    after, before, separator, closing = tail, head, None, []
    if second in two:
        between = _split(two, second)[0]
        between = _arguments(_split(between, first)[1], [])[2]
        n_after = _same_beginning(between, tail)
        after, closing, between = between[:n_after], tail[n_after:], between[n_after:]
        n_before = _same_end(head, between)
        before, separator = head[len(head) - n_before :], between[: len(between) - n_before]
    else:
        before = head[_last_mark(head) :]
    opening = head[: len(head) - len(before)]
    texts = Written("", NAME + "".join(behind_name), "".join(after), closing="".join(closing), arguments=arguments)
    return _opened(texts, opening, before, separator)


def _opened(texts: Written, opening: list[str], before: list[str], separator: list[str] | None) -> Written | None:
    """The calls behind a mark that tells that one begins."""
    lead: list[str] = []
    if "".join(opening).strip():
        mark, lead = _marked(opening)
    else:  # every call has a mark of its own
        mark, before = _marked(before)
        separator = None if separator is None else [*separator, mark]
    if len(mark) < 3:
        return None
    return replace(
        texts,
        opening=mark,
        lead="".join(lead),
        before="".join(before) + texts.before,
        separator=None if separator is None else "".join(separator),
        is_sole=texts.arguments is None,
    )


def _marked(parts: list[str]) -> tuple[str, list[str]]:
    """The mark that a text begins with, up to where values may begin, and the rest."""
    start = next((at for at, part in enumerate(parts) if not part.isspace()), 0)
    end = start
    for at in range(start, len(parts)):
        is_last = all(part.isspace() or part == "{" for part in parts[at + 1 : at + 3])
        if parts[at] == "{" or (parts[at] == "[" and is_last) or (parts[at].isspace() and end > start):
            break
        if _is_tag(parts[at]):
            end = at + 1
    return "".join(parts[start:end]), parts[end:]


def _is_tag(part: str) -> bool:
    return part.startswith("<") and len(part) > 1


def _last_mark(parts: list[str]) -> int:
    """Where the text begins that stands round a name: behind the last tag or control token."""
    tags = [at for at, part in enumerate(parts) if _is_tag(part)]
    return tags[-1] + 1 if tags else 0


def _arguments(parts: list[str], numbers: list[str]) -> tuple[Listed | None, list[str] | None, list[str]]:
    """How the arguments stand in what follows a name: `(listed, what stands before them, what follows them)`. The
    second is None where there are none to be found."""
    places = [parts.index(word) for key, text in _TEXTS.items() for word in (key, text) if word in parts]
    if len(places) < 2 * len(_TEXTS) or places != sorted(places):
        return None, None, []
    if (brace := _brace_before(parts, places[0])) is not None:
        end = next((at for at, part in enumerate(parts) if at > places[-1] and part == "}"), len(parts) - 1)
        return None, parts[:brace], parts[end + 1 :]
    keys = dict.fromkeys(_TEXTS, NAME)
    head = parts[: places[0]]
    middle = parts[places[0] + 1 : places[1]]
    between = [keys.get(part, part) if part == "kone" else part for part in parts[places[1] + 1 : places[2]]]
    tail = ["".join(keys.get(part, part)) if part == "kthree" else part for part in parts[places[5] + 1 :]]
    n_after = _same_beginning(between, tail)
    after, rest = between[:n_after], between[n_after:]
    n_before = _same_end(head, rest)
    before, separator = head[len(head) - n_before :], rest[: len(rest) - n_before]
    listed = Listed("".join(before) + NAME + "".join(middle), "".join(after), "".join(separator), quote="")
    listed = _with_numbers(listed, middle, after, numbers)
    return listed, head[: len(head) - n_before], tail[n_after:]


def _brace_before(parts: list[str], at: int) -> int | None:
    """Where the JSON object begins of which the word at `at` is the first key."""
    if at < 2 or parts[at - 1] != '"':
        return None
    place = next((place for place in range(at - 2, -1, -1) if not parts[place].isspace()), 0)
    return place if parts[place] == "{" else None


def _with_numbers(listed: Listed, middle: list[str], after: list[str], numbers: list[str]) -> Listed:
    """The same with what differs where a value is no text: quotes, or a word for its kind."""
    if "kone" not in numbers or "111" not in numbers:
        return listed
    other = numbers[numbers.index("kone") + 1 : numbers.index("111")]
    behind = numbers[numbers.index("111") + 1 :]
    if other == middle:
        return listed
    quote = middle[len(other) :]
    if middle[: len(other)] == other and after[: len(quote)] == quote:
        quoted = "".join(quote)
        return Listed(
            listed.before.removesuffix(quoted),
            listed.after.removeprefix(quoted),
            listed.separator,
            quote=None if quoted == '"' else quoted,
        )
    if behind[: len(after)] != after:
        return listed
    return replace(
        listed, before=listed.before[: listed.before.index(NAME)] + NAME + "".join(other), before_text=listed.before
    )


def _checked(written: Written, reply: list[str]) -> CallFormat | None:
    """The format, if it reads what the template wrote, and what it would itself write."""
    try:
        read = loose_reader(written, call_id=_IDS[0])
    except ValueError:
        return None
    found = CallFormat("found", written, {written.opening: read})
    calls = [(tool.name, dict(_TEXTS)) for tool in TOOLS]
    both = calls if written.separator is not None else calls[:1]
    texts = (("".join(reply), calls[:1]), (written.calls(both), both))
    return found if all(reads_back(found, text, expected) for text, expected in texts) else None


def reads_back(call_format: CallFormat, text: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    """Whether `text` is read as these calls, whatever else stands there."""
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    made = Reply(ParserPlan(call_format=call_format).parser(schemas))
    made.gather(Delta(id=0, phase=Phase.DECODE, n_computed=0, n_output=0, text=text, tokens=[], finish=Finish.STOP))
    return [(call.name, json.loads(call.arguments_text or "{}")) for call in made.gathered.calls] == list(calls)


_WORDS = ("think", "reason", "thought", "analy")


def _is_of_thinking(part: str) -> bool:
    return any(word in part.lower() for word in _WORDS)


def _tags(thinking: list[str]) -> ThinkingTags | None:
    """The marks next to thinking, if they say that it is."""
    if _THOUGHT not in thinking:
        return None
    head, tail = _split(thinking, _THOUGHT)
    opening = next((at for at in range(len(head) - 1, -1, -1) if _is_of_thinking(head[at])), None)
    closing = next((at for at, part in enumerate(tail) if _is_of_thinking(part)), None)
    if opening is None or closing is None or len(head) - opening > 3:
        return None
    is_word = not head[opening].startswith("<")
    first, last = (opening - 1, closing + 1) if is_word else (opening, closing)
    return ThinkingTags("".join(head[first:]).strip(), "".join(tail[: last + 1]).strip())


def _answer_marks(thinking: list[str], tags: ThinkingTags | None, end: list[str], one: list[str]) -> frozenset[str]:
    """Marks round the answer that have words in them, which no reader should see."""
    if tags is None or _THOUGHT not in thinking or _ANSWER not in thinking:
        return frozenset()
    opening = "".join(thinking[thinking.index(_THOUGHT) + 1 : thinking.index(_ANSWER)]).strip()
    before_calls = _same_beginning(end, one[one.index(_ANSWER) + 1 :]) if _ANSWER in one else 0
    marks = (parts_of(opening.removeprefix(tags.closing)), end[:before_calls], end[before_calls:-1])
    return frozenset("".join(mark).strip() for mark in marks if any(part.isalpha() for part in mark))


def _split(parts: list[str], word: str) -> tuple[list[str], list[str]]:
    at = parts.index(word)
    return parts[:at], parts[at + 1 :]


def _same_beginning(one: Sequence[str], two: Sequence[str]) -> int:
    """How many parts two texts begin with alike; any two numbers are."""
    n_same = 0
    for left, right in zip(one, two, strict=False):
        if left != right and not (left.isdigit() and right.isdigit()):
            break
        n_same += 1
    return n_same


def _same_end(one: Sequence[str], two: Sequence[str]) -> int:
    return _same_beginning(one[::-1], two[::-1])
