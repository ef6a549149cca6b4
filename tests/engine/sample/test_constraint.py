"""Which tokens a constraint lets through, by a vocabulary of single bytes."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from localrun.engine.sample import constraint as constraint_module
from localrun.engine.sample.constraint import DEAD_END, LIMIT_S, SLOW_S, Constraint
from localrun.engine.sample.grammar_library import GrammarVocabulary
from localrun.errors import BadRequest
from localrun.wire import Grammar, GrammarKind
from tests.engine.sample.compiling import compile_grammar
from tests.fakes.backend import FakeBackend
from tests.fakes.tokens import IM_END, IM_START

VOCABULARY = GrammarVocabulary(FakeBackend(n_cells=8, n_seqs=1, n_batch=8))


class Clock:
    """Goes on by `step_s` whenever it is looked at."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def constraint(
    regex: str, *, banned: frozenset[int] = frozenset(), triggers: tuple[str, ...] = (), clock: Clock | None = None
) -> Constraint:
    compiled = compile_grammar(Grammar(GrammarKind.REGEX, regex), VOCABULARY)
    return Constraint(compiled, triggers=triggers, banned=banned, clock=clock or Clock())


def allowed(bound: Constraint) -> list[int]:
    """What a draw may choose from; the constraint is at a dead end or one step further after it."""
    seen: list[int] = []

    def draw(ids: NDArray[np.int64] | None) -> int:
        assert ids is not None
        seen.extend(ids.tolist())
        return int(ids[0])

    token = bound.choose(draw, tries_first=False)
    return seen or ([] if token == DEAD_END else [token])


@given(st.frozensets(st.integers(0, 257)), st.frozensets(st.sampled_from("abcdefghijxyz~%"), min_size=1))
def test_a_draw_sees_all_that_is_allowed_and_nothing_that_is_banned(banned: frozenset[int], letters: frozenset[str]):
    expected = {ord(letter) for letter in letters} - banned
    assert set(allowed(constraint(f"[{''.join(letters)}]x", banned=banned))) == expected


@given(st.frozensets(st.integers(0, 257)))
def test_many_tokens_are_masked_as_few_are(banned: frozenset[int]):
    assert set(allowed(constraint("[ -~]x", banned=banned))) == set(range(32, 127)) - banned


def test_greedy_needs_no_mask_where_its_choice_is_allowed():
    asked: list[NDArray[np.int64] | None] = []

    def draw(ids: NDArray[np.int64] | None) -> int:
        asked.append(ids)
        return ord("b") if ids is None else int(ids[-1])

    bound = constraint("[ab][xy]z")
    assert bound.choose(draw, tries_first=True) == ord("b")
    assert asked == [None]
    assert bound.choose(draw, tries_first=True) == ord("y"), "b is not allowed here, the last of x and y is drawn"
    assert bound.choose(draw, tries_first=True) == ord("z")
    assert len(asked) == 4, "of one allowed token none is drawn"
    assert bound.is_complete


def test_an_end_is_among_the_allowed_where_the_grammar_may_end():
    bound = constraint("ab?")
    assert allowed(bound) == [ord("a")]
    assert not bound.is_complete
    assert allowed(bound) == [ord("b"), IM_END]


def test_a_dead_end_says_why():
    bound = constraint("ab", banned=frozenset({ord("b")}))
    assert allowed(bound) == [ord("a")]
    assert allowed(bound) == []
    assert "no token of this model's vocabulary can follow" in bound.problem


@pytest.mark.parametrize("trigger", ["<go>", "o>", "<|im_start|>"])
def test_a_trigger_is_found_whatever_its_tokens(trigger: str):
    bound = constraint("[0-9]+", triggers=("never", trigger))
    free = [*b"say <go", *b">", IM_START]
    while bound.is_waiting:
        token = free.pop(0)
        assert bound.choose(lambda ids, token=token: token, tries_first=True) == token
    assert allowed(bound) == list(b"0123456789")


@pytest.mark.parametrize(
    ("said", "is_bound"),
    [
        ("<go>", True),
        ("I look.<go>", True),
        ("I look<go>", True),
        ("I look:\n\n<go>", True),
        ("</think><go>", True),
        ("It is `<go>", False),
        ("the <go>", False),
        ("the <go> tag, or '<go>", False),
        ("the <go> tag, which I write:   <go>", True),
    ],
)
def test_a_mark_that_is_spoken_of_binds_nobody(said: str, is_bound: bool):
    compiled = compile_grammar(Grammar(GrammarKind.REGEX, "[0-9]"), VOCABULARY)
    bound = Constraint(compiled, triggers=("<go>",), has_mentions=True, banned=frozenset(), clock=Clock())
    for token in said.encode():
        assert bound.choose(lambda ids, token=token: token, tries_first=True) == token
    assert bound.is_waiting != is_bound


def test_an_answer_goes_on_after_what_is_begun():
    bound = constraint("[ab]c[de]")
    bound.begin("ac")
    assert allowed(bound) == list(b"de")
    free = constraint("[0-9]x", triggers=("<go>",))
    free.begin("say <go>7")
    assert allowed(free) == list(b"x")
    with pytest.raises(BadRequest, match="does not begin"):
        constraint("[ab]c").begin("ad")
    with pytest.raises(BadRequest, match="too long"):
        constraint("a+", clock=Clock(step_s=0.1)).begin("aaa")


def test_a_grammar_is_slow_for_a_while_after_it_took_long():
    clock = Clock()
    bound = constraint("a+", clock=clock)
    allowed(bound)
    assert not bound.is_slow
    clock.step_s = 2 * SLOW_S
    allowed(bound)
    assert bound.is_slow
    clock.step_s = 0.0
    n_slow = 0
    while bound.is_slow:
        allowed(bound)
        n_slow += 1
    assert n_slow == 16


def test_an_answer_ends_where_its_grammar_can_read_it_in_too_many_ways(monkeypatch: pytest.MonkeyPatch):
    """Each token would take longer than the one before, and keep the interpreter's lock all the while."""
    monkeypatch.setattr(constraint_module, "LIMIT_S", 0.005)
    grammar = Grammar(GrammarKind.GBNF, "root ::= s\ns ::= s s s | s s | [^\\x00]")
    compiled = compile_grammar(grammar, VOCABULARY)
    bound = Constraint(compiled, triggers=(), banned=frozenset(), clock=time.perf_counter)
    n_chosen = 0
    while bound.choose(lambda ids: ord("a"), tries_first=True) != DEAD_END:
        n_chosen += 1
    assert 10 < n_chosen < 1000
    assert "in so many ways that one more token takes more than 5 ms; make it less ambiguous" in bound.problem


def test_a_machine_that_stops_a_token_ends_no_answer():
    clock = Clock()
    bound = constraint("a+", clock=clock)
    for n in range(30):
        clock.step_s = 2 * LIMIT_S if n % 4 else 0.0
        assert ord("a") in allowed(bound)
