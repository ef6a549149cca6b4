"""GBNF, llama.cpp's notation for grammars, as lark.

The translation is the grammar library's, and pure Python: two thousand rules take it 3.4 s. It loses the brackets of a
repetition that is repeated and the zeros of `\\u0041`, refuses `{0}`, and its `.` is no line break; `plainer` writes
them so that nothing is lost (llguidance 1.9.1). Which rules are tokens is for `lexemes.py` to say.

Owner: the grammar worker.
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import GbnfToLarkError, GrammarParser, resolve

from localrun.engine.sample.lexemes import split
from localrun.errors import BadRequest

# A text, a class, a comment, counts, a name, a bracket, or anything else.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*|\{[^}]*\}|[\w-]+|.', re.DOTALL)
# Names that the translator has itself, or cannot write.
_OTHER_NAME = re.compile(r"start|\d.*")
_ENDS_OF_REPETITIONS = ("*", "+", "?", "}")
_REPETITION = re.compile(r"\s*[*+?{]")
_ANY = "[\\x00-\U0010ffff]"
_NEVER = re.compile(r"\{\s*0\s*(?:,\s*0\s*)?\}")
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


def plainer(text: str) -> str:
    """The same grammar: a repetition in brackets that are repeated is a rule of its own, and characters by their number
    are themselves. What is not balanced stays as it is, for the translator to refuse."""
    prefix = "repeated"
    while prefix in text:
        prefix += "-x"
    rules: list[str] = []
    open_groups: list[list[str]] = [[]]
    for token in _TOKEN.finditer(text):
        found = token[0]
        if found == "(":
            open_groups.append([])
        elif found == ")" and len(open_groups) > 1:
            parts = open_groups.pop()
            group = "".join(parts)
            last = next((part for part in reversed(parts) if part.strip() and part[0] != "#"), "")
            if last[-1:] in _ENDS_OF_REPETITIONS and _REPETITION.match(text, token.end()):
                rules.append(f"\n{prefix}-{len(rules)} ::= ({group})")
                open_groups[-1].append(f"{prefix}-{len(rules) - 1}")
            else:
                open_groups[-1].append(f"({group})")
        elif _NEVER.fullmatch(found) and "".join(open_groups[-1]).strip():
            parts = open_groups[-1]
            while not parts[-1].strip():
                parts.pop()
            parts[-1] = '""'
        else:
            written = f"{prefix}-{found}" if _OTHER_NAME.fullmatch(found) else _ANY if found == "." else found
            open_groups[-1].append(_ESCAPE.sub(_as_itself, found) if found[0] in '"[' else written)
    return "".join([*open_groups[0], *rules]) if len(open_groups) == 1 else text


def _as_itself(escape: re.Match[str]) -> str:
    if escape[0] == "\\-":
        return "\\x2D"
    if not (escape[1] or escape[2]):
        return escape[0]
    number = int(escape[1] or escape[2], 16)
    if 0xD800 <= number < 0xE000 or number > 0x10FFFF:
        return escape[0]
    return f"\\x{number:02X}" if number < 0x80 else chr(number)


def to_lark(text: str) -> str:
    """Raises BadRequest for a text that is no grammar."""
    try:
        rules = GrammarParser().parse(plainer(text))
        resolve(rules)
        split(rules)
        return "\n".join(
            ["%llguidance {}", *(f"{rule.name}: {rule.alternatives.top_str()}" for rule in rules.values())]
        )
    except GbnfToLarkError as error:
        raise BadRequest(f"the GBNF grammar is not valid: {error}") from error
    except RecursionError as error:
        raise BadRequest("the GBNF grammar is nested too deeply") from error
    except Exception as error:
        raise BadRequest(f"the GBNF grammar cannot be read: {error}") from error
