"""Grammars that an answer must match: from what a client sent (JSON, a JSON schema, GBNF), or of tool calls, which are
literal text around JSON values.

What is refused here names the field, the keyword and its path, before the engine sees anything. The engine compiles
the rest, and refuses what it cannot in the same way.

Pure. Does not: compile a grammar, know a model's format (the reply parsers do), or parse an answer.
See README.md for the features of JSON schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localrun.errors import BadRequest
from localrun.server import notices
from localrun.server.structured.schema import schema_text
from localrun.wire import Grammar, GrammarKind

# Beyond this a text is no grammar that somebody wrote for an answer.
MAX_GRAMMAR_BYTES = 256 * 1024


def json_object() -> Grammar:
    return json_schema({"type": "object"}, field="format")


def json_schema(schema: Any, *, field: str, strict: bool | None = None) -> Grammar:
    """A JSON value that `schema` (parsed JSON) describes. What cannot be enforced is noted (`notices`), or refused if
    `strict`; None leaves that to the setting. Raises BadRequest naming the path below `field`."""
    strict = notices.STRICT_SCHEMAS.get() if strict is None else strict
    return _written(GrammarKind.JSON_SCHEMA, schema_text(schema, field=field, strict=strict), field)


def gbnf(text: str) -> Grammar:
    """A grammar in llama.cpp's notation. Its rules are checked when the engine compiles it. Raises BadRequest."""
    return _written(GrammarKind.GBNF, text, "grammar")


def _written(kind: GrammarKind, text: str, field: str) -> Grammar:
    if not text.strip():
        raise BadRequest(f"{field} is empty; leave it out for a free answer", field=field)
    size_bytes = len(text.encode("utf-8", "replace"))
    if size_bytes > MAX_GRAMMAR_BYTES:
        raise BadRequest(f"{field} has {size_bytes} bytes; the limit is {MAX_GRAMMAR_BYTES}", field=field)
    return Grammar(kind, text)


# Names of arguments that no schema lists.
_NAME = r"/[A-Za-z_][A-Za-z0-9_.\-]{0,63}/"


@dataclass(frozen=True)
class ArgumentShape:
    """One argument: literal text, its value, literal text. The value is JSON of `schema`; where that is None it is one
    of `texts`, or, without any, whatever text comes before the first `until`, which is no part of `after`. If nothing
    that must come is left, an `until` may be in the text: the value is over at the first that one of `ends` follows, or
    `another`, which begins an argument; in these is no control token. In a literal, and in `until`, the name of a
    control token stands for that token; `control` is the first one in `until`.

    A `before` of two texts has a name of the model's own between them. `path` is where in the tool's schema it is."""

    before: tuple[str, ...]
    after: str
    schema: Any = None
    texts: tuple[str, ...] = ()
    until: str = ""
    ends: tuple[str, ...] = ()
    another: str = ""
    control: str = ""
    is_required: bool = False
    path: str = ""


@dataclass(frozen=True)
class CallShape:
    """One callable tool: literal text, a JSON value of `schema`, literal text. With `listed` these take the place of
    the value, in their order, `separator` between them; the last may be repeated if its name is the model's own. In a
    literal the name of a control token stands for that token. `field` is where the schema came from, and `name` the
    tool's, for messages. Nothing of the schema is left out if it `is_strict`."""

    before: str
    schema: Any
    after: str
    field: str = "tools"
    name: str = ""
    listed: tuple[ArgumentShape, ...] | None = None
    separator: str = ""
    is_strict: bool = False

    @property
    def has_gaps(self) -> bool:
        """Whether other white space may stand before an argument, and behind the last, and the end of the last call be
        forgotten. Else a model that wrote so would be held to the text before it, though it takes that to be over."""
        return any(argument.ends for argument in self.listed or ())


def calls(
    shapes: Sequence[CallShape],
    *,
    is_one: bool,
    separator: str = "",
    before: str = "",
    after: str = "",
    triggers: Sequence[str] = (),
) -> Grammar:
    """`before`, then a call of any of `shapes`, or unless it `is_one` several with `separator` between them, then
    `after`. With `triggers` the answer is free until one of them was produced and must match from there on. The request
    must then not fail for the schema of a call that may never come: the engine takes any object where a rule named
    `lenient_...` does not compile.

    Raises BadRequest for a schema that is refused and for schemas that are too much together.
    """
    literals = _Literals()
    first = literals.rule(before)
    kind = "lenient" if triggers else "arguments"
    rules: list[str] = []
    size_bytes = 0
    for index, shape in enumerate(shapes):
        if shape.listed is None:
            schema = schema_text(shape.schema, field=shape.field, strict=shape.is_strict)
            made = [f"// {json.dumps(shape.name)}", f"{kind}_{index}: %json {schema}"]
        else:
            made = _listed(shape, f"{kind}_{index}", literals, in_any_order=bool(triggers) and not shape.separator)
        rules += made
        size_bytes += sum(map(len, made)) + len(shape.before) + len(shape.after)
        check_size(size_bytes)
        rules.append(f"open_{index}: {literals.rule(shape.before)} {kind}_{index}")
        rules.append(f"call_{index}: open_{index} {literals.rule(shape.after, has_gap=shape.has_gaps)}")
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(shapes))))
    last = f"call {literals.rule(after)}"
    if after and (may_be_open := [f"open_{index}" for index, shape in enumerate(shapes) if shape.has_gaps]):
        last = f"({last} | ({' | '.join(may_be_open)}) {literals.rule(after, has_gap=True)})"
    more = "" if is_one else f"(call {literals.rule(separator)})*"
    rules.append(f"start: {first} {more} {last}")
    return Grammar(GrammarKind.LARK, "\n".join((*rules, *literals.rules)) + "\n", tuple(triggers))


def _listed(shape: CallShape, name: str, literals: _Literals, *, in_any_order: bool) -> list[str]:
    """The rules for listed arguments, of which the first is called `name`: those that are required come, others may,
    and `in_any_order` they may come anywhere, also twice: a model that began with the second can still write the first.

    `NAME_first_K` is what may follow where none of them came before the argument K, `NAME_next_K` where one has."""
    assert shape.listed is not None
    rules = []
    separator = literals.rule(shape.separator)
    n_listed = len(shape.listed)
    may_come = [f"{name}_is_{at}" for at, argument in enumerate(shape.listed) if not argument.is_required]
    must_come = [f"{name}_is_{at}" for at, argument in enumerate(shape.listed) if argument.is_required]
    last = max((at for at, argument in enumerate(shape.listed) if argument.is_required), default=None)
    for at, argument in enumerate(shape.listed):
        again = at if len(argument.before) > 1 else at + 1
        may_go_on = bool(may_come) if in_any_order else again < n_listed
        # Before the last that must come, a model that ends the call too early is held to what is missing; if that could
        # be more of the text, the model would never get out of it.
        behind = argument.ends if last in (at, None) else ()
        if may_go_on:
            behind = (*behind, argument.another) if behind and argument.another else ()
        value, made = _value(shape, argument, f"{name}{at:04}", literals, behind)
        rules += made
        first_text, *more_text = argument.before
        opening = f" {_NAME} ".join((literals.rule(first_text, has_gap=shape.has_gaps), *map(literals.rule, more_text)))
        rules.append(f"{name}_is_{at}: {opening} {value} {literals.rule(argument.after)}")
        if in_any_order:
            continue
        first = [f"{name}_is_{at} {name}_next_{again}"]
        following = [f"{separator} {first[0]}"]
        if not argument.is_required:
            first.append(f"{name}_first_{at + 1}")
            following.append(f"{name}_next_{at + 1}")
        rules += (f"{name}_first_{at}: {' | '.join(first)}", f"{name}_next_{at}: {' | '.join(following)}")
    if in_any_order:
        others = f"({' | '.join(may_come)})*" if may_come else '""'
        rules.append(f"{name}_others: {others}")
        return [*rules, f"{name}: {f' {name}_others '.join(('', *must_come, ''))}"]
    return [*rules, f'{name}_first_{n_listed}: ""', f'{name}_next_{n_listed}: ""', f"{name}: {name}_first_0"]


def _value(
    shape: CallShape, argument: ArgumentShape, name: str, literals: _Literals, behind: Sequence[str]
) -> tuple[str, list[str]]:
    """What stands for an argument's value in a rule, and the rules that it needs. A text goes on behind what ends it,
    unless one of `behind` follows; without these never."""
    if argument.schema is not None:
        schema = schema_text(argument.schema, field=f"{shape.field}.{argument.path}")
        comment = f"// {json.dumps(shape.name)} {json.dumps(f'parameters.{argument.path}')}"
        return name, [comment, f"{name}: %json {schema}"]
    if argument.texts:
        texts = (json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False) for text in argument.texts)
        return f"({' | '.join(texts)})", []
    head, control, _ = argument.until.partition(argument.control) if argument.control else (argument.until, "", "")
    end = _escaped(head)
    if control:  # the text goes on as far as it can, and a control token is none
        return f"{name} {literals.rule(argument.until[len(head) :])}", [f"{name}: /(?s:.*){end}/"]
    rules = [f"{name}[lazy]: /(?s:.*){end}/"]
    if not behind:
        return name, rules
    follows = "|".join(map(_escaped, behind))
    return f"{name} {name}_more*", [*rules, f"{name}_more[lazy]: /(?s:.*){end}/ & ~/\\s*({follows})(?s:.*)/"]


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def check_size(size_bytes: int) -> None:
    """Raises BadRequest when the tools of a request make more of a grammar than that."""
    if size_bytes > MAX_GRAMMAR_BYTES:
        raise BadRequest.of(
            "tools",
            f"their schemas make a grammar of more than {MAX_GRAMMAR_BYTES} bytes; send fewer tools, or simpler "
            f"schemas",
        )


class _Literals:
    """Rules for literal texts. The engine looks for control tokens in rules named so."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    def rule(self, text: str, *, has_gap: bool = False) -> str:
        """The name of the rule for `text`; nothing for no text. If it `has_gap`, other white space may stand before
        it, and no control token is in it."""
        if not text:
            return ""
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
        if has_gap:
            name, made = f"behind_gap_{len(self.rules)}", rf"/\s{{0,20}}{_escaped(text.lstrip())}/"
        else:
            name, made = f"literal_{len(self.rules)}", json.dumps(text, ensure_ascii=False)
        self.rules.append(f"{name}: {made}")
        return name
