"""The step loop on the fake backend: what a request and its neighbours notice."""

from __future__ import annotations

import pytest

from localrun.engine.backend import DecodeFailed, NoRoom
from localrun.wire import Finish, Lane, Phase, Sampling
from tests.engine.harness import Harness, expected_output
from tests.fakes.backend import FakeBackend

LONG = [ord("p")] * 150


class Failing(FakeBackend):
    """Raises `error` at the decodes listed in `at`."""

    def __init__(self, backend: FakeBackend, at: set[int], error: Exception) -> None:
        super().__init__(n_cells=backend.n_cells, n_seqs=backend.n_seqs, n_batch=backend.batch.capacity)
        self.at, self.error, self.n_decodes = at, error, 0

    def decode(self, n_rows: int) -> None:
        self.n_decodes += 1
        if self.n_decodes not in self.at:
            super().decode(n_rows)
            return
        if isinstance(self.error, DecodeFailed) and self.error.is_fatal:
            # llama.cpp gives cells to the rows, computes, and takes the rows out again where computing failed.
            super().decode(n_rows)
            for seq in set(self.batch.seq[:n_rows].tolist()):
                self.seq_remove(seq, int(self.batch.pos[:n_rows][self.batch.seq[:n_rows] == seq].min()))
        raise self.error


def test_a_request_generates_its_tokens_and_reports_its_counts():
    harness = Harness()
    harness.submit(1, "hello", n_predict=10)
    harness.run()
    final = harness.finals[1]
    assert harness.tokens[1] == expected_output(list(b"hello"), 10)
    assert final.finish is Finish.LENGTH
    assert (final.usage.n_prompt, final.usage.n_cached, final.usage.n_output) == (5, 0, 10)
    assert final.usage.prefill_s > 0
    assert final.usage.decode_s > 0


def test_requests_join_and_leave_between_steps():
    harness = Harness()
    harness.submit(1, "first", n_predict=20)
    for _ in range(5):
        harness.step()
    harness.submit(2, "second", n_predict=3)
    harness.run()
    shared_steps = [step for step in harness.steps if {d.id for d in step.deltas} == {1, 2}]
    assert len(shared_steps) == 3, "three tokens of the second came in steps with the first"
    assert harness.tokens[1] == expected_output(list(b"first"), 20)
    assert harness.tokens[2] == expected_output(list(b"second"), 3)


def test_every_running_stream_gets_a_token_in_every_step_while_a_long_prompt_comes_in():
    harness = Harness(n_cells=1024, n_batch=32, target_itl_s=0.1)
    harness.submit(1, "stream", n_predict=100)
    harness.step()
    harness.submit(2, [ord("x")] * 400, n_predict=1)
    while 2 not in harness.finals:
        step = harness.step()
        assert any(delta.id == 1 and delta.tokens for delta in step.deltas), "the stream missed a step"
    prefill_steps = [step for step in harness.steps if step.stats.n_prefill_rows]
    assert len(prefill_steps) > 10, "the prompt came in chunks"


def test_a_short_prompt_does_not_wait_for_a_long_one():
    harness = Harness(n_cells=2048, n_batch=64)
    harness.submit(1, [ord("l")] * 1000, n_predict=1)
    harness.submit(2, "short", n_predict=1)
    harness.run()
    order = [delta.id for step in harness.steps for delta in step.deltas if delta.finish]
    assert order == [2, 1]


def test_two_cold_requests_with_a_common_prefix_compute_it_once():
    harness = Harness(n_cells=1024)
    harness.submit(1, LONG + list(b"one"), n_predict=4)
    harness.submit(2, LONG + list(b"two"), n_predict=4)
    harness.submit(3, LONG + list(b"six"), n_predict=4)
    harness.run()
    n_outputs_computed = 3 * 3  # the last token of each output is never computed
    assert harness.backend.n_rows_computed == len(LONG) + 3 * 3 + n_outputs_computed
    assert harness.finals[1].usage.n_cached == 0
    assert harness.finals[2].usage.n_cached == len(LONG)


def test_a_running_prompt_is_shared_and_its_cells_are_counted_once():
    harness = Harness(n_cells=1024)
    harness.submit(1, LONG, n_predict=50)
    for _ in range(6):
        harness.step()
    harness.submit(2, LONG + list(b"!"), n_predict=2)
    harness.step()
    assert harness.steps[-1].stats.kv_cells_shared == len(LONG)
    harness.run()
    assert harness.finals[2].usage.n_cached == len(LONG)


def test_a_returning_conversation_computes_only_what_is_new():
    harness = Harness(n_cells=1024)
    harness.submit(1, LONG, n_predict=10)
    harness.run()
    assert harness.backend.n_used == 0, "an idle prefix lives in memory"
    follow_up = LONG + harness.tokens[1] + list(b"and then?")
    harness.submit(2, follow_up, n_predict=5)
    harness.run()
    assert harness.finals[2].usage.n_cached == len(LONG) + 9
    assert harness.tokens[2] == expected_output(follow_up, 5)


def test_the_last_prompt_token_is_always_computed():
    harness = Harness(n_cells=1024)
    for request_id in (1, 2):
        harness.submit(request_id, LONG, n_predict=5)
        harness.run()
    assert harness.finals[2].usage.n_cached == len(LONG) - 1
    assert harness.tokens[1] == harness.tokens[2]


def test_a_full_pool_preempts_and_everyone_still_gets_the_right_answer():
    harness = Harness(n_cells=256, n_slots=4)
    for request_id in range(4):
        harness.submit(request_id, [ord("a") + request_id] * 20, n_predict=90)
    harness.run()
    assert harness.steps[-1].stats.preemptions_total > 0
    for request_id in range(4):
        assert harness.tokens[request_id] == expected_output([ord("a") + request_id] * 20, 90)


def test_the_lowest_lane_is_preempted_first():
    harness = Harness(n_cells=256, n_slots=2)
    harness.submit(1, [ord("a")] * 20, n_predict=150, lane=Lane.BATCH)
    harness.step()
    harness.submit(2, [ord("b")] * 20, n_predict=150, lane=Lane.INTERACTIVE)
    harness.run()
    order = [delta.id for step in harness.steps for delta in step.deltas if delta.finish]
    assert order == [2, 1]


def test_one_request_may_use_the_whole_pool():
    harness = Harness(n_cells=256, n_slots=4)
    harness.submit(1, [ord("a")] * 20, n_predict=-1)
    harness.run()
    assert harness.finals[1].usage.n_output == 236
    assert harness.finals[1].finish is Finish.LENGTH


def test_cancel_ends_a_waiting_and_a_running_request_and_keeps_the_prefix():
    harness = Harness(n_cells=1024, n_slots=1)
    harness.submit(1, LONG, n_predict=50)
    harness.submit(2, "waiting", n_predict=50)
    for _ in range(5):
        harness.step()
    harness.engine.cancel(1)
    harness.engine.cancel(2)
    harness.engine.cancel(99)
    harness.run()
    assert harness.finals[1].finish is Finish.CANCELLED
    assert harness.finals[2].finish is Finish.CANCELLED
    harness.submit(3, LONG, n_predict=1)
    harness.run()
    assert harness.finals[3].usage.n_cached == len(LONG) - 1


@pytest.mark.parametrize(("prompt", "code"), [([], "bad_request"), ([1] * 256, "context_length_exceeded")])
def test_a_prompt_that_cannot_run_is_refused_with_a_reason(prompt, code):
    harness = Harness(n_cells=256)
    harness.submit(1, prompt)
    harness.run()
    assert harness.finals[1].finish is Finish.ERROR
    assert harness.finals[1].error_code == code


def test_a_full_queue_refuses_and_the_others_go_on():
    harness = Harness(n_slots=1, max_queue=2)
    harness.submit(0, "runs", n_predict=5)
    harness.step()
    for request_id in (1, 2, 3):
        harness.submit(request_id, "waits", n_predict=5)
    harness.run()
    assert harness.finals[3].error_code == "queue_full"
    assert [harness.finals[i].finish for i in (0, 1, 2)] == [Finish.LENGTH] * 3


def test_the_queue_is_published_when_it_changes():
    harness = Harness(n_slots=1)
    for request_id in (1, 2, 3):
        harness.submit(request_id, "x" * request_id, n_predict=3)
    harness.run()
    assert [step.queue for step in harness.steps if step.queue is not None] == [[2, 3], [3], []]


def test_an_end_token_stops_and_is_not_part_of_the_output():
    harness = Harness(n_cells=2048)
    harness.submit(1, "tell", n_predict=1000, ignore_eos=False)
    harness.run()
    assert harness.finals[1].finish is Finish.STOP
    assert harness.tokens[1] == expected_output(list(b"tell"), 1000, ignore_eos=False)


def test_a_stop_string_across_tokens_never_shows():
    harness = Harness()
    harness.submit(1, "hello", n_predict=30)
    harness.run()
    text = harness.texts[1]
    harness.submit(2, "hello", n_predict=30, stop=(text[10:14],))
    harness.run()
    assert harness.texts[2] == text[: text.find(text[10:14])]
    assert harness.finals[2].finish is Finish.STOP
    assert harness.finals[2].stop_text == text[10:14]


def test_logprobs_come_with_their_tokens():
    harness = Harness()
    harness.submit(1, "hello", n_predict=4, n_probs=3)
    harness.run()
    assert [entry.token for entry in harness.logprobs[1]] == harness.tokens[1]
    assert all(len(entry.top) == 3 for entry in harness.logprobs[1])


def test_zero_output_tokens_compute_the_prompt_only():
    harness = Harness()
    harness.submit(1, "hello", n_predict=0)
    harness.run()
    assert harness.finals[1].finish is Finish.LENGTH
    assert harness.finals[1].usage.n_output == 0
    assert harness.backend.n_rows_computed == 5


def test_progress_of_a_prefill_is_visible_step_by_step():
    harness = Harness(n_cells=1024, n_batch=64)
    harness.submit(1, LONG, n_predict=2)
    harness.run()
    progress = [delta.n_computed for step in harness.steps for delta in step.deltas if delta.phase is Phase.PREFILL]
    assert progress == sorted(progress)
    assert progress[0] == 64


def test_no_room_is_survived_although_the_books_said_otherwise():
    harness = Harness(wrap=lambda backend: Failing(backend, {3}, NoRoom("no room")))
    harness.submit(1, "one", n_predict=8)
    harness.submit(2, "two", n_predict=8)
    harness.run()
    assert harness.tokens == {1: expected_output(list(b"one"), 8), 2: expected_output(list(b"two"), 8)}


def test_a_failed_step_is_tried_again():
    harness = Harness(wrap=lambda backend: Failing(backend, {3, 4}, DecodeFailed("boom", is_fatal=True)))
    harness.submit(1, "one", n_predict=8)
    harness.run()
    assert harness.tokens[1] == expected_output(list(b"one"), 8)


def test_a_step_that_keeps_failing_ends_the_process():
    harness = Harness(wrap=lambda backend: Failing(backend, set(range(3, 99)), DecodeFailed("boom", is_fatal=True)))
    harness.submit(1, "one", n_predict=8)
    with pytest.raises(DecodeFailed):
        harness.run()


def test_a_refused_batch_fails_its_requests_and_nobody_else():
    harness = Harness(wrap=lambda backend: Failing(backend, {3}, DecodeFailed("bad batch", is_fatal=False)))
    harness.submit(1, "one", n_predict=8)
    for _ in range(4):
        harness.step()
    harness.submit(2, "two", n_predict=8)
    harness.run()
    assert harness.finals[1].finish is Finish.ERROR
    assert harness.finals[1].error_code == "engine_failed"
    assert harness.tokens[2] == expected_output(list(b"two"), 8)


def test_a_seed_repeats_and_another_seed_differs():
    harness = Harness(n_cells=1024)
    for request_id, seed in enumerate((7, 7, 8)):
        harness.submit(request_id, "hello", n_predict=12, sampling=Sampling(temperature=1.0, seed=seed))
    harness.run()
    assert harness.tokens[0] == harness.tokens[1] != harness.tokens[2]


def test_requests_that_cannot_all_end_together_do_not_start_together():
    """The pool holds two of these prompts with room to go on; a third would only be thrown out again."""
    harness = Harness(n_cells=512, n_slots=4, n_batch=64)
    for request_id in range(4):
        harness.submit(request_id, [ord("a") + request_id] * 190, n_predict=20)
    harness.run()
    assert harness.steps[-1].stats.preemptions_total == 0
    assert max(step.stats.n_running for step in harness.steps) == 2


def test_a_preempted_stream_comes_back_without_computing_anything_twice():
    harness = Harness(n_cells=512, n_slots=8, n_seqs=24)
    for request_id in range(16):
        harness.submit(request_id, [ord("a") + request_id] * 20, n_predict=200)
    harness.run()
    assert 0 < harness.steps[-1].stats.preemptions_total < 2 * 16
    assert harness.backend.n_rows_computed == 16 * (20 + 199)


def test_followers_of_a_long_prompt_hold_up_nobody_else():
    harness = Harness(n_cells=512, n_slots=4, n_batch=32)
    harness.submit(1, [ord("p")] * 300 + [1], n_predict=2)
    harness.step()
    harness.submit(2, [ord("p")] * 300 + [2], n_predict=2)
    harness.submit(3, "short", n_predict=2)
    harness.run()
    order = [delta.id for step in harness.steps for delta in step.deltas if delta.finish]
    assert order == [3, 1, 2]
    assert harness.finals[2].usage.n_cached == 300


@pytest.mark.parametrize("sampling", [Sampling(temperature=float("nan")), Sampling(logit_bias=((258, 1.0),))])
def test_sampling_that_makes_no_sense_is_refused(sampling):
    harness = Harness()
    harness.submit(1, "hello", sampling=sampling)
    harness.run()
    assert harness.finals[1].error_code == "bad_request"


def test_a_context_that_never_has_room_ends_the_process():
    harness = Harness(wrap=lambda backend: Failing(backend, set(range(3, 99)), NoRoom("no room")))
    harness.submit(1, "one", n_predict=8)
    with pytest.raises(NoRoom):
        harness.run()


def test_failures_count_only_in_a_row():
    harness = Harness(wrap=lambda backend: Failing(backend, {2, 3, 5, 6, 8, 9}, DecodeFailed("boom", is_fatal=True)))
    harness.submit(1, "one", n_predict=8)
    harness.run()
    assert harness.tokens[1] == expected_output(list(b"one"), 8)


def test_as_many_slots_as_rows_or_sequences_and_no_more():
    Harness(n_slots=12, n_seqs=12, n_batch=12)
    for shape in ({"n_batch": 11}, {"n_seqs": 11}):
        with pytest.raises(ValueError, match="12 slots"):
            Harness(**({"n_slots": 12, "n_seqs": 12, "n_batch": 12} | shape))


def test_all_streams_go_on_where_they_fill_the_whole_batch():
    harness = Harness(n_cells=2048, n_slots=12, n_seqs=12, n_batch=12)
    for request_id in range(24):
        harness.submit(request_id, [ord("a") + request_id] * 20, n_predict=30)
    harness.run()
    for request_id in range(24):
        assert harness.tokens[request_id] == expected_output([ord("a") + request_id] * 20, 30)


def test_a_prefix_too_large_for_memory_is_still_there_for_the_next_turn():
    harness = Harness(n_cells=1024, ram_cache_bytes=200)
    harness.submit(1, LONG, n_predict=10)
    harness.run()
    assert harness.engine.is_idle
    harness.submit(2, LONG + harness.tokens[1] + list(b"and then?"), n_predict=5)
    harness.run()
    assert harness.finals[2].usage.n_cached == len(LONG) + 9


def test_held_back_text_is_shown_when_the_request_is_cancelled():
    harness = Harness()
    harness.submit(1, "hello", n_predict=100)
    harness.run()
    text = harness.texts[1][:8]
    harness.submit(2, "hello", n_predict=100, stop=(text + "never",))
    while len(harness.tokens.get(2, [])) < 8:
        harness.step()
    assert harness.texts[2] == ""
    harness.engine.cancel(2)
    harness.run()
    assert harness.texts[2] == text


def test_a_pool_smaller_than_it_says_costs_victims_and_fails_nobody():
    class Smaller(FakeBackend):
        def decode(self, n_rows: int) -> None:
            if self.n_used + n_rows > 160:
                raise NoRoom("no room")
            super().decode(n_rows)

    harness = Harness(n_cells=256, wrap=lambda fake: Smaller(n_cells=256, n_seqs=fake.n_seqs, n_batch=64))
    for request_id in range(4):
        harness.submit(request_id, [ord("a") + request_id] * 20, n_predict=60)
    harness.run()
    assert harness.steps[-1].stats.preemptions_total > 0
    for request_id in range(4):
        assert harness.tokens[request_id] == expected_output([ord("a") + request_id] * 20, 60)
