"""Which rows are sampled by whom, with samplers that note the thread that they ran in."""

from __future__ import annotations

import threading

import pytest

from localrun.engine.native.sampler import LEAST_LOGITS, SamplingThreads


class Noting:
    def __init__(self, *, is_greedy: bool = False) -> None:
        self.is_greedy = is_greedy
        self.thread = ""

    def accept(self, tokens: list[int]) -> None:
        pass

    def sample(self, row: int) -> int:
        self.thread = threading.current_thread().name
        return row * 10

    def close(self) -> None:
        pass


def sampled(n_rows: int, *, n_threads: int = 3, n_vocab: int = LEAST_LOGITS, is_greedy: bool = False) -> set[str]:
    """The threads that `n_rows` rows were sampled in, all of them rightly."""
    threads = SamplingThreads(n_threads, n_vocab)
    samplers = [Noting(is_greedy=is_greedy) for _ in range(n_rows)]
    wanted = [(sampler, row + 5) for row, sampler in enumerate(samplers)]
    assert threads.sample(wanted) == [(row + 5) * 10 for row in range(n_rows)]
    threads.close()
    return {sampler.thread for sampler in samplers}


def test_rows_are_dealt_to_all_threads_and_come_back_in_order():
    names = sampled(7)
    assert threading.current_thread().name in names, "the caller does its share"
    assert len(names) > 1


@pytest.mark.parametrize(
    "alone",
    [{"n_rows": 1}, {"n_rows": 8, "is_greedy": True}, {"n_rows": 8, "n_threads": 1}, {"n_rows": 4, "n_vocab": 1000}],
)
def test_what_is_done_sooner_than_handed_over_stays_here(alone: dict[str, int]):
    assert sampled(**alone) == {threading.current_thread().name}


def test_no_rows_are_no_work():
    assert SamplingThreads(2, 10).sample([]) == []
