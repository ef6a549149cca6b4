"""How an answer's Markdown is read: nothing of what the model said is dropped.

There is no HTML in answers: `Vec<String>`, `<name>` and `<answer>` are text, and so is what follows an open `<style>`.
Only `<br>` in a cell of a table, which has no other way to say it, breaks a line; elsewhere line feeds do. A line such
as `[note]: text` is no definition, which would not be shown. Formulas, backslashes before what needs none, names as
`__init__`, and the stars of globs, comments, products and powers stay as they are.
"""

from __future__ import annotations

import re

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline

_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
# Bounded, for a model may repeat anything without end.
_LITERAL = re.compile(
    r"""\\\([\s\S]{1,1000}?\\\) | \\\[[\s\S]{1,1000}?\\\] | \$\$[\s\S]{1,1000}?\$\$
    | \$(?![\s$])[^$\n]{0,300}[^$\s]\$(?![\d$]) | \\[!"'%,/:;=?@^{}()\[\]\\] | \b__[a-z\d_]{1,99}__\b
    | (?<=/)\*(?!\*) | (?<=[^\W_])\*(?=[^\W_]) | (?<!\*)\*(?=\.\w) | (?<=/)\*\*(?=/) | \*\*(?=/\*)
    | (?<=\w)\*\*(?=\d) | (?<=\d)\*\*(?=\w)""",
    re.VERBOSE,
)
_IN_CELL = "in_cell"


def parser() -> MarkdownIt:
    """A new one: it keeps what it has read."""
    made = MarkdownIt("gfm-like", {"html": False}).disable("reference")
    made.core.ruler.at("inline", _inline)
    made.inline.ruler.before("escape", "as_said", _as_said)
    return made


def _inline(state: StateCore) -> None:
    """As the rule that it replaces; it says what is in a cell, and keeps line feeds."""
    before = ""
    for token in state.tokens:
        if token.type == "inline":
            state.env[_IN_CELL] = before in ("th_open", "td_open")
            assert token.children is not None
            state.md.inline.parse(token.content, state.md, state.env, token.children)
            for child in token.children:
                child.type = "hardbreak" if child.type == "softbreak" else child.type
        before = token.type


def _as_said(state: StateInline, silent: bool) -> bool:
    literal = _LITERAL.match(state.src, state.pos)
    found = literal or (_BREAK.match(state.src, state.pos) if state.env.get(_IN_CELL) else None)
    if found is None:
        return False
    for n, said in enumerate(found[0].split("\n") if literal else ("", "")):
        if n and not silent:
            state.push("hardbreak", "br", 0)
        state.pending += "" if silent else said
    state.pos = found.end()
    return True
