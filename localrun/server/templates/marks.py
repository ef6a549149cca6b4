"""Which parts of a rendered prompt a client wrote where it spelled a control token.

A template mixes its own control tokens with the text of the messages, and after rendering the two look alike. So every
control token found in the client's text is put between two marks before rendering, and the result is split on them:
what stood between the marks becomes an untrusted segment, in which the engine tokenizes it as plain text.

Marks are two different private-use characters, drawn afresh for each render from those that occur nowhere in the
template or the client's text, so no client can forge, guess or clash with them. Text without control tokens, the usual
case, is never touched. A template may cut or encode the marked text: whatever is left of the marks is removed, and a
control token whose mark on one side was cut off stays untrusted.

A template may also make control tokens out of harmless pieces of a client's text: one that takes "/think" out of a
message turns "<|im_/thinkstart|>" into a turn's beginning, and one that writes all in lower case "<|IM_START|>". So the
prompt is rendered once more, with a private-use character in place of each of the client's that can begin a control
token ("<" for most models), and in what the template compares with the client's text, so that both renders go the same
way. Where that one stands in the second prompt, the first one has a client's character, whatever the template did with
the text around it, and a control token that begins there is none. If the two prompts do not agree (the template escapes
HTML, say, or compares with a text of a variable), nothing is known, and nothing is marked.

Pure. Does not: protect from a template that builds a control token of its own beginning and a client's rest; control
tokens that begin with a letter or a digit, which no client's text can do without; render (worker.py).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import msgspec

from localrun.errors import BadRequest
from localrun.wire import Segment

# Characters and what follows them; "" where a text ends.
LiteralTree = dict[str, Any]


def literal_tree(texts: Iterable[str]) -> LiteralTree:
    """The common prefixes of `texts`, which are not empty."""
    root: LiteralTree = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return root


def longest_of(node: LiteralTree) -> str:
    """A regular expression for the longest text of the tree at a place.

    With a plain alternation a text of "<<<<" would try thousands of control tokens at every character. Compiling one
    for a thousand texts takes nearly 0.1 s, so remember it.
    """
    branches = []
    for character, child in node.items():
        if not character:
            continue
        literal = character
        while len(child) == 1 and "" not in child:
            ((following, child),) = child.items()
            literal += following
        branches.append(re.escape(literal) + longest_of(child))
    if not branches:
        return ""
    body = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return body + "?" if "" in node else body


_PRIVATE_USE = [chr(code) for code in range(0xE000, 0xF900)]
# A private-use character as itself, as JSON escapes it, and as a URL does: the forms a template's filters can make.
_PRIVATE_USE_FORMS = re.compile(
    r"([\ue000-\uf8ff])|\\u(e[0-9a-f]{3}|f[0-8][0-9a-f]{2})|%(E[EF])%([89AB][0-9A-F])%([89AB][0-9A-F])", re.IGNORECASE
)
_random = random.SystemRandom()


class Marks(msgspec.Struct, frozen=True):
    """One render's marks. `literals` are the control tokens that the client's text spells out."""

    opening: str
    closing: str
    literals: frozenset[str]

    def forms(self) -> Iterator[str]:
        """The texts that a mark may have become in the output."""
        for mark in (self.opening, self.closing):
            yield mark
            yield f"\\u{ord(mark):04x}"
            yield quote(mark)


def mark(
    template: str, variables: dict[str, Any], control_tokens: Sequence[str]
) -> tuple[dict[str, Any], Marks | None]:
    """The variables with marks round every control token in the client's text, and those marks.

    Variables named `*_token` are the model's own and stay as they are. Without a control token in the text, gives back
    `variables` itself and None. Raises BadRequest when the text uses up the private-use characters.
    """
    pattern = any_of(tuple(control_tokens))
    if pattern is None:
        return variables, None
    given = {name: value for name, value in variables.items() if not name.endswith("_token")}
    literals = frozenset(found for text in texts_in(given) for found in pattern.findall(text))
    if not literals:
        return variables, None
    opening, closing = _random.sample(unused_characters([template, *texts_in(given)], 2), 2)

    def with_marks(text: str) -> str:
        return pattern.sub(opening + r"\g<0>" + closing, text)

    return variables | _changed(given, with_marks, keys=True), Marks(opening, closing, literals)


def split(text: str, marks: Marks | None) -> tuple[Segment, ...]:
    """The rendered text as segments, without any mark left; no segment is empty. Where a template took a marked control
    token away, what stood on its two sides stays apart, so that it makes no other one."""
    if marks is None:
        return (Segment(text),) if text else ()
    parts = re.split(f"([{marks.opening}{marks.closing}])", text)
    segments: list[Segment] = []
    is_apart = False
    for position in range(0, len(parts), 2):
        opened = position > 0 and parts[position - 1] == marks.opening
        closed = position + 1 < len(parts) and parts[position + 1] == marks.closing
        for piece, trusted in _judged(parts[position], opened, closed, marks):
            clean = _without_encoded_marks(piece, marks)
            if not clean:
                is_apart = is_apart or (opened and closed)
                continue
            if trusted and segments and segments[-1].trusted and not is_apart:
                segments[-1] = Segment(segments[-1].text + clean)
            else:
                segments.append(Segment(clean, trusted))
            is_apart = False
    return tuple(segments)


def _judged(piece: str, opened: bool, closed: bool, marks: Marks) -> Iterator[tuple[str, bool]]:
    """The piece between two marks, with trust. With a mark cut off, only the literal beside the other is untrusted."""
    if opened and closed:
        yield piece, False
    elif opened:
        literal = max((known for known in marks.literals if piece.startswith(known)), key=len, default="")
        yield literal, False
        yield piece[len(literal) :], True
    elif closed:
        literal = max((known for known in marks.literals if piece.endswith(known)), key=len, default="")
        yield piece[: len(piece) - len(literal)], True
        yield literal, False
    else:
        yield piece, True


def _without_encoded_marks(piece: str, marks: Marks) -> str:
    if "\\u" in piece or "%" in piece:
        for form in marks.forms():
            piece = piece.replace(form, "")
    return piece


def texts_in(value: Any) -> Iterator[str]:
    """Every string inside a JSON-like value, keys too."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend(item)


def _changed(value: Any, change: Callable[[str], str], *, keys: bool) -> Any:
    """A JSON-like value with every string inside changed, with `keys` those of its objects, too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            _changed(key, change, keys=keys) if keys else key: _changed(item, change, keys=keys)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_changed(item, change, keys=keys) for item in value]
    return value


def unused_characters(texts: Sequence[str], n: int) -> Sequence[str]:
    """The private-use characters that stand nowhere in `texts`. Raises BadRequest where there are not so many."""
    used: set[str] = set()
    for text in texts:
        if text.isascii() and "\\u" not in text and "%" not in text:
            continue
        for itself, escaped, *encoded in _PRIVATE_USE_FORMS.findall(text):
            if itself:
                used.add(itself)
            elif escaped:
                used.add(chr(int(escaped, 16)))
            else:
                used.add(bytes.fromhex("".join(encoded)).decode("utf-8", "replace"))
    unused = [character for character in _PRIVATE_USE if character not in used] if used else _PRIVATE_USE
    if len(unused) < n:
        raise BadRequest(
            "the messages contain control tokens and every private-use character (U+E000 to U+F8FF); leave out one of "
            "the two",
            field="messages",
        )
    return unused


@lru_cache(maxsize=8)
def any_of(tokens: tuple[str, ...]) -> re.Pattern[str] | None:
    """A pattern for the longest of `tokens` at a place, or None without tokens."""
    known = literal_tree(filter(None, tokens))
    return re.compile(longest_of(known)) if known else None


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

    given = _changed(given, lambda text: replaced(text, stand_ins), keys=False)
    return Shadow(variables | given, stand_ins)


def marked_again(
    shadow: Shadow, rendered: str, prompt: str, control_tokens: Sequence[str], marks: Marks | None
) -> tuple[str, Marks | None]:
    """The prompt with marks also round control tokens that begin with a client's character. `rendered` is the prompt of
    the shadow."""
    pattern = any_of(tuple(control_tokens))
    if pattern is None or replaced(rendered, [pair[::-1] for pair in shadow.stand_ins]) != prompt:
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


def replaced(text: str, pairs: Sequence[tuple[str, ...]]) -> str:
    """Quicker than a table for all of them, which looks at each character."""
    for old, new in pairs:
        text = text.replace(old, new)
    return text
