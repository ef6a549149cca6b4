"""Random traces of requests over the real scheduler, cells, prefix tree and store, on the fake backend.

The fake's next token is a hash of the cells that a row really sees, so equal output means that no request saw another's
cells, a hole, or a stale position. `Harness.check` runs after every step.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.backend import MemoryKind
from localrun.engine.schedule.policy import AGING_S, STARVED_S
from localrun.wire import Finish, Lane
from tests.depth import DEPTH
from tests.engine.harness import Harness, expected_output
from tests.fakes.tokens import IM_END

# Few letters and few words make prompts that often share beginnings, and some are messages with an end.
prompts = st.lists(
    st.sampled_from([b"system ", b"ab", b"abc", b"user: ", b"z" * 40, b"q", b"message" * 6 + b"."]),
    min_size=1,
    max_size=6,
).map(lambda parts: [IM_END if letter == ord(".") else letter for letter in b"".join(parts)])
submits = st.tuples(
    st.just("submit"),
    prompts,
    st.integers(0, 24),
    st.sampled_from(["one", "two", "three"]),
    st.sampled_from(list(Lane)),
    st.booleans(),
    st.sampled_from([None, 0.0, 0.02, 1.0]),
    st.sampled_from([None, None, 0.01, 0.2, 60.0]),
)
# Beyond what lifts a waiting request by a lane, and what lets it starve.
sleeps = st.sampled_from([AGING_S, STARVED_S])
events = st.one_of(
    submits,
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("sleep"), sleeps),
)
shapes = st.fixed_dictionaries(
    {
        "n_cells": st.sampled_from([256, 320, 512]),
        "n_slots": st.integers(1, 5),
        "n_batch": st.sampled_from([32, 48, 64]),
        "n_seqs": st.integers(5, 10),
        "ram_cache_bytes": st.sampled_from([0, 600, 1 << 20]),
        "max_queue": st.sampled_from([2, 64]),
        "target_itl_s": st.sampled_from([0.0, 0.05]),
        "memory_kind": st.sampled_from([MemoryKind.ATTENTION, MemoryKind.HYBRID]),
        "is_split": st.booleans(),
        "n_background_seqs": st.integers(1, 2),
        "background_looks": st.integers(1, 4),
    }
)


@given(shapes, st.lists(events, max_size=40))
@settings(max_examples=60 * DEPTH)
def test_every_trace_ends_clean_and_every_output_is_the_request_s_own(shape, trace):
    harness = Harness(**shape)
    asked: dict[int, tuple[list[int], int, bool]] = {}
    for event in trace:
        if event[0] == "submit":
            _, prompt, n_predict, client, lane, ignore_eos, target_itl_s, deadline_s = event
            request_id = len(asked)
            asked[request_id] = (prompt, n_predict, ignore_eos)
            harness.submit(
                request_id, prompt, n_predict=n_predict, client=client, lane=lane, ignore_eos=ignore_eos,
                target_itl_s=target_itl_s, deadline_s=deadline_s,
            )  # fmt: skip
        elif event[0] == "sleep":
            harness.now_s += event[1]
        elif event[0] == "step":
            for _ in range(event[1]):
                harness.step()
        else:
            harness.engine.cancel(event[1])
    harness.run()

    # The harness refuses news after an end: there is one final delta for each.
    assert set(harness.finals) == set(asked), "a request without an end"
    for request_id, (prompt, n_predict, ignore_eos) in asked.items():
        final = harness.finals[request_id]
        if final.finish is Finish.ERROR:
            assert final.error_code in ("queue_full", "context_length_exceeded")
            continue
        n_most = min(n_predict, shape["n_cells"] - len(prompt))
        expected = expected_output(prompt, n_most, ignore_eos=ignore_eos)
        got = harness.tokens.get(request_id, [])
        assert got == expected[: len(got)], "output differs from the request's own"
        if final.finish is not Finish.CANCELLED:
            assert got == expected
            assert final.finish is (Finish.LENGTH if len(expected) == n_most else Finish.STOP)
    assert harness.backend.n_open_samplers == 0, "a sampler leaked"
    assert not harness.engine.scheduler.running
    assert not harness.engine.scheduler.waiting


@given(st.lists(prompts, min_size=8, max_size=8), st.integers(1, 24))
@settings(max_examples=40 * DEPTH)
def test_greedy_output_is_the_same_alone_and_among_seven_others(batch, n_predict):
    together = Harness(n_cells=2048, n_slots=8, n_seqs=24)
    for request_id, prompt in enumerate(batch):
        together.submit(request_id, prompt, n_predict=n_predict, client=f"client {request_id}")
    together.run()
    for request_id, prompt in enumerate(batch):
        alone = Harness(n_cells=2048, n_slots=8, n_seqs=24)
        alone.submit(0, prompt, n_predict=n_predict)
        alone.run()
        assert alone.tokens[0] == together.tokens[request_id]


@given(prompts, st.integers(1, 200), st.integers(0, 100))
@settings(max_examples=40 * DEPTH)
def test_cells_of_an_idle_engine_without_a_cache_are_all_free(prompt, n_predict, n_steps):
    harness = Harness(ram_cache_bytes=1 << 20)
    harness.submit(0, prompt, n_predict=n_predict)
    for _ in range(n_steps):
        harness.step()
    harness.engine.cancel(0)
    harness.run()
    assert harness.backend.n_used == 0, "idle prefixes belong in memory, not in cells"
