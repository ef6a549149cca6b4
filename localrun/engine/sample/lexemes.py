"""Which pieces of a GBNF grammar may be tokens of the grammar library's lexer.

Its lexer takes of a text as much as any token can have of it, where llama.cpp's grammars take as much as fits what
follows: of `word "ing"` a token `word` takes all letters, and the text never ends. A token that can go on where the
grammar allows that another one begins is written in smaller pieces: a rule as a rule, a text as its characters. Tokens
of one character are always right; longer ones make long texts cheap.

The grammar is read as an automaton of its characters, which remembers two of the rules that it is in, and no more. So
it finds more conflicts than there are, and none too few. Characters beyond ASCII count as one.
Owner: the grammar worker. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from functools import cache, reduce
from typing import NamedTuple

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
)

# Grammars with more characters, or more ways through them, are written as they are.
_MAX_PLACES = 5000
_MAX_PAIRS = 60_000
_MAX_ROUNDS = 50
# Places in all automata that are made of a grammar, one after another.
_MOST_READ = 4 * _MAX_PLACES

_BEYOND_ASCII = 1 << 128
_CHARACTER = re.compile(r"\\x[0-9A-Fa-f]{2}|\\.|.", re.DOTALL)


class _Part(NamedTuple):
    """Of the automaton: whether it may be passed over, and the places where it begins and ends."""

    is_empty: bool
    first: frozenset[int]
    last: frozenset[int]


_NOTHING = _Part(True, frozenset(), frozenset())
_NEVER = _Part(False, frozenset(), frozenset())


class _TooLarge(Exception):
    pass


class _Automaton:
    """Places are characters; `tokens[owner[place]]` is the token that one belongs to. A rule has places of its own for
    each way of `n_calls` references in a row that lead to it, so that what follows one of them is not taken for what
    follows another."""

    def __init__(self, rules: Mapping[str, RuleNode], n_calls: int) -> None:
        self.tokens: list[ASTNode] = []
        self.owner: list[int] = []
        self._n_calls = n_calls
        self._n_left = _MAX_PAIRS
        self._masks: list[int] = []
        # The places that may follow one, in the same token and behind it; of these whether only by endless loops.
        self._within: list[set[int]] = []
        self._after: list[dict[int, bool]] = []
        self._counted: set[int] = set()
        self._leaves: dict[tuple[int, tuple[int, ...]], _Part] = {}
        self._parts: dict[tuple[str, tuple[int, ...]], _Part] = {("start", ()): _NEVER}
        for _ in range(_MAX_ROUNDS):  # rules refer to each other
            before = dict(self._parts)
            for name, calls in reversed(before):
                self._parts[name, calls] = self._part(rules[name].alternatives, None, calls)
            if before == self._parts:
                break
        else:
            raise _TooLarge
        self._start = self._parts["start", ()].first

    def conflicts(self) -> set[int]:
        """Tokens that can go on where another one, read from the same character on, ends and the next one begins.
        Where a token would begin again and again in a loop that it has itself, taking all of it is the same.

        Raises _TooLarge."""
        found: set[int] = set()
        masks = self._masks
        seen = set[tuple[int, int]]()
        to_see: list[tuple[Collection[int], Collection[int]]] = [(self._start, self._start)]
        while to_see:
            some, others = to_see.pop()
            self._spend(len(some) * len(others))
            pairs = {(min(a, b), max(a, b)) for a in some for b in others if masks[a] & masks[b]}
            for one, other in pairs - seen:
                for ends, goes_on in ((one, other), (other, one)):
                    within, after = self._within[goes_on], self._after[ends]
                    same = {place for place in within - self._counted if one == other and after.get(place)}
                    if self._mask(after.keys() - same) & self._mask(within):
                        found.add(self.owner[goes_on])
                to_see += [(self._within[one], self._within[other]), (self._after[one], self._after[other])]
            seen |= pairs
        return found

    # --- inside --------------------------------------------------------------------------------------------------

    def _spend(self, n_pairs: int) -> None:
        self._n_left -= n_pairs
        if self._n_left < 0:
            raise _TooLarge

    def _mask(self, places: Iterable[int]) -> int:
        return reduce(int.__or__, (self._masks[place] for place in places), 0)

    def _part(self, node: ASTNode, token: int | None, calls: tuple[int, ...], *, is_counted: bool = False) -> _Part:
        """Of a node, which is inside of `token` if that is one, and of a counted repetition or not."""
        if isinstance(node, SequenceNode):
            parts = [self._part(child, token, calls, is_counted=is_counted) for child in node.nodes]
            return self._joined(parts, token)
        if isinstance(node, AlternativeNode):
            parts = [self._part(child, token, calls, is_counted=is_counted) for child in node.alternatives]
            first, last = (
                frozenset[int]().union(*places) for places in zip(*(part[1:] for part in parts), strict=True)
            )
            return _Part(any(part.is_empty for part in parts), first, last)
        if isinstance(node, RepetitionNode):
            is_endless = node.min_times < 2 and node.max_times is None
            part = self._part(node.node, token, calls, is_counted=is_counted or not (is_endless or node.max_times == 1))
            if node.max_times != 1:
                self._link(part, part, token, is_loop=is_endless)
            return _NOTHING if node.max_times == 0 else part._replace(is_empty=part.is_empty or not node.min_times)
        target = node.target if isinstance(node, RuleRefNode) else None
        if target is not None and token is not None:
            return self._part(target.alternatives, token, calls, is_counted=is_counted)
        if target is not None and not target.rule_is_terminal:
            key = target.name, (id(node), *calls)[: self._n_calls]
            if key not in self._parts:
                self._parts[key] = _NEVER
                self._parts[key] = self._part(target.alternatives, None, key[1])
            return self._parts[key]
        if token is not None:
            return self._characters(node, token, is_counted=is_counted)
        if (id(node), calls) not in self._leaves:
            self.tokens.append(node)
            self._leaves[id(node), calls] = self._part(node, len(self.tokens) - 1, calls)
        return self._leaves[id(node), calls]

    def _characters(self, node: ASTNode, token: int, *, is_counted: bool) -> _Part:
        masks = [_of_class(node.rx)] if isinstance(node, RegexNode) else list(map(_of_character, characters(node)))
        parts = []
        for mask in masks:
            place = len(self._masks)
            if place >= _MAX_PLACES:
                raise _TooLarge
            self.owner.append(token)
            self._masks.append(mask)
            self._within.append(set())
            self._after.append({})
            self._counted |= {place} if is_counted else set()
            parts.append(_Part(False, frozenset((place,)), frozenset((place,))))
        return self._joined(parts, token)

    def _joined(self, parts: list[_Part], token: int | None) -> _Part:
        whole = _NOTHING
        for part in parts:
            self._link(whole, part, token)
            whole = _Part(
                whole.is_empty and part.is_empty,
                whole.first | part.first if whole.is_empty else whole.first,
                whole.last | part.last if part.is_empty else part.last,
            )
        return whole

    def _link(self, before: _Part, after: _Part, token: int | None, *, is_loop: bool = False) -> None:
        self._spend(len(before.last) * len(after.first))
        for place in before.last:
            if token is not None:
                self._within[place] |= after.first
                continue
            steps = self._after[place]
            for to in after.first:
                steps[to] = is_loop and steps.get(to, True)


def split(rules: dict[str, RuleNode]) -> None:
    """Write what must not be a token in smaller pieces. The rules are resolved; those of a grammar that is too large
    stay as they are. A rule stays a token for other tokens, and where there is no conflict."""
    as_rules: dict[str, RuleNode] = {}
    n_left = _MOST_READ
    while n_left > 0:
        conflicts, n_places = _conflicts(rules)
        if not conflicts:
            return
        n_left -= n_places
        for node in conflicts:
            if isinstance(node, RuleRefNode) and node.target is not None and node.target.rule_is_terminal:
                name = node.target.name
                if name not in as_rules:
                    as_rules[name] = _as_rule(rules, node.target)
                node.target = as_rules[name]
        texts = {id(node) for node in conflicts}
        for rule in rules.values():
            rule.alternatives = _in_pieces(rule.alternatives, texts)


def _conflicts(rules: Mapping[str, RuleNode]) -> tuple[list[ASTNode], int]:
    """Tokens to write in smaller pieces, and how many places were looked at for that."""
    for n_calls in (2, 0):
        try:
            automaton = _Automaton(rules, n_calls)
            return [automaton.tokens[at] for at in automaton.conflicts()], len(automaton.owner)
        except (_TooLarge, RecursionError):
            pass
    return [], 0


def _as_rule(rules: dict[str, RuleNode], token: RuleNode) -> RuleNode:
    """A new rule that says the same, and is no token."""
    name = token.name.lower()
    while name in rules:
        name += "_"
    others = {id(rule): rule for rule in rules.values()}
    rules[name] = RuleNode(name, deepcopy(token.alternatives, others), "")
    return rules[name]


def _in_pieces(node: ASTNode, texts: Collection[int]) -> ASTNode:
    """A node in which these texts are written as their characters."""
    if id(node) in texts and isinstance(node, LiteralNode):
        return SequenceNode([LiteralNode(one) for one in characters(node)])
    if isinstance(node, SequenceNode):
        node.nodes = [_in_pieces(child, texts) for child in node.nodes]
    elif isinstance(node, AlternativeNode):
        node.alternatives = [_in_pieces(child, texts) for child in node.alternatives]
    elif isinstance(node, RepetitionNode):
        node.node = _in_pieces(node.node, texts)
    return node


def characters(node: ASTNode) -> list[str]:
    """Those of a text, as they are written."""
    return _CHARACTER.findall(node.value) if isinstance(node, LiteralNode) else []


def _of_character(written: str) -> int:
    known = {"\\n": "\n", "\\r": "\r", "\\t": "\t"}
    text = chr(int(written[2:], 16)) if written[:2] == "\\x" else known.get(written, written[-1])
    return 1 << ord(text) if text.isascii() else _BEYOND_ASCII


@cache
def _of_class(written: str) -> int:
    try:
        pattern = re.compile(written, re.DOTALL)
    except re.error:
        return 2 * _BEYOND_ASCII - 1
    found = sum(1 << code for code in range(128) if pattern.fullmatch(chr(code)))
    has_more = written == "." or written.startswith("[^") or not written.isascii()
    return found | _BEYOND_ASCII if has_more else found
