"""Drafts over llama.cpp: the same answers with and without, whatever samples them and wherever cells lie."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun.engine.engine import Limits
from localrun.engine.native.llama import LlamaBackend
from localrun.engine.speculate.speculation import Speculation
from localrun.wire import Delta, DraftSource, Finish, Grammar, GrammarKind, Sampling, Submit
from tests.engine.conftest import open_tiny
from tests.engine.speculate.drafters import any_rows
from tests.engine.stepped import SteppedEngine

N_STREAMS, N_TOKENS = 3, 60
ROUNDING = 0.02  # of a log-probability
RECORDS = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"type":"array","minItems":3,"maxItems":3,"items":{"type":"object","additionalProperties":false,'
    '"required":["name","isMember"],"properties":{"name":{"type":"string","maxLength":5},'
    '"isMember":{"type":"boolean"}}}}',
)
SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "drawn": Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=5),
    "penalized": Sampling(temperature=0.8, top_p=0.9, repeat_penalty=1.2, presence_penalty=0.3, seed=6),
    "mirostat": Sampling(temperature=1.0, mirostat=2, seed=7),
    "dry": Sampling(temperature=0, dry_multiplier=2.0, dry_allowed_length=1, dry_penalty_last_n=-1),
    "dry and xtc": Sampling(
        temperature=0.9,
        top_k=40,
        dry_multiplier=0.8,
        dry_penalty_last_n=-1,
        xtc_probability=0.5,
        xtc_threshold=0.05,
        top_n_sigma=3.0,
        seed=8,
    ),
}
LAYOUTS = {
    "one pool": {},
    "split": {"may_split": True},
}


@pytest.fixture(scope="module", params=LAYOUTS)
def backend(request: pytest.FixtureRequest, tiny_gguf: Path) -> Iterator[LlamaBackend]:
    opened = open_tiny(tiny_gguf, n_cells=2048, n_seqs=4, **LAYOUTS[request.param])
    yield opened
    opened.close()


def answers(
    backend: LlamaBackend, speculation: Speculation, submits: list[Submit], known: dict[int, Delta] | None = None
) -> dict[int, Delta]:
    """All that is said of each request, in one delta. Much of an answer that is `known` is predicted."""
    engine = SteppedEngine(backend, Limits(4, 8, 0.0, 0), time.monotonic, speculation=speculation)
    said: dict[int, Delta] = {}
    for submit in submits:
        prediction = [token if at % 8 else 300 for at, token in enumerate(known[submit.id].tokens)] if known else []
        engine.submit(submit, [256 + (submit.id * 37 + at * 11) % 300 for at in range(20)], prediction)
    while not engine.is_idle:
        step = engine.step()
        for delta in step.deltas if step is not None else ():
            whole = said.setdefault(delta.id, Delta(delta.id, delta.phase, 0, 0, "", [], []))
            whole.text += delta.text
            whole.tokens += delta.tokens
            whole.logprobs = [*(whole.logprobs or []), *(delta.logprobs or [])]
            whole.finish, whole.usage, whole.n_drafted = delta.finish, delta.usage, delta.n_drafted
    engine.close()
    backend.rebuild()
    return said


def check_alike(now: Delta, was: Delta) -> int:
    """The same tokens, each with the same probabilities up to rounding, until a draw fell on the other side of one that
    is as near as that: other numbers of rows are computed by other kernels. Returns how many tokens are the same."""
    assert now.logprobs is not None
    assert was.logprobs is not None
    assert [chosen.token for chosen in now.logprobs] == now.tokens
    for at, (one, other) in enumerate(zip(now.logprobs, was.logprobs, strict=False)):
        others = {top.token: top.logprob for top in other.top}
        for top in one.top:
            assert top.logprob == pytest.approx(others.get(top.token, top.logprob), abs=ROUNDING)
        if one.token != other.token:
            return at
    assert (now.tokens, now.text, now.finish) == (was.tokens, was.text, was.finish)
    return len(now.tokens)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_answers_are_the_same_with_drafts(backend: LlamaBackend, sampling: str):
    submits = [
        Submit(
            id=number, sampling=SAMPLINGS[sampling], n_predict=N_TOKENS, ignore_eos=True, logprobs=True, n_probs=5
        )
        for number in range(N_STREAMS)
    ]  # fmt: skip
    plain = answers(backend, Speculation(backend, time.monotonic, is_on=False), submits)
    drafted = answers(backend, Speculation(backend, time.monotonic, policy=any_rows(3)), submits, plain)
    n_same = sum(check_alike(drafted[number], plain[number]) for number in plain)
    assert n_same > N_STREAMS * N_TOKENS / 8
    assert sum(answer.n_drafted for answer in drafted.values()) > N_TOKENS / 4


def test_logits_that_stay_on_the_device_are_enough_for_drafts(tiny_gguf: Path):
    backend = open_tiny(tiny_gguf, n_cells=2048, n_seqs=4, samples_on_device=True)
    submits = [Submit(id=number, sampling=SAMPLINGS["greedy"], n_predict=N_TOKENS) for number in range(N_STREAMS)]
    plain = answers(backend, Speculation(backend, time.monotonic, is_on=False), submits)
    drafted = answers(backend, Speculation(backend, time.monotonic, policy=any_rows(3)), submits, plain)
    n_same = sum(drafted[number].tokens == was.tokens for number, was in plain.items())
    backend.close()
    assert n_same >= N_STREAMS - 1


def test_a_grammar_forces_drafts_and_the_answer_stays_its_own(backend: LlamaBackend):
    submits = [
        Submit(
            id=number, sampling=Sampling(temperature=0.9, seed=number), n_predict=200, grammar=RECORDS, logprobs=True,
            n_probs=2,
        )
        for number in range(N_STREAMS)
    ]  # fmt: skip
    plain = answers(backend, Speculation(backend, time.monotonic, is_on=False), submits)
    drafted = answers(backend, Speculation(backend, time.monotonic, policy=any_rows(4)), submits)
    for number, was in plain.items():
        now = drafted[number]
        check_alike(now, was)
        if now.finish is Finish.STOP:
            json.loads(now.text)
        assert now.usage is not None
        accepted = {counts.source: counts.n_accepted for counts in now.usage.drafts}
        assert accepted[DraftSource.GRAMMAR] > 0
        assert now.n_drafted == sum(counts.n_drafted for counts in now.usage.drafts)
