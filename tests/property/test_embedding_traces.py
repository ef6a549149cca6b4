"""Whatever arrives, is cancelled or fails: every request of an embedding engine ends once, with the right vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.backend import DecodeFailed
from localrun.wire import Finish, Lane, Pooling
from tests.depth import DEPTH
from tests.engine.embedding.test_engine import Harness, expected, failing

N_CTX = 90

TEXTS = st.integers(0, 120).map(lambda size: ("the words of a text " * 6)[:size])
SUBMIT = st.tuples(
    st.just("submit"),
    st.lists(TEXTS, min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from(["", "a", "b"]),
    st.sampled_from(list(Lane)),
)
ACTIONS = st.lists(
    SUBMIT | st.tuples(st.just("cancel"), st.integers(1, 8)) | st.tuples(st.just("step"), st.integers(1, 4)),
    max_size=12,
)


@settings(max_examples=50 * DEPTH)
@given(
    actions=ACTIONS,
    pooling=st.sampled_from([Pooling.MEAN, Pooling.CLS, Pooling.LAST]),
    is_whole=st.booleans(),
    n_rows=st.sampled_from([8, 32, 100]),
    n_seqs=st.sampled_from([1, 2, 8]),
    failed_calls=st.sets(st.integers(1, 12), max_size=2),
)
def test_every_request_ends_once_with_its_own_vectors(
    actions: list[Any], pooling: Pooling, is_whole: bool, n_rows: int, n_seqs: int, failed_calls: set[int]
) -> None:
    harness = Harness(pooling=pooling, n_ctx=N_CTX, n_rows=n_rows, n_seqs=n_seqs, is_whole=is_whole, max_queue=6)
    failing(harness, {call: DecodeFailed("lost", is_fatal=True) for call in failed_calls})
    sent: dict[int, tuple[list[str], bool]] = {}
    for kind, *arguments in actions:
        if kind == "submit":
            texts, truncate, client, lane = arguments
            sent[len(sent) + 1] = (texts, truncate)
            harness.submit(len(sent), *texts, truncate=truncate, client=client, lane=lane)
        elif kind == "cancel":
            harness.engine.cancel(arguments[0])
        else:
            for _ in range(arguments[0]):
                harness.step()
    harness.run()
    assert set(harness.finals) == set(sent)
    for request_id, (texts, truncate) in sent.items():
        final = harness.finals[request_id]
        vectors = harness.vectors.get(request_id, {})
        if final.finish is Finish.STOP:
            assert set(vectors) == set(range(len(texts)))
        elif final.finish is Finish.ERROR and final.error_code != "queue_full":
            assert final.error_code == "context_length_exceeded"
            assert not truncate
            assert any(len(text) + 2 > N_CTX for text in texts)
        for index, vector in vectors.items():
            assert vector.n_tokens == min(len(texts[index]) + 2, N_CTX)
            values = np.frombuffer(vector.values, "<f4")
            assert np.allclose(values, expected(texts[index][: N_CTX - 2], pooling), atol=1e-5)
