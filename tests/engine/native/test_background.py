"""The background's books: who has a place, whose rows a batch has, and what becomes of those who leave."""

from __future__ import annotations

from random import Random
from weakref import WeakKeyDictionary

import pytest

from localrun.engine.backend import AdapterSet, Batch, DecodeFailed, NoRoom
from localrun.engine.request import Request
from localrun.engine.sample.text import TextStream
from localrun.engine.schedule.background import BATCH_S, BackgroundPrefill
from localrun.engine.schedule.budget import TILE_ROWS, CostModel
from localrun.wire import Sampling
from tests.fakes.backend import FakeBackend, FakeWorker

N_SLOTS, N_PLACES = 4, 3
PROMPT = [97 + at % 20 for at in range(200)]


def opened(*, n_batch: int = 64, looks: int = 1, worker: type[FakeWorker] = FakeWorker) -> FakeBackend:
    return FakeBackend(
        n_cells=4096, n_seqs=9, n_batch=n_batch, n_slots=N_SLOTS, n_background_seqs=N_PLACES, background_looks=looks,
        worker=worker,
    )  # fmt: skip


_backgrounds: WeakKeyDictionary[FakeBackend, BackgroundPrefill] = WeakKeyDictionary()


def of(backend: FakeBackend) -> BackgroundPrefill:
    return _backgrounds.setdefault(backend, BackgroundPrefill(lambda: backend.worker, CostModel()))


def add(backend: FakeBackend, index: int, tokens: list[int] = PROMPT) -> Request:
    sampler = backend.sampler(Sampling(), ignore_eos=True)
    request = Request(index, list(tokens), len(tokens), 1, sampler, TextStream(()), client=f"client {index}")
    request.seq = backend.n_seqs + index
    of(backend).add(request)
    return request


def test_only_a_long_way_to_go_is_taken_and_only_while_there_is_a_place():
    backend = opened()
    assert not of(backend).takes(64, 64)
    for index in range(N_PLACES):
        assert of(backend).takes(65, 64)
        request = add(backend, index)
        assert request.skips_steps
        assert request in of(backend)
    assert not of(backend).takes(65, 64)


def test_a_prompt_is_computed_but_for_its_last_token():
    backend = opened()
    request = add(backend, 0)
    while request.n_pending > 1:
        of(backend).begin(None)
        is_last = request.n_pending <= 65
        assert bool(of(backend).completes) is is_last
        assert of(backend).is_over
        done = of(backend).collect()
        (grant,) = done.grants
        assert grant.request is request
        assert done.seqs == [request.seq] * grant.n_tokens
        assert (done.is_computed, done.left) == (True, ())
        request.n_computed += grant.n_tokens
    assert backend.tokens_of(request.seq) == PROMPT[:-1]
    of(backend).begin(None)
    assert not of(backend).is_busy, "there is nothing more to do"


def test_nothing_begins_beside_a_batch_or_without_a_prompt():
    backend = opened(looks=10)
    of(backend).begin(None)
    assert not of(backend).is_busy
    assert not of(backend).is_over
    assert of(backend).halt() is None
    add(backend, 0)
    of(backend).begin(None)
    before = backend.worker.n_looks_left
    of(backend).begin(None)
    assert backend.worker.n_looks_left == before


def test_who_leaves_between_batches_leaves_at_once():
    backend = opened()
    request = add(backend, 0)
    assert of(backend).drop(request)
    assert not request.skips_steps
    assert request not in of(backend)


def test_who_leaves_a_batch_that_others_wait_for_leaves_its_sequence_to_that():
    backend = opened(n_batch=128)
    first, second, third = (add(backend, index) for index in range(3))
    of(backend).begin(None)
    assert not of(backend).is_for_nobody_but(first)
    assert not of(backend).drop(first)
    assert not of(backend).takes(65, 64), "its place is free when the batch is over"
    assert not of(backend).drop(third)
    assert of(backend).is_for_nobody_but(second)
    assert of(backend).is_over
    done = of(backend).collect()
    assert [grant.request for grant in done.grants] == [second]
    assert {left.seq: left.n_after - left.n_before for left in done.left} == {
        request.seq: done.seqs.count(request.seq) for request in (first, third)
    }
    tokens = {request.seq: request.tokens for request in (first, third)}
    for left in done.left:
        assert backend.tokens_of(left.seq) == tokens[left.seq][: left.n_after]
    assert of(backend).takes(65, 64)


@pytest.mark.parametrize("is_halted", [True, False])
def test_of_a_batch_that_was_not_computed_it_is_said(is_halted: bool):
    class Fails(FakeWorker):
        def finish(self) -> None:
            self.halt()
            raise DecodeFailed("broken off", is_fatal=True)

    backend = opened(worker=Fails, n_batch=128)
    request, other = add(backend, 0), add(backend, 1)
    of(backend).begin(None)
    of(backend).drop(other)
    done = of(backend).halt() if is_halted else of(backend).collect() if of(backend).is_over else None
    assert done is not None
    assert not done.is_computed
    assert (done.error is None) is is_halted
    assert [grant.request for grant in done.grants] == [request]
    assert [(left.seq, left.n_before) for left in done.left] == [(other.seq, 0)]
    assert not of(backend).is_busy


def test_no_room_in_a_stream_of_ones_own_is_a_failure_like_others():
    class Full(FakeWorker):
        def finish(self) -> None:
            self.halt()
            raise NoRoom("none")

    backend = opened(worker=Full)
    add(backend, 0)
    of(backend).begin(None)
    assert of(backend).is_over
    error = of(backend).collect().error
    assert error is not None
    assert error.is_fatal


# --- how many rows -------------------------------------------------------------------------------------------------


class Unlimited:
    """A `background.Worker` that computes nothing, for prompts of any length."""

    def __init__(self) -> None:
        self.batch = Batch(1024)
        self.first_seq, self.n_seqs = 0, N_PLACES
        self.is_busy, self.computed_s = False, 0.0

    def use(self, adapters: AdapterSet) -> None:
        pass

    def start(self, n_rows: int) -> None:
        self.is_busy = True

    def is_over(self, timeout_s: float = 0.0) -> bool:
        return True

    def finish(self) -> None:
        self.is_busy = False

    halt = finish


def unlimited(cost: CostModel) -> BackgroundPrefill:
    worker = Unlimited()
    return BackgroundPrefill(lambda: worker, cost)


def n_rows_of(background: BackgroundPrefill, depth: int, target_s: float | None, *, n_new: int = 10_000) -> int:
    """The rows that a prompt with so many more tokens than its last gets in a batch behind `depth` tokens."""
    prompt = [70] * (depth + n_new + 1)
    request = Request(0, prompt, len(prompt), 1, None, TextStream(()))
    request.seq, request.n_computed = 0, depth
    background.add(request)
    background.begin(target_s)
    done = background.halt()
    background.drop(request)
    return len(done.seqs)


class Machine:
    """Rows take `base_s` a batch and `row_s` each, give or take, and a background has learned it."""

    def __init__(self, *, base_s: float = 0.01, row_s: float = 0.002, deep_s: float = 0.0) -> None:
        self.base_s, self.row_s, self.deep_s = base_s, row_s, deep_s
        self.cost = CostModel()
        self.background = unlimited(self.cost)
        random = Random(1)
        for _ in range(300):
            n_rows, depth = random.choice([128, 256, 512, 1024]), random.choice([0, 1024, 4096])
            self.observe(n_rows, depth, random.uniform(0.95, 1.05))

    def batch_s(self, n_rows: int, depth: float) -> float:
        return self.base_s + n_rows * (self.row_s + self.deep_s * (depth + n_rows / 2) / 1024)

    def observe(self, n_rows: int, depth: float, times: float = 1.0) -> None:
        self.cost.observe(n_rows, depth, times * self.batch_s(n_rows, depth))

    def rows(self, target_s: float | None) -> int:
        return n_rows_of(self.background, 0, target_s)


def test_a_batch_takes_what_it_computes_in_its_time():
    machine = Machine()
    rows = machine.rows(None)
    assert rows % TILE_ROWS == 0
    assert machine.batch_s(rows, 0) <= BATCH_S < machine.batch_s(rows + 2 * TILE_ROWS, 0)
    for _ in range(30):
        machine.observe(rows, 0, 2.0)
    assert machine.rows(None) < rows


@pytest.mark.parametrize("n_more", [0, 1, 63, 64])
def test_the_rest_of_a_prompt_is_at_least_a_tile_or_is_computed_with_what_is_before_it(n_more: int):
    """Kernels compute fewer rows than a tile one by one."""
    slow, quick = Machine(), Machine(row_s=0.0001)
    rows = slow.rows(None)
    assert quick.rows(None) == 1024, "all that a batch holds"
    assert n_rows_of(slow.background, 0, None, n_new=rows + n_more) == (rows + n_more if n_more < TILE_ROWS else rows)
    taken = n_rows_of(quick.background, 0, None, n_new=1024 + n_more)
    assert taken == (1024 if n_more in (0, TILE_ROWS) else 1024 - TILE_ROWS)


def test_beside_streams_in_a_hurry_it_takes_less_at_once():
    machine = Machine(row_s=0.0005)
    rows = [machine.rows(target_s) for target_s in (0.02, 0.05, 1.0)]
    assert rows == sorted(set(rows))


def test_what_a_batch_took_is_learned_and_outlives_the_worker():
    backend = opened()
    for index in range(N_PLACES):
        add(backend, index)
    unknown = of(backend).recompute_s(0, 100)
    for _ in range(4):
        of(backend).begin(None)
        assert of(backend).is_over
        for request, n_tokens, _ in of(backend).collect().grants:
            request.n_computed += n_tokens
    learned = of(backend).recompute_s(0, 100)
    assert learned != unknown
    backend.rebuild()
    assert of(backend).recompute_s(0, 100) == learned


def test_a_depth_that_was_never_seen_is_tried_with_fewer_rows_and_then_known():
    cost = CostModel()
    background = unlimited(cost)
    rows = [n_rows_of(background, depth, 0.14) for depth in (0, 4096, 30_000)]
    assert rows == [512, 64, 64], "a single operation of so deep a batch cannot be interrupted"
    cost.observe(64, 4096, 0.05)
    assert n_rows_of(background, 4096, 0.14) == 512
