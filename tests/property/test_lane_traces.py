"""Random traces in which higher lanes keep taking slots and cells from lower ones: nobody's answer changes by it.

Outputs are compared with those of each request alone, and the harness refuses news of a request after its end.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.backend import MemoryKind
from localrun.engine.schedule.policy import AGING_S, PREEMPTION_AGE_S
from localrun.wire import Finish, Lane
from tests.depth import DEPTH
from tests.engine.harness import Harness, expected_output

arrivals = st.tuples(
    st.lists(st.sampled_from([b"system ", b"ab", b"z" * 30, b"q"]), min_size=1, max_size=4).map(b"".join),
    st.sampled_from([Lane.BATCH, Lane.BATCH, Lane.DEFAULT, Lane.INTERACTIVE]),
    st.sampled_from([None, 0.0, 0.01]),
    st.sampled_from([None, None, None, 0.05, 5.0]),
    st.integers(1, 8),
)
shapes = st.fixed_dictionaries(
    {
        "n_cells": st.sampled_from([256, 512]),
        "n_slots": st.integers(1, 3),
        "n_batch": st.sampled_from([32, 64]),
        "ram_cache_bytes": st.sampled_from([0, 600, 1 << 20]),
        "target_itl_s": st.sampled_from([0.0, 0.05]),
        "is_split": st.booleans(),
        "n_background_seqs": st.sampled_from([1, 2]),
        "abort_every": st.sampled_from([0, 1, 2, 5]),
        "memory_kind": st.sampled_from([MemoryKind.ATTENTION, MemoryKind.ATTENTION, MemoryKind.HYBRID]),
    }
)


@given(shapes, st.lists(arrivals, min_size=4, max_size=16))
@settings(max_examples=50 * DEPTH)
def test_lower_lanes_give_way_and_lose_nothing(shape, trace):
    harness = Harness(**shape)
    for request_id, (prompt, lane, target_itl_s, deadline_s, n_steps) in enumerate(trace):
        harness.submit(
            request_id, list(prompt), n_predict=30, lane=lane, client=f"client {request_id % 3}",
            target_itl_s=target_itl_s, deadline_s=deadline_s,
        )  # fmt: skip
        for _ in range(n_steps):
            harness.step()
    harness.run()

    assert set(harness.finals) == set(range(len(trace)))
    starts = Counter(started.id for step in harness.steps for started in step.started)
    for request_id, (prompt, lane, _, deadline_s, _) in enumerate(trace):
        final = harness.finals[request_id]
        if final.finish is Finish.ERROR:
            assert (deadline_s is not None, final.error_code, starts[request_id]) == (True, "queue_full", 0)
            assert final.retry_after_s is not None
            continue
        assert harness.tokens[request_id] == expected_output(list(prompt), 30)
        if lane is Lane.INTERACTIVE and shape["n_cells"] >= 512:
            assert starts[request_id] == 1, "no lane is above it"
        if shape["n_cells"] >= 512:
            assert starts[request_id] <= 1 + 2 * AGING_S / PREEMPTION_AGE_S
    assert harness.backend.n_open_samplers == 0
