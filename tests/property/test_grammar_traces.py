"""Random traces of requests with and without grammars, some of them slow, over the real scheduler on the fake backend.

Waiting for a grammar, being preempted, being sampled beside the steps, having drafts: nothing of it changes what an
answer is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrun.engine.sample import grammars
from localrun.engine.sample.constraint import Constraint
from localrun.wire import Finish, Grammar, GrammarKind, Lane
from tests.depth import DEPTH
from tests.engine.harness import Harness
from tests.engine.speculate.drafters import drafting
from tests.property.test_engine_traces import prompts, shapes

GRAMMARS = [
    None,
    Grammar(GrammarKind.REGEX, "[0-9a-f]{3,40}"),
    Grammar(GrammarKind.JSON_SCHEMA, '{"type":"array","items":{"type":"integer"}}'),
    Grammar(GrammarKind.GBNF, 'root ::= "x" root "y" | "z"'),
    Grammar(GrammarKind.REGEX, "!{5}", triggers=("e", "é")),
    Grammar(GrammarKind.REGEX, "(["),
]
events = st.one_of(
    st.tuples(
        st.just("submit"),
        prompts,
        st.integers(0, 24),
        st.sampled_from(GRAMMARS),
        st.sampled_from(list(Lane)),
        st.booleans(),
    ),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
)


@cache
def alone(
    prompt: tuple[int, ...], n_predict: int, grammar: Grammar | None, ignore_eos: bool
) -> tuple[list[int], Finish]:
    """Tokens and end of a request that has an engine for itself."""
    harness = Harness(n_cells=2048)
    harness.submit(0, list(prompt), n_predict=n_predict, grammar=grammar, ignore_eos=ignore_eos)
    harness.run()
    finish = harness.finals[0].finish
    assert finish is not None
    return harness.tokens.get(0, []), finish


@pytest.fixture(autouse=True, scope="module")
def no_limit_of_time() -> Iterator[None]:
    """What a busy machine takes is no fault of a grammar."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(grammars, "COMPILE_LIMIT_S", 600)
        changed.setattr(grammars, "_LONGEST_S", 600)
        yield


@given(shapes, st.lists(events, max_size=25), st.booleans(), st.none() | st.integers(0, 1 << 20))
@settings(max_examples=30 * DEPTH, suppress_health_check=[HealthCheck.too_slow])
def test_every_trace_ends_clean_and_every_answer_is_what_it_is_alone(shape, trace, is_slow, drafts_seed):
    shape = {**shape, "n_cells": 512}
    asked = {}
    with patch.object(Constraint, "is_slow", property(lambda constraint: is_slow)):
        harness = Harness(**shape, speculation=None if drafts_seed is None else drafting(drafts_seed, 0.5))
        for event in trace:
            if event[0] == "submit":
                _, prompt, n_predict, grammar, lane, ignore_eos = event
                asked[len(asked)] = (tuple(prompt), n_predict, grammar, ignore_eos)
                harness.submit(
                    len(asked) - 1, prompt, n_predict=n_predict, grammar=grammar, lane=lane, ignore_eos=ignore_eos
                )
            elif event[0] == "step":
                for _ in range(event[1]):
                    harness.step()
            else:
                harness.engine.cancel(event[1])
        harness.run()
        harness.engine.close()
    assert set(harness.finals) == set(asked), "a request without an end"
    for request_id, request in asked.items():
        final = harness.finals[request_id]
        tokens, finish = alone(*request)
        if final.error_code == "queue_full":
            continue
        got = harness.tokens.get(request_id, [])
        assert got == tokens[: len(got)], "an answer differs from the request's own"
        if final.finish is not Finish.CANCELLED:
            assert (got, final.finish) == (tokens, finish), final.error_message
    assert harness.backend.n_open_samplers == 0, "a sampler leaked"
    assert not harness.engine.scheduler.running
    assert not harness.engine.scheduler.waiting
