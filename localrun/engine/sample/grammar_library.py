"""Grammars by llguidance, which takes a while to import, and a model's vocabulary as it wants that.

Owner: the compiler's threads, and the worker process, which looks at a grammar before they do.
Does not: keep anything (`grammars.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from localrun.errors import BadRequest
from localrun.wire import Grammar, GrammarKind

# Marks a token that no text of a grammar can match, only its number.
_CONTROL_MARK = b"\xff"


class VocabularyAccess(Protocol):
    """What is read of a model's vocabulary; each as of `Backend`."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def eog_tokens(self) -> frozenset[int]: ...
    def tokenize(self, text: str, *, parse_special: bool) -> list[int]: ...
    def piece(self, token: int) -> bytes: ...
    def control_text(self, token: int) -> str: ...


class _Source:
    """What `TokenizerWrapper` reads."""

    def __init__(self, backend: VocabularyAccess) -> None:
        self._tokenize = backend.tokenize
        names = {token: backend.control_text(token) for token in range(backend.n_vocab)}
        self.tokens = [_CONTROL_MARK + name.encode() if name else backend.piece(token) for token, name in names.items()]
        self.control_ids = {name: token for token, name in names.items() if name}
        self.special_token_ids = list(self.control_ids.values())
        self.bos_token_id = None
        self.eos_token_id = min(backend.eog_tokens, default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenize(text, parse_special=False)


class GrammarVocabulary:
    """A model's vocabulary as the grammar library wants it: a trie over the bytes of all tokens.

    Made once per engine, when the first grammar comes: 0.35 s and 90 MB for 152,000 tokens, too much for engines that
    never see one. The library keeps the interpreter's lock meanwhile, so it is asked for two things one after the
    other, and streams have a step between.

    Owner: made in a thread of the compiler, only read after that.
    Does not: tokenize prompts.

    `pause` gives others time to take the interpreter's lock.
    """

    def __init__(self, backend: VocabularyAccess, pause: Callable[[], None] = lambda: None) -> None:
        source = _Source(backend)
        eog = sorted(backend.eog_tokens) or [source.eos_token_id]
        plain = LLTokenizer(TokenizerWrapper(source), n_vocab=backend.n_vocab, eos_token=eog, slices=[])
        pause()
        self.tokenizer = plain.with_slices(LLTokenizer.general_slices())
        self.n_tokens = backend.n_vocab
        self._pieces = source.tokens
        self._control_ids = source.control_ids
        names = sorted(filter(None, source.control_ids), key=len, reverse=True)
        self._control_text = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def shown(self, token: int) -> bytes:
        """The bytes of a token, or its name if it is a control token."""
        return self._pieces[token].removeprefix(_CONTROL_MARK)

    def names_in(self, text: str) -> tuple[str, ...]:
        """The control tokens that are named there."""
        return tuple(sorted({found.group() for found in self._control_text.finditer(text)}))

    def cut(self, text: str) -> list[tuple[str, int]]:
        """`text` as (text before, id of the control token named there); the last id is -1."""
        parts, at = [], 0
        for found in self._control_text.finditer(text):
            parts.append((text[at : found.start()], self._control_ids[found.group()]))
            at = found.end()
        return [*parts, (text[at:], -1)]


# What printers of JSON put between two values, and not all that JSON allows: a model that likes spaces never finishes.
WHITESPACE = r" |\n[ \t]{0,20}"
# How the daemon writes literal text of tool calls.
_LITERAL_RULE = re.compile(r"^(literal_\d+): (\".*\")$", re.MULTILINE)


def source_of(grammar: Grammar, control_ids: Callable[[str], list[tuple[str, int]]]) -> str:
    """The library's own description of a `checked` grammar (grammar_worker.py).

    `control_ids` cuts a literal into (text before, id of the control token after it); the last id is -1 for none.
    """
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": WHITESPACE})
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind is GrammarKind.GBNF:
        return LLMatcher.grammar_from_lark(grammar.text)
    return LLMatcher.grammar_from_lark(_with_control_tokens(grammar.text, control_ids))


def _with_control_tokens(lark: str, control_ids: Callable[[str], list[tuple[str, int]]]) -> str:
    """In rules named for literals, the name of a control token stands for that token."""

    def expand(found: re.Match[str]) -> str:
        parts: list[str] = []
        for before, token in control_ids(json.loads(found[2])):
            if before:
                parts.append(json.dumps(before, ensure_ascii=False))
            if token >= 0:
                parts.append(f"<[{token}]>")
        return f"{found[1]}: {' '.join(parts)}"

    return _LITERAL_RULE.sub(expand, lark)


_NAMES = {
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.GBNF: "GBNF grammar",
    GrammarKind.LARK: "lark grammar",
    GrammarKind.REGEX: "regular expression",
}
# The library's own, but for the items of a row: an object has four for each property that may be left out.
_LIMITS = LLParserLimits(max_items_in_row=20_000, verbose_errors=False)

# How the library ends messages that were shortened, and what it says about `oneOf`.
_CUT = "<non-verbose/>"
_ONE_OF_HINT = ". Enable 'coerce_one_of' option to approximate oneOf with anyOf"


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar at its beginning; every answer takes a copy."""

    matcher: LLMatcher
    vocabulary: GrammarVocabulary


def problem_of(error: str) -> str:
    """The library's message for people who do not know its options."""
    return (
        error.replace(_ONE_OF_HINT, " where two alternatives may match the same value; use anyOf")
        .replace(_CUT, "")
        .strip()
    )


def compile_grammar(grammar: Grammar, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    """The grammar, which was `checked` (grammar_worker.py), for this vocabulary, with what its first mask needs
    computed. Raises BadRequest if it is none, or beyond the library's limits: 500,000 symbols, 250,000 lexer states,
    and 50,000 parser items for a mask."""
    matcher = LLMatcher(vocabulary.tokenizer, source_of(grammar, vocabulary.cut), log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise BadRequest(f"the {_NAMES[grammar.kind]} cannot be used: {problem_of(matcher.get_error())}")
    return CompiledGrammar(matcher, vocabulary)
