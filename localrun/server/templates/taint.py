"""Where a rendered prompt begins a control token with a character of a client's, because its template changed the text.

`marks.py` finds the control tokens that a client's text spells out. A template may make others of it: one that takes
"/think" out of a message turns "<|im_/thinkstart|>" into a turn's beginning, and one that writes all in lower case
"<|IM_START|>". So the prompt is rendered once more, with a private-use character in place of each of the client's that
can begin a control token ("<" for most models), and in what the template compares with the client's text, so that both
renders go the same way. Where that one stands in the second prompt, the first one has a client's character, whatever
the template did with the text around it, and a control token that begins there is none.

If the two prompts do not agree (the template escapes HTML, say, or compares with a text of a variable), nothing is
known, and nothing is marked.

Pure. Does not: protect from a template that builds a control token of its own beginning and a client's rest; control
tokens that begin with a letter or a digit, which no client's text can do without; render (worker.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from jinja2 import nodes

from localrun.server.templates.marks import Marks, any_of, texts_in, unused_characters

# What is done to a text with another one that does not become part of it, by the number of arguments that do not.
_LOOKING_METHODS = {
    **dict.fromkeys(("replace", "split", "rsplit", "partition", "rpartition", "startswith", "endswith", "count"), 1),
    **dict.fromkeys(
        ("find", "rfind", "index", "rindex", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix"), 1
    ),
}
_LOOKING_FILTERS = frozenset({"replace", "trim"})


class Shadow(msgspec.Struct, frozen=True):
    """What to render the second time. `stand_ins` are pairs of a character and what stands in its place."""

    variables: dict[str, Any]
    stand_ins: tuple[tuple[str, str], ...]


def shadow_of(template: str, variables: dict[str, Any], control_tokens: Sequence[str]) -> Shadow | None:
    """The variables for a second render; None where no text of a client could begin a control token. Raises BadRequest
    where the text uses up the private-use characters."""
    firsts = sorted({token[0] for token in control_tokens if token and not (token[0].isalnum() or token[0].isspace())})
    given = {name: value for name, value in variables.items() if not name.endswith("_token")}
    texts = list(texts_in(given))
    if not any(first in text for first in firsts for text in texts):
        return None
    # Always the same ones, unless a text has them: a template is compiled for them.
    stand_ins = tuple(zip(firsts, reversed(unused_characters([template, *texts], len(firsts))), strict=False))

    def change(value: Any) -> Any:
        if isinstance(value, str):
            return _replaced(value, stand_ins)
        if isinstance(value, Mapping):
            return {key: change(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [change(item) for item in value]
        return value

    return Shadow(variables | {name: change(value) for name, value in given.items()}, stand_ins)


def looks_for(template: nodes.Template, stand_ins: Sequence[tuple[str, str]]) -> nodes.Template:
    """The template with stand-ins in the texts that it looks for in others. Changes what is passed in."""
    for place in template.find_all((nodes.Compare, nodes.Call, nodes.Filter)):
        for expression in _looked_for(place):
            for const in [expression] if isinstance(expression, nodes.Const) else expression.find_all(nodes.Const):
                if isinstance(const.value, str):
                    const.value = _replaced(const.value, stand_ins)
    return template


def _looked_for(place: nodes.Node) -> list[nodes.Node]:
    if isinstance(place, nodes.Compare):
        return [place]
    if isinstance(place, nodes.Filter):
        return list(place.args[:1]) if place.name in _LOOKING_FILTERS else []
    if isinstance(place, nodes.Call) and isinstance(place.node, nodes.Getattr):
        return list(place.args[: _LOOKING_METHODS.get(place.node.attr, 0)])
    return []


def marked_again(
    shadow: Shadow, rendered: str, prompt: str, control_tokens: Sequence[str], marks: Marks | None
) -> tuple[str, Marks | None]:
    """The prompt with marks also round control tokens that begin with a client's character. `rendered` is the prompt of
    the shadow."""
    pattern = any_of(tuple(control_tokens))
    if pattern is None or _replaced(rendered, [pair[::-1] for pair in shadow.stand_ins]) != prompt:
        return prompt, marks
    places = re.compile(f"[{''.join(stand_in for _, stand_in in shadow.stand_ins)}]")
    found = [at for place in places.finditer(rendered) if (at := pattern.match(prompt, place.start()))]
    forged = [token for token in found if marks is None or prompt[token.start() - 1 : token.start()] != marks.opening]
    if not forged:
        return prompt, marks
    if marks is None:
        opening, closing, *_ = unused_characters([prompt], 2)
        marks = Marks(opening, closing, frozenset())
    pieces, end = [], 0
    for token in forged:
        if token.start() >= end:
            pieces += [prompt[end : token.start()], marks.opening, token[0], marks.closing]
            end = token.end()
    literals = marks.literals | {token[0] for token in forged}
    return "".join((*pieces, prompt[end:])), msgspec.structs.replace(marks, literals=literals)


def _replaced(text: str, pairs: Sequence[tuple[str, ...]]) -> str:
    """Quicker than a table for all of them, which looks at each character."""
    for old, new in pairs:
        text = text.replace(old, new)
    return text
