"""The embedding engine's step, on an embedder whose vectors tell what a sequence really had."""

from __future__ import annotations

import numpy as np
import pytest

from localrun.engine.backend import DecodeFailed, NoRoom
from localrun.engine.embedding.engine import EmbeddingEngine, normalised
from localrun.wire import Delta, Embed, Finish, Lane, Pooling, Step, Vector
from tests.fakes.embedder import FakeEmbedder, check_sequences, token_vector
from tests.fakes.tokens import IM_END, IM_START
from tests.says import says


class Harness:
    """`vectors` and `finals` collect what was published; every step checks all books."""

    def __init__(
        self,
        *,
        pooling: Pooling = Pooling.LAST,
        n_ctx: int = 200,
        n_rows: int = 64,
        n_seqs: int = 8,
        is_whole: bool = False,
        max_queue: int = 16,
    ) -> None:
        self.now_s = 0.0
        self.embedder = FakeEmbedder(pooling=pooling, n_ctx=n_ctx, n_rows=n_rows, n_seqs=n_seqs, is_whole=is_whole)
        self.engine = EmbeddingEngine(self.embedder, max_queue=max_queue, clock=self._clock)
        self.vectors: dict[int, dict[int, Vector]] = {}
        self.finals: dict[int, Delta] = {}
        self.steps: list[Step] = []

    def _clock(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def submit(
        self,
        request_id: int,
        *inputs: str | tuple[int, ...],
        query: str | None = None,
        truncate: bool = False,
        dimensions: int = 0,
        client: str = "",
        lane: Lane = Lane.DEFAULT,
        deadline_s: float | None = None,
    ) -> None:
        self.engine.submit(
            Embed(
                id=request_id, inputs=inputs, query=query, truncate=truncate, dimensions=dimensions, client=client,
                lane=lane, deadline_s=deadline_s, arrived_at_s=self.now_s,
            )
        )  # fmt: skip

    def step(self) -> Step | None:
        step = self.engine.step()
        check_sequences(self.engine)
        if step is None:
            return None
        self.steps.append(step)
        for delta in step.deltas:
            assert delta.id not in self.finals, "news of a request that had ended"
            for vector in delta.vectors or ():
                assert vector.index not in self.vectors.setdefault(delta.id, {}), "an input was done twice"
                self.vectors[delta.id][vector.index] = vector
            if delta.finish is not None:
                self.finals[delta.id] = delta
        return step

    def run(self) -> None:
        for _ in range(2000):
            if self.engine.is_idle:
                assert self.embedder.held == {}, "a sequence was not emptied"
                return
            self.step()
        raise AssertionError("not idle after 2000 steps")

    def values(self, request_id: int, index: int = 0) -> np.ndarray:
        return np.frombuffer(self.vectors[request_id][index].values, "<f4")


def expected(text: str, pooling: Pooling = Pooling.LAST) -> np.ndarray:
    """The vector of a text, computed without an engine."""
    tokens = [IM_START, *text.encode(), IM_END]
    rows = [token_vector(tokens[: at + 1], 8) for at in range(len(tokens))]
    pooled = {Pooling.MEAN: np.mean(rows, axis=0), Pooling.CLS: rows[0], Pooling.LAST: rows[-1]}[pooling]
    return normalised(pooled.astype(np.float32))


def test_many_inputs_are_one_step_and_each_is_as_if_alone():
    harness = Harness()
    texts = ["one", "another text", "x", "the fourth"]
    harness.submit(1, *texts)
    harness.submit(2, "of somebody else", client="other")
    harness.run()
    assert len(harness.embedder.steps) == 1
    for index, text in enumerate(texts):
        assert np.allclose(harness.values(1, index), expected(text), atol=1e-6)
    assert np.allclose(harness.values(2), expected("of somebody else"), atol=1e-6)
    assert harness.finals[1].finish is Finish.STOP
    usage = harness.finals[1].usage
    assert usage is not None
    assert usage.n_prompt == sum(len(text) + 2 for text in texts)


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.CLS, Pooling.LAST])
def test_a_long_input_goes_on_over_steps_with_the_same_result(pooling: Pooling):
    harness = Harness(pooling=pooling, n_rows=32)
    text = "a text of more tokens than a step has rows, several times over, so that it needs five of them or so"
    harness.submit(1, "short", text, "tail")
    harness.run()
    assert len(harness.embedder.steps) >= 4
    for index, one in enumerate(("short", text, "tail")):
        assert np.allclose(harness.values(1, index), expected(one, pooling), atol=1e-5)


def test_what_must_be_whole_is_whole_and_alone_where_it_exceeds_a_step():
    harness = Harness(pooling=Pooling.MEAN, n_rows=32, is_whole=True)
    long = "y" * 90
    harness.submit(1, "first", long, "last one", "z" * 20)
    harness.run()
    assert [len(step) for step in harness.embedder.steps if len(step) > 32] == [92]
    assert all(len(set(step)) == 1 for step in harness.embedder.steps if len(step) > 32)
    assert np.allclose(harness.values(1, 1), expected(long, Pooling.MEAN), atol=1e-5)


def test_only_one_long_input_is_under_way_so_that_its_cells_suffice():
    harness = Harness(n_rows=32, n_ctx=200)
    for request_id in range(1, 5):
        harness.submit(request_id, "w" * 150, client=str(request_id))
    harness.run()  # the fake refuses more tokens than it has cells for
    assert all(harness.finals[request_id].finish is Finish.STOP for request_id in range(1, 5))


def test_a_single_text_does_not_wait_for_a_thousand():
    harness = Harness(n_rows=64, n_seqs=4)
    harness.submit(1, *["some words of a document"] * 1000)
    for _ in range(5):
        harness.step()
    harness.submit(2, "a query")
    harness.step()
    assert harness.finals[2].finish is Finish.STOP
    assert 1 not in harness.finals


def test_clients_share_the_rows_and_lanes_go_first():
    harness = Harness(n_rows=32, n_seqs=1)
    harness.submit(1, *["x" * 20] * 50, client="greedy")
    harness.submit(2, *["x" * 20] * 50, client="greedy")
    harness.submit(3, *["x" * 20] * 50, client="modest")
    for _ in range(40):
        harness.step()
    done = {request_id: len(harness.vectors.get(request_id, {})) for request_id in (1, 2, 3)}
    assert abs(done[3] - done[1] - done[2]) <= 1, "each client has half"
    assert abs(done[1] - done[2]) <= 1
    harness.submit(4, *["now"] * 3, client="greedy", lane=Lane.INTERACTIVE)
    for _ in range(3):
        harness.step()
    assert harness.finals[4].finish is Finish.STOP, "the interactive lane is before all others"


def test_the_batch_lane_gets_something_in_the_end():
    harness = Harness(n_rows=32, n_seqs=1)
    harness.submit(1, *["x" * 20] * 2, lane=Lane.BATCH, client="b")
    harness.submit(2, *["x" * 20] * 500, lane=Lane.INTERACTIVE, client="a")
    for _ in range(3):
        harness.step()
    assert 1 not in harness.vectors
    harness.now_s += 60
    harness.step()
    assert 0 in harness.vectors[1]


def test_a_cancelled_request_computes_nothing_more():
    harness = Harness(n_rows=32)
    harness.submit(1, *["x" * 150] * 20)
    harness.submit(2, "stays")
    harness.step()
    harness.engine.cancel(1)
    harness.engine.cancel(99)
    n_rows = sum(len(step) for step in harness.embedder.steps)
    harness.run()
    assert harness.finals[1].finish is Finish.CANCELLED
    assert harness.finals[2].finish is Finish.STOP
    assert sum(len(step) for step in harness.embedder.steps) <= n_rows + len("stays") + 2


def test_an_input_that_is_too_long_ends_its_request_and_no_other():
    harness = Harness(n_ctx=50)
    harness.submit(1, "fine", "f" * 60)
    harness.submit(2, "fine too")
    harness.run()
    final = harness.finals[1]
    assert (final.finish, final.error_code) == (Finish.ERROR, "context_length_exceeded")
    assert final.error_message is not None
    assert says(final.error_message, "input[1]", 62, 50)
    assert harness.finals[2].finish is Finish.STOP


def test_truncation_keeps_the_beginning_and_what_stands_around_it():
    harness = Harness(n_ctx=50)
    harness.submit(1, "0123456789" * 6, truncate=True)
    harness.run()
    assert np.allclose(harness.values(1), expected("0123456789" * 4 + "01234567"), atol=1e-6)
    assert harness.vectors[1][0].n_cut == 12
    assert harness.vectors[1][0].n_tokens == 50


def test_dimensions_cut_and_normalise_again():
    harness = Harness()
    harness.submit(1, "text", dimensions=3)
    harness.run()
    whole = expected("text")
    assert np.allclose(harness.values(1), whole[:3] / np.linalg.norm(whole[:3]), atol=1e-6)


def test_token_ids_are_taken_as_they_are():
    harness = Harness()
    harness.submit(1, (IM_START, *b"hello", IM_END), (5, 400))
    harness.submit(2, (IM_START, *b"hello", IM_END))
    harness.run()
    assert np.allclose(harness.values(2), expected("hello"), atol=1e-6)
    assert harness.finals[1].error_code == "bad_request"
    assert "400 is not a token" in str(harness.finals[1].error_message)


def test_scores_are_not_normalised_and_see_the_query():
    harness = Harness(pooling=Pooling.RANK)
    harness.submit(1, "a document", "another", query="the query")
    harness.submit(2, "a document", query="another query")
    harness.run()
    tokens = [IM_START, *b"the query", IM_END, *b"a document", IM_END]
    assert harness.values(1, 0).tolist() == token_vector(tokens, 1).tolist()
    assert len({float(harness.values(1, 0)[0]), float(harness.values(1, 1)[0]), float(harness.values(2)[0])}) == 3


def test_a_model_of_another_kind_refuses():
    harness = Harness(pooling=Pooling.RANK)
    harness.submit(1, "text")
    harness.run()
    assert harness.finals[1].error_code == "bad_request"


def test_the_queue_is_bounded_and_knows_when_to_ask_again():
    harness = Harness(max_queue=2, n_rows=32)
    harness.submit(1, *["x" * 30] * 10)
    harness.step()
    harness.submit(2, "x")
    harness.submit(3, "x")
    harness.step()
    assert harness.finals[3].error_code == "queue_full"
    assert (harness.finals[3].retry_after_s or 0) > 0


def test_a_deadline_that_cannot_be_kept_is_refused_at_once():
    harness = Harness(n_rows=32)
    harness.submit(1, *["x" * 30] * 100)
    for _ in range(5):
        harness.step()
    harness.submit(2, "soon", deadline_s=0.001)
    harness.submit(3, "whenever", deadline_s=1000.0)
    harness.step()
    assert harness.finals[2].error_code == "queue_full"
    assert "later than the deadline" in str(harness.finals[2].error_message)
    harness.run()
    assert harness.finals[3].finish is Finish.STOP


class Failing(FakeEmbedder):
    """Fails at the given calls."""

    failures: dict[int, Exception]
    n_calls = 0

    def compute(self, n_rows: int) -> None:
        self.n_calls += 1
        if self.n_calls in self.failures:
            raise self.failures[self.n_calls]
        super().compute(n_rows)


def failing(harness: Harness, failures: dict[int, Exception]) -> None:
    harness.embedder.__class__ = Failing
    harness.embedder.failures = failures  # type: ignore[attr-defined]


@pytest.mark.parametrize("failure", [DecodeFailed("lost", is_fatal=True), NoRoom("full")])
def test_a_failed_step_is_tried_again_from_the_beginning_of_its_inputs(failure: Exception):
    harness = Harness(n_rows=32, pooling=Pooling.MEAN)
    failing(harness, {3: failure})
    text = "a text that needs several steps, of which the third one fails and must not be seen in the result"
    harness.submit(1, "first", text, "last")
    harness.run()
    assert harness.finals[1].finish is Finish.STOP
    for index, one in enumerate(("first", text, "last")):
        assert np.allclose(harness.values(1, index), expected(one, Pooling.MEAN), atol=1e-5)
    usage = harness.finals[1].usage
    assert usage is not None
    assert usage.n_prompt == len("first" + text + "last") + 6


def test_a_refused_batch_ends_its_requests_and_the_engine_goes_on():
    harness = Harness()
    failing(harness, {1: DecodeFailed("bad batch", is_fatal=False)})
    harness.submit(1, "text")
    harness.run()
    assert harness.finals[1].error_code == "engine_failed"
    harness.submit(2, "text")
    harness.run()
    assert harness.finals[2].finish is Finish.STOP


def test_an_engine_that_keeps_failing_gives_up():
    harness = Harness()
    failing(harness, {call: DecodeFailed("lost", is_fatal=True) for call in range(1, 9)})
    harness.submit(1, "text")
    with pytest.raises(DecodeFailed):
        harness.run()


@pytest.mark.parametrize("is_whole", [False, True])
def test_who_makes_no_numbers_spoils_nobody_else(is_whole: bool):
    harness = Harness(n_rows=32, n_seqs=4, is_whole=is_whole)
    harness.embedder.nan_tokens = {ord("#")}
    long = "a text of many more tokens than a step has rows, computed in several"
    texts = {1: ["one", long], 2: ["two", "with a # in it", "never computed"], 3: [long, "three"], 4: ["#" * 40]}
    for request_id, inputs in texts.items():
        harness.submit(request_id, *inputs, client=str(request_id))
        harness.step()
    harness.run()
    harness.submit(5, "later")
    harness.run()
    for request_id, index, text in ((1, 0, "one"), (1, 1, long), (3, 0, long), (3, 1, "three"), (5, 0, "later")):
        assert np.allclose(harness.values(request_id, index), expected(text), atol=1e-6)
    assert says(harness.finals[2].error_message, "input[1]", "NaN")
    assert says(harness.finals[4].error_message, "input", "NaN")
    for request_id in (1, 3, 5):
        usage = harness.finals[request_id].usage
        assert usage is not None
        assert usage.n_prompt == sum(len(text) + 2 for text in texts.get(request_id, ["later"]))


def test_a_doubted_input_that_is_cancelled_holds_nobody_to_one_at_a_time():
    harness = Harness(n_rows=64)
    harness.embedder.nan_tokens = {ord("#")}
    harness.submit(1, "a # here")
    harness.submit(2, "beside it", "and again")
    harness.step()
    harness.engine.cancel(1)
    harness.engine.cancel(2)
    harness.submit(3, "one", "two", "three")
    n_before = len(harness.embedder.steps)
    harness.run()
    assert len(harness.embedder.steps) == n_before + 1


def test_numbers_that_are_none_are_an_error_and_no_answer():
    harness = Harness()
    harness.embedder.vector = lambda seq: np.full(8, np.nan, np.float32)  # type: ignore[method-assign]
    harness.submit(1, "text", "more")
    harness.run()
    assert harness.finals[1].error_code == "no_numbers"
    assert "NaN" in str(harness.finals[1].error_message)


def test_statistics_count_rows_and_requests():
    harness = Harness()
    harness.submit(1, "text", "more")
    harness.step()
    stats = harness.steps[-1].stats
    assert (stats.n_prefill_rows, stats.prefill_tokens_total, stats.n_running) == (12, 12, 0)
    assert harness.steps[-1].started[0].id == 1
