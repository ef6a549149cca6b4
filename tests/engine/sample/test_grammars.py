"""Answers that must match a grammar, on the fake backend: what a request and its neighbours notice."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import suppress
from typing import Any

import psutil
import pytest

from localrun.engine.sample import grammars
from localrun.engine.sample.constraint import Constraint
from localrun.engine.sample.grammars import GrammarChecker
from localrun.wire import Finish, Grammar, GrammarKind, Lane, Sampling
from tests.engine.harness import Harness, expected_output
from tests.fakes.tokens import IM_END, IM_START

OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
DIGITS = Grammar(GrammarKind.REGEX, "[0-9]{30}")


# Takes seconds to read.
# Eight chains: one takes a quick processor less than a second.
def chains(length: int) -> Grammar:
    """Takes long to compile: by the square of the length."""
    return Grammar(
        GrammarKind.GBNF,
        "root ::= " + " | ".join(f"r{chain}-0" for chain in range(8)) + "\n"
        + "".join(f'r{chain}-{n} ::= "x" r{chain}-{n + 1}\n' for chain in range(8) for n in range(length))
        + "".join(f'r{chain}-{length} ::= "y"\n' for chain in range(8)),
    )  # fmt: skip


SLOW = chains(2000)
# A reference through references: as deep as the stack of whoever follows them.
DEEP = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "$ref": "#/$defs/0",
            "$defs": {str(n): {"type": "array", "items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(5000)}
            | {"5000": {"type": "string"}},
        }
    ),
)


def answer(grammar: Grammar, *, n_predict: int = 400, **more: Any) -> tuple[str, Harness]:
    harness = Harness(n_cells=2048)
    harness.submit(1, "prompt", n_predict=n_predict, grammar=grammar, **more)
    harness.run()
    return harness.texts.get(1, ""), harness


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        (GrammarKind.REGEX, "[0-9]{3}-[a-c]+x", r"[0-9]{3}-[a-c]+x"),
        (GrammarKind.GBNF, 'root ::= "yes" | "no" [0-9] [0-9]', r"yes|no[0-9][0-9]"),
        (GrammarKind.LARK, 'start: "<" NAME ">" ("," NAME){2}\nNAME: /[a-z]{2}/', r"<[a-z]{2}>(,[a-z]{2}){2}"),
        (GrammarKind.JSON_SCHEMA, '{"enum":["red","green"]}', r'"red"|"green"'),
    ],
)
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_an_answer_matches_its_grammar_and_ends_with_it(kind: GrammarKind, text: str, pattern: str, ignore_eos: bool):
    text, harness = answer(Grammar(kind, text), ignore_eos=ignore_eos)
    assert re.fullmatch(pattern, text)
    assert harness.finals[1].finish is Finish.STOP


def test_an_end_is_only_chosen_where_the_grammar_may_end():
    lengths = set()
    for prompt in range(40):
        harness = Harness()
        harness.submit(1, [prompt], ignore_eos=False, grammar=Grammar(GrammarKind.REGEX, "ab?c?"))
        harness.run()
        lengths.add(len(harness.texts[1]))
        assert harness.finals[1].finish is Finish.STOP
        assert IM_END not in harness.tokens[1]
    assert lengths == {1, 2, 3}


def test_limits_stop_strings_and_logprobs_are_what_they_are_without():
    text, harness = answer(DIGITS, n_predict=7)
    assert (len(text), harness.finals[1].finish) == (7, Finish.LENGTH)
    text, harness = answer(Grammar(GrammarKind.REGEX, "aaaSTOPbbb"), stop=("STOP",))
    assert (text, harness.finals[1].stop_text) == ("aaa", "STOP")
    text, harness = answer(DIGITS, n_probs=2)
    assert [entry.piece.decode() for entry in harness.logprobs[1]] == list(text)
    assert len(text) == 30


def test_requests_without_a_grammar_are_not_changed_by_one_beside_them():
    harness = Harness(n_cells=2048)
    harness.submit(1, "free", n_predict=40)
    harness.submit(2, "bound", n_predict=40, grammar=DIGITS)
    harness.submit(3, "also free", n_predict=40, sampling=Sampling(temperature=1, seed=5))
    harness.run()
    assert harness.tokens[1] == expected_output(list(b"free"), 40)
    assert harness.texts[2].isdecimal()


def test_a_preempted_answer_goes_on_where_it_was():
    text, _ = answer(DIGITS)
    harness = Harness(n_cells=64, n_slots=1)
    harness.submit(1, "prompt", n_predict=400, grammar=DIGITS, lane=Lane.BATCH)
    while len(harness.texts.get(1, "")) < 10:
        harness.step()
    harness.submit(2, "urgent", n_predict=3, lane=Lane.INTERACTIVE)
    harness.run()
    assert harness.engine.totals.preemptions == 1
    assert harness.texts[1] == text


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (GrammarKind.REGEX, "(a", "the regular expression cannot be used: "),
        (GrammarKind.REGEX, "(a)\\1", "backreferences are not supported"),
        (GrammarKind.GBNF, 'root ::= "a" missing', "the GBNF grammar cannot be "),
        (GrammarKind.GBNF, "root ::= (((", "the GBNF grammar is not valid"),
        (GrammarKind.LARK, "start: foo", 'unknown name: "foo"'),
        (GrammarKind.JSON_SCHEMA, "{", "the JSON schema cannot be read"),
        (
            GrammarKind.JSON_SCHEMA,
            '{"oneOf":[{"type":"number"},{"type":"integer"}]}',
            "oneOf constraints are not supported where two alternatives may match the same value; use anyOf",
        ),
        (GrammarKind.JSON_SCHEMA, '{"type":"string","enum":["a"],"maxLength":0}', "Unsatisfiable schema"),
        (GrammarKind.GBNF, "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "the GBNF grammar is nested too deeply"),
    ],
)
def test_what_is_no_grammar_fails_its_request_alone(kind: GrammarKind, text: str, problem: str):
    harness = Harness()
    harness.submit(1, "bad", grammar=Grammar(kind, text))
    harness.submit(2, "good", n_predict=5)
    harness.run()
    assert harness.finals[1].error_code == "bad_request"
    assert problem in (harness.finals[1].error_message or "")
    assert harness.tokens[2] == expected_output(list(b"good"), 5)
    assert harness.backend.n_open_samplers == 0


def test_a_dead_end_fails_its_request_alone():
    harness = Harness()
    bans = Sampling(temperature=0, logit_bias=((ord("b"), float("-inf")),))
    harness.submit(1, "stuck", grammar=Grammar(GrammarKind.REGEX, "aab"), sampling=bans)
    harness.submit(2, "good", n_predict=5)
    harness.run()
    assert harness.texts[1] == "aa"
    assert (harness.finals[1].finish, harness.finals[1].error_code) == (Finish.ERROR, "bad_request")
    assert "the grammar has come to a dead end" in (harness.finals[1].error_message or "")
    assert harness.tokens[2] == expected_output(list(b"good"), 5)


# --- triggers -------------------------------------------------------------------------------------------------------


def test_an_answer_is_free_until_a_trigger_and_bound_right_after_it():
    free = "".join(map(chr, expected_output(list(b"prompt"), 60))).encode("latin-1").decode("utf-8", "replace")
    trigger = free[20:23]
    text, harness = answer(Grammar(GrammarKind.REGEX, "[0-9]{5}", (trigger, "never seen")))
    before, _, after = text.partition(trigger)
    assert free.startswith(before + trigger)
    assert re.fullmatch("[0-9]{5}", after)
    assert harness.finals[1].finish is Finish.STOP


def test_an_answer_without_a_trigger_is_free_to_its_end():
    _, harness = answer(Grammar(GrammarKind.REGEX, "[0-9]{5}", ("\x00",)), n_predict=20)
    assert harness.tokens[1] == expected_output(list(b"prompt"), 20)
    assert harness.finals[1].finish is Finish.LENGTH


def test_names_of_control_tokens_in_the_daemon_s_literals_are_these_tokens():
    grammar = Grammar(GrammarKind.LARK, 'start: literal_0 "<|im_start|>"\nliteral_0: "a<|im_start|>b"\n')
    text, harness = answer(grammar)
    assert harness.tokens[1][:3] == [ord("a"), IM_START, ord("b")]
    assert text == "ab<|im_start|>"


# --- waiting --------------------------------------------------------------------------------------------------------


class SlowCompiler:
    """Holds every compilation back until `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        self.n_compiled = 0
        from localrun.engine.sample import grammars as grammar_compiler

        compile_now = grammar_compiler._compile

        def compile_later(*arguments: Any) -> Any:
            self.release.wait(30)
            self.n_compiled += 1
            return compile_now(*arguments)

        monkeypatch.setattr(grammar_compiler, "_compile", compile_later)


def test_a_request_waits_for_its_grammar_while_others_pass_it(monkeypatch: pytest.MonkeyPatch):
    compiler = SlowCompiler(monkeypatch)
    harness = Harness(n_slots=1)
    harness.submit(1, "first", grammar=DIGITS, n_predict=40)
    harness.submit(2, "second", n_predict=5)
    while 2 not in harness.finals:
        harness.step()
    assert not harness.engine.is_idle
    assert 1 not in harness.texts
    compiler.release.set()
    harness.run()
    assert harness.texts[1].isdecimal()


def test_a_request_is_cancelled_while_its_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch):
    compiler = SlowCompiler(monkeypatch)
    harness = Harness()
    harness.submit(1, "first", grammar=DIGITS)
    harness.step()
    harness.engine.cancel(1)
    harness.run()
    assert harness.finals[1].finish is Finish.CANCELLED
    assert harness.backend.n_open_samplers == 0
    compiler.release.set()


def test_a_grammar_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammars, "COMPILE_LIMIT_S", 1)
    harness = Harness(n_cells=2048)
    harness.submit(1, "slow", grammar=SLOW)
    harness.submit(2, "free", n_predict=5)
    harness.submit(3, "other", grammar=DIGITS, n_predict=40)
    harness.run(max_steps=20_000)
    assert harness.finals[1].error_code == "bad_request"
    assert "takes more than 1 s to compile; make it smaller" in (harness.finals[1].error_message or "")
    assert harness.tokens[2] == expected_output(list(b"free"), 5)
    assert len(harness.texts[3]) == 30, harness.finals[3]


def test_a_grammar_that_would_crash_its_compiler_fails_its_request_alone():
    harness = Harness(n_cells=2048)
    harness.submit(1, "deep", grammar=DEEP)
    harness.submit(2, "free", n_predict=5)
    harness.run(max_steps=20_000)
    assert harness.finals[1].error_code == "bad_request"
    assert "is nested more deeply, than it may; make it smaller" in (harness.finals[1].error_message or "")
    assert harness.tokens[2] == expected_output(list(b"free"), 5)


def test_what_nobody_wants_any_more_is_given_up_while_it_is_compiled():
    harness = Harness(n_cells=2048)
    harness.submit(1, "slow", grammar=SLOW, client="gone")
    worker = worker_at_work(harness)
    harness.engine.cancel(1)
    harness.submit(2, "after", grammar=DIGITS, n_predict=40, client="gone")
    harness.run(max_steps=20_000)
    assert len(harness.texts[2]) == 30, harness.finals[2]
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)  # a thread ends it


def test_a_worker_that_somebody_ends_costs_nobody_an_answer(monkeypatch: pytest.MonkeyPatch):
    for limit in ("COMPILE_LIMIT_S", "_LONGEST_S"):  # what a slow machine takes is no fault of the grammar
        monkeypatch.setattr(grammars, limit, 600)
    harness = Harness(n_cells=2048)
    harness.submit(1, "slow", grammar=chains(800), n_predict=400)
    worker_at_work(harness).kill()
    harness.submit(2, "other", grammar=DIGITS, n_predict=40)
    harness.run(max_steps=50_000)
    assert len(harness.texts[2]) == 30, harness.finals[2]
    assert harness.finals[1].error_message is None
    assert (harness.finals[1].finish, harness.texts[1][:9]) == (Finish.LENGTH, "xxxxxxxxx")


def worker_at_work(harness: Harness) -> psutil.Process:
    """The process that compiles, once it computes."""
    us = psutil.Process()
    while True:
        harness.step()
        for child in us.children():
            with suppress(psutil.Error):  # one that has ended
                if any("grammar_worker" in part for part in child.cmdline()) and child.cpu_times().user > 0.3:
                    return child


def test_a_grammar_is_compiled_once_for_all(monkeypatch: pytest.MonkeyPatch):
    compiler = SlowCompiler(monkeypatch)
    compiler.release.set()
    harness = Harness(n_cells=2048)
    for request_id in range(6):
        harness.submit(request_id, f"prompt {request_id}", n_predict=40, grammar=DIGITS)
    harness.run()
    assert compiler.n_compiled == 1
    assert len({harness.texts[request_id] for request_id in range(6)}) == 6
    assert all(harness.texts[request_id].isdecimal() for request_id in range(6))


class HeldBack:
    """Each compilation waits until it is let go by its text; which have begun is known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        compile_now = grammars._compile

        def compile_later(compiling: Any, vocabulary: Any) -> None:
            self.begun.append(compiling.grammar.text)
            assert self.gates.setdefault(compiling.grammar.text, threading.Event()).wait(30)
            compile_now(compiling, vocabulary)

        monkeypatch.setattr(grammars, "_compile", compile_later)

    def let_go(self, *texts: str) -> None:
        for text in texts:
            self.gates.setdefault(text, threading.Event()).set()


def digits(count: int) -> Grammar:
    return Grammar(GrammarKind.REGEX, f"[0-9]{{{count}}}")


def test_a_client_s_slow_grammars_keep_only_itself_waiting(monkeypatch: pytest.MonkeyPatch):
    held = HeldBack(monkeypatch)
    harness = Harness(n_slots=8, n_cells=2048)
    for number in range(6):
        harness.submit(number, "p", grammar=digits(10 + number), n_predict=40, client="greedy")
    harness.submit(6, "p", grammar=digits(20), n_predict=40, client="other")
    held.let_go(digits(20).text)
    while 6 not in harness.finals:
        harness.step()
    assert (harness.finals[6].finish, len(harness.texts[6])) == (Finish.STOP, 20)
    assert sorted(held.begun) == [digits(10).text, digits(20).text], "one thread for the one, the other is free"
    held.let_go(*(digits(10 + number).text for number in range(6)))
    harness.run()
    assert [len(harness.texts[number]) for number in range(6)] == [10 + number for number in range(6)]


def endless(number: int) -> Grammar:
    """More states than there is memory for, which it takes many seconds to fill."""
    patterns = [{"pattern": f"(a|b){{{n}}}c"} for n in range(5, 35)]
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "minLength": number, "allOf": patterns}))


@pytest.mark.parametrize("client", ["greedy", "other"])
def test_a_quick_grammar_waits_for_no_slow_one_of_its_own_client_neither(
    monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    monkeypatch.setattr(grammars, "SLOW_S", 0.2)
    for limit in ("COMPILE_LIMIT_S", "_LONGEST_S"):  # none of them ends by itself
        monkeypatch.setattr(grammars, limit, 600)
    harness = Harness(n_slots=8, n_cells=2048)
    for number in range(4):
        harness.submit(number, "p", grammar=endless(number), client="greedy")
    for number in range(4, 8):
        harness.submit(number, "p", grammar=digits(10 + number), n_predict=40, client=client)
    while not all(number in harness.finals for number in range(4, 8)):
        harness.step()
    assert not harness.finals.keys() >= {0, 1, 2, 3}
    for number in range(3):  # while they run, while they wait again, and while they are put off
        harness.engine.cancel(number)
        harness.step()
    monkeypatch.setattr(grammars, "SLOW_S", 0.0)  # from now on all are
    harness.submit(8, "p", grammar=digits(30), n_predict=40, client="other")
    for _ in range(20):
        harness.step()
    harness.engine.cancel(3)
    harness.run(max_steps=50_000)
    assert len(harness.texts[8]) == 30, harness.finals[8]


def test_a_grammar_that_nobody_waits_for_is_not_compiled(monkeypatch: pytest.MonkeyPatch):
    held = HeldBack(monkeypatch)
    harness = Harness(n_slots=8, n_cells=2048)
    for number in range(4):
        harness.submit(number, "p", grammar=digits(10 + number), n_predict=40, client="gone")
    harness.submit(4, "p", grammar=digits(12), n_predict=40, client="gone")
    harness.step()
    for number in range(4):
        harness.engine.cancel(number)
    held.let_go(digits(10).text, digits(12).text)
    harness.run()
    assert harness.finals[4].error_message is None, "somebody else wants one of them"
    assert harness.texts[4].isdecimal()
    assert sorted(held.begun) == [digits(10).text, digits(12).text]


def test_an_engine_that_ends_loses_no_worker():
    """Nor one whose thread had not begun: of two threads one reads the vocabulary, and the first grammar has one."""
    workers = {GrammarChecker(), GrammarChecker()}
    GrammarChecker._idle += workers  # of which the last ones are borrowed first
    compiler = grammars.GrammarCompiler(Harness().backend, lambda: None)
    for client in ("one", "two"):
        compiler.leave(compiler.compile(Grammar(GrammarKind.REGEX, client), client))
    compiler.close()
    assert workers <= set(GrammarChecker._idle)


# --- slow grammars --------------------------------------------------------------------------------------------------


class SlowGrammars:
    """Every constrained token counts as slow, and is chosen only while `gate` is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        choose = Constraint.choose

        def choose_slowly(constraint: Constraint, *arguments: Any, **named: Any) -> int:
            assert self.gate.wait(30)
            return choose(constraint, *arguments, **named)

        monkeypatch.setattr(Constraint, "choose", choose_slowly)
        monkeypatch.setattr(Constraint, "is_slow", True)


def test_a_busy_machine_makes_no_grammar_slow(monkeypatch: pytest.MonkeyPatch):
    """A thread that never rests takes the interpreter's lock whenever a mask lets it go, for 5 ms each time."""
    were_slow: list[bool] = []
    choose = Constraint.choose

    def choose_and_look(constraint: Constraint, *arguments: Any, **named: Any) -> int:
        token = choose(constraint, *arguments, **named)
        were_slow.append(constraint.is_slow)
        return token

    def never_rest() -> None:
        while not is_over.is_set():
            pass

    monkeypatch.setattr(Constraint, "choose", choose_and_look)
    is_over = threading.Event()
    threading.Thread(target=never_rest).start()
    try:
        answer(DIGITS, sampling=Sampling(temperature=1))
    finally:
        is_over.set()
    assert were_slow.count(True) <= len(were_slow) // 2  # a page fault may take long
    assert len(were_slow) == 30


@pytest.mark.parametrize("n_probs", [None, 2])
def test_others_go_on_while_a_slow_grammar_chooses(monkeypatch: pytest.MonkeyPatch, n_probs: int | None):
    plain, before = answer(OBJECT, n_probs=n_probs)
    slow = SlowGrammars(monkeypatch)
    harness = Harness(n_cells=2048)
    harness.submit(1, "prompt", n_predict=400, grammar=OBJECT, n_probs=n_probs)
    harness.submit(2, "free", n_predict=50)
    while 2 not in harness.finals:
        harness.step()
    assert not harness.texts.get(1)
    slow.gate.set()
    harness.run()
    assert harness.texts[1] == plain
    assert harness.logprobs[1] == before.logprobs[1]
    assert bool(before.logprobs[1]) is (n_probs is not None)


def test_a_late_request_may_be_preempted_and_cancelled(monkeypatch: pytest.MonkeyPatch):
    plain, _ = answer(DIGITS)
    slow = SlowGrammars(monkeypatch)
    harness = Harness(n_cells=128, n_slots=1)
    harness.submit(1, "prompt", n_predict=400, grammar=DIGITS, lane=Lane.BATCH)
    for _ in range(20):
        harness.step()
    harness.submit(2, "urgent", n_predict=5, lane=Lane.INTERACTIVE)
    while 2 not in harness.finals:
        harness.step()
    slow.gate.set()
    harness.submit(3, "other", n_predict=400, grammar=DIGITS, lane=Lane.BATCH)
    while not harness.texts.get(3):
        harness.step()
    harness.engine.cancel(3)
    harness.run()
    assert harness.texts[1] == plain
    assert plain.isdecimal()
    assert harness.finals[3].finish is Finish.CANCELLED
    assert harness.backend.n_open_samplers == 0


def test_json_mode_gives_an_object():
    text, harness = answer(OBJECT, n_predict=1900)
    if harness.finals[1].finish is Finish.STOP:
        assert isinstance(json.loads(text), dict)
    assert text.startswith("{")
