"""The fake and llama.cpp, asked the same: they do the same, or refuse with the same class of error and change nothing.

Where the fake were more lenient, an engine that passes its tests could still crash. It may be stricter: it refuses
every partial removal from a window, while llama.cpp allows those of which it still has all cells.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrun.engine.backend import BASE, AdapterSet, DecodeFailed, MemoryKind, NoRoom, Worker
from localrun.engine.native.llama import LlamaBackend
from localrun.errors import BadModelFile
from localrun.wire import Adapter, Sampling
from tests.engine.conftest import n_held
from tests.engine.harness import n_seqs_away
from tests.fakes.backend import FakeBackend
from tests.lora_file import write_vector
from tests.support.synthesis.synthesize import synthesize

N_SLOTS, N_SPARE, N_BATCH = 4, 2, 128
REFUSALS = (ValueError, NoRoom, DecodeFailed, BadModelFile)
Subject = FakeBackend | LlamaBackend


@dataclass(frozen=True)
class Case:
    model: str
    kind: MemoryKind
    n_cells: int
    is_split: bool
    is_rebuilt: bool

    def __str__(self) -> str:
        return f"{self.kind}, {'split' if self.is_split else 'one pool'}{', rebuilt' * self.is_rebuilt}"


CASES = [
    Case(model, kind, n_cells, is_split, is_rebuilt)
    for model, kind, n_cells, is_split in (
        ("tiny", MemoryKind.ATTENTION, 1024, True),
        ("tiny", MemoryKind.ATTENTION, 512, False),
        ("tiny-gemma3", MemoryKind.WINDOW, 768, False),
        ("tiny-mamba", MemoryKind.RECURRENT, 512, False),
        ("tiny-lfm2", MemoryKind.HYBRID, 512, False),
    )
    for is_rebuilt in (False, True)
]


class Both:
    """The two backends. After every call they hold as much of every sequence."""

    def __init__(self, fake: FakeBackend, real: LlamaBackend) -> None:
        self.fake, self.real = fake, real
        self.kind = real.memory_kind

    @property
    def is_split(self) -> bool:
        return self.real.is_split

    @property
    def n_seqs(self) -> int:
        return self.real.n_seqs

    @property
    def n_away(self) -> int:
        return n_seqs_away(self.real)

    @property
    def n_all(self) -> int:
        """With the spare sequence of the pool, if there is one."""
        return self.n_seqs + self.n_away + bool(self.n_away)

    @property
    def n_cells(self) -> int:
        return self.real.n_cells

    def do(self, call: Callable[..., Any], *given: tuple[Any, Any]) -> tuple[Any, Any]:
        """Call with each backend and its half of what is given. Returns what came of it, or the error."""
        before = self.lengths()
        results = []
        for index, backend in enumerate((self.fake, self.real)):
            try:
                results.append(call(backend, *(halves[index] for halves in given)))
            except REFUSALS as error:
                results.append(error)
        fake, real = map(_told, results)
        assert fake == real, f"the fake: {results[0]!r}, llama.cpp: {results[1]!r}"
        if isinstance(results[1], Exception):
            assert self.lengths() == before, "a refusal changed something"
        self.lengths()
        return results[0], results[1]

    def result(self, call: Callable[..., Any], *given: tuple[Any, Any]) -> Any:
        """The same, as llama.cpp's half."""
        return self.do(call, *given)[1]

    def refuses(self, error: type[Exception], call: Callable[..., Any], *given: tuple[Any, Any]) -> None:
        assert isinstance(self.result(call, *given), error)

    def lengths(self) -> list[int]:
        fake = [len(self.fake.tokens_of(seq)) for seq in range(self.n_seqs + self.n_away)]
        real = [n_held(self.real, seq) for seq in range(self.n_seqs + self.n_away)]
        assert fake == real
        return real


def _told(result: Any) -> Any:
    """What must be the same: the class of an error, what is true or false, and whether there is a state."""
    if isinstance(result, Exception):
        return next(kind for kind in REFUSALS if isinstance(result, kind)), getattr(result, "is_fatal", None)
    return type(result) if isinstance(result, bytes | bytearray | np.ndarray) else result


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("conformance")

    def path_of(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if not path.exists():
            synthesize(name, "F16", path)
        return path

    return path_of


@pytest.fixture(scope="module", params=CASES, ids=str)
def opened(request: pytest.FixtureRequest, models: Callable[[str], Path]) -> Iterator[tuple[Case, LlamaBackend]]:
    case = request.param
    real = LlamaBackend(
        str(models(case.model)), n_cells=case.n_cells, n_seqs=N_SLOTS, n_spare_seqs=N_SPARE, n_batch=N_BATCH,
        n_threads=1, n_gpu_layers=0, kv_type="f16", may_split=case.is_split,
    )  # fmt: skip
    if case.is_rebuilt:
        real.rebuild()
    yield case, real
    real.close()


@pytest.fixture
def both(opened: tuple[Case, LlamaBackend]) -> Both:
    """All sequences are empty."""
    case, real = opened
    is_attention = case.kind is MemoryKind.ATTENTION
    fake = FakeBackend(
        n_cells=case.n_cells,
        n_seqs=N_SLOTS + (N_SPARE if is_attention else 0),
        n_batch=N_BATCH,
        memory_kind=case.kind,
        n_slots=N_SLOTS if case.is_split else 0,
        n_background_seqs=N_SLOTS,
    )
    if case.is_rebuilt:
        fake.rebuild()
    for seq in range(real.n_seqs + n_seqs_away(real)):
        assert real.seq_remove(seq, 0)
    return Both(fake, real)


@pytest.fixture
def shareable(both: Both) -> Both:
    if both.kind is not MemoryKind.ATTENTION:
        pytest.skip("nothing of it can be cut")
    return both


def rows(seq: int, count: int, *, start: int = 0, token: int = 5) -> Callable[[Subject], None]:
    """A decode of so many rows, the last of which wants logits."""

    def call(backend: Subject) -> None:
        fill(backend.batch, seq, count, start=start, token=token)
        backend.batch.wants_logits[count - 1] = 1
        backend.decode(count)

    return call


def fill(batch: Any, seq: int, count: int, *, start: int = 0, token: int = 5) -> None:
    batch.token[:count], batch.pos[:count], batch.seq[:count] = (
        token,
        range(start, start + count),
        seq - batch.first_seq,
    )
    batch.wants_logits[:] = 0


def grow(both: Both, seq: int, n_tokens: int, *, start: int = 0) -> None:
    for at in range(start, n_tokens, N_BATCH):
        assert both.result(rows(seq, min(N_BATCH, n_tokens - at), start=at)) is None


def spoiled(name: str, row: int, value: int) -> Callable[[Subject], None]:
    """Eight good rows, in one of which one number is not."""

    def call(backend: Subject) -> None:
        fill(backend.batch, 0, 8)
        getattr(backend.batch, name)[row] = value
        backend.decode(8)

    return call


def test_they_have_the_same_shape(both: Both):
    for name in ("is_split", "cuts_states", "memory_kind", "n_cells", "n_seqs"):
        assert getattr(both.fake, name) == getattr(both.real, name), name
    assert n_seqs_away(both.fake) == n_seqs_away(both.real)
    assert both.fake.n_ctx == both.real.n_ctx == both.n_cells
    assert both.fake.batch.capacity == both.real.batch.capacity


def test_a_rebuilt_backend_has_empty_sequences_and_another_batch(both: Both):
    """This backend is the module's own: it is rebuilt into what it was."""
    grow(both, 0, 10)
    batches = (both.fake.batch, both.real.batch)
    both.do(lambda backend: backend.rebuild())
    assert both.lengths() == [0] * (both.n_seqs + both.n_away)
    assert both.result(lambda backend, batch: backend.batch is batch, batches) is False


# --- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_rows", [-1, 0, N_BATCH + 1])
def test_a_batch_has_some_rows_and_not_too_many(both: Both, n_rows: int):
    both.refuses(ValueError, lambda backend: backend.decode(n_rows))


@pytest.mark.parametrize("row", [0, 7])
@pytest.mark.parametrize("name", ["token", "pos", "seq"])
def test_a_number_out_of_range_is_refused_before_anything_is_computed(both: Both, name: str, row: int):
    limits = {"token": both.real.n_vocab, "pos": both.n_cells, "seq": both.n_seqs}
    both.refuses(ValueError, spoiled(name, row, -1))
    if name == "token":
        both.refuses(ValueError, lambda backend: spoiled(name, row, backend.n_vocab)(backend))
    else:
        both.refuses(ValueError, spoiled(name, row, limits[name]))
    both.refuses(ValueError, spoiled(name, row, 2**31 - 1))
    grow(both, 0, 8)


def test_no_more_rows_want_logits_than_there_are_sequences_and_drafts(both: Both):
    n_most = both.n_seqs + both.real.n_draft_rows

    def call(backend: Subject, n_wanted: int) -> None:
        fill(backend.batch, 0, n_most + 1)
        backend.batch.wants_logits[:n_wanted] = 1
        backend.decode(n_most + 1)

    both.refuses(ValueError, call, (n_most + 1,) * 2)
    assert both.result(call, (n_most,) * 2) is None


@pytest.mark.parametrize("start", [0, 9, 11])
def test_a_row_that_does_not_follow_is_refused_but_not_fatal(both: Both, start: int):
    grow(both, 1, 10)
    both.refuses(DecodeFailed, rows(1, 3, start=start))
    grow(both, 1, 13, start=10)


def test_a_batch_of_which_one_sequence_does_not_follow_is_refused_whole(both: Both):
    def call(backend: Subject) -> None:
        fill(backend.batch, 0, 6)
        backend.batch.seq[3:6], backend.batch.pos[3:6] = 1, [4, 5, 6]
        backend.decode(6)

    grow(both, 1, 2)
    both.refuses(DecodeFailed, call)


def test_a_row_without_logits_gives_no_token(both: Both):
    def sample(backend: Subject, row: int) -> bool:
        sampler = backend.sampler(Sampling(temperature=0), ignore_eos=True)
        try:
            return 0 <= sampler.sample(row) < backend.n_vocab
        finally:
            sampler.close()

    grow(both, 0, 8)
    assert both.result(sample, (7, 7)) is True
    both.refuses(ValueError, sample, (3, 3))
    both.refuses(ValueError, sample, (8, 8))


def test_what_does_not_fit_is_refused_and_what_fits_to_the_last_cell_is_not(both: Both):
    if both.kind is MemoryKind.RECURRENT:
        pytest.skip("a state is as large as it is")
    size = both.n_cells // both.n_seqs if both.is_split else both.n_cells
    grow(both, 0, size - 20)
    owner, start = (0, size - 20) if both.is_split else (1, 0)
    both.refuses(NoRoom, rows(owner, 21, start=start))
    assert both.result(rows(owner, 20, start=start)) is None
    if both.is_split:
        both.refuses(NoRoom, rows(0, 1, start=size))
        grow(both, 1, 30)
    else:
        both.refuses(NoRoom, rows(2, 1))


# --- removing and sharing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [(-1, -1), (0, -2), (2, 10**6), (10**6, -1)])
def test_positions_out_of_range_are_refused(both: Both, bounds: tuple[int, int]):
    grow(both, 0, 20)
    grow(both, 1, 0)
    both.refuses(ValueError, lambda backend: backend.seq_remove(0, *bounds))
    both.refuses(ValueError, lambda backend: backend.seq_share(0, 1, *bounds))


def test_a_sequence_that_is_not_there_is_refused_by_every_call(both: Both):
    grow(both, 0, 20)
    calls: list[Callable[[Subject, int], Any]] = [
        lambda backend, seq: backend.seq_remove(seq, 0),
        lambda backend, seq: backend.seq_share(seq, 1, 0, 5),
        lambda backend, seq: backend.seq_share(0, seq, 0, 5),
        lambda backend, seq: backend.seq_copy(seq, 1),
        lambda backend, seq: backend.seq_copy(0, seq),
        lambda backend, seq: backend.state_get(seq, limit_bytes=1 << 30),
        lambda backend, seq: backend.state_set(seq, b"anything"),
        lambda backend, seq: list(backend.state_slices(seq, [(0, 1)])),
    ]
    for seq in (-1, both.n_all, 2**31 - 1):
        for call in calls:
            both.refuses(ValueError, call, (seq, seq))


def test_a_part_is_taken_off_where_the_memory_allows_it(both: Both):
    length = 200
    grow(both, 0, length)
    if both.kind is MemoryKind.WINDOW:
        grow(both, 1, 400)  # takes the cells of the other that are out of its window
    is_attention = both.kind is MemoryKind.ATTENTION
    assert both.result(lambda backend: backend.seq_remove(0, 40)) is is_attention
    assert both.lengths()[0] == (40 if is_attention else length)
    if both.kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID):
        can_roll_back = both.kind is MemoryKind.HYBRID
        assert both.result(lambda backend: backend.seq_remove(0, length - 1)) is can_roll_back
        assert both.result(lambda backend: backend.seq_remove(0, length - 2)) is False
    length = both.lengths()[0]
    assert both.result(lambda backend: backend.seq_remove(0, length)) is True, "nothing to remove is no problem"
    grow(both, 0, length + 5, start=length)
    assert both.result(lambda backend: backend.seq_remove(0, 0)) is True
    assert both.result(lambda backend: backend.seq_remove(0, 0)) is True
    assert both.lengths()[0] == 0


def test_cells_are_shared_in_one_pool_of_attention_and_nowhere_else(both: Both):
    grow(both, 0, 100)

    def share(backend: Subject) -> None:
        backend.seq_share(0, 1, 0, 60)

    if both.kind is not MemoryKind.ATTENTION or both.is_split:
        both.refuses(ValueError, share)
        return
    assert both.result(share) is None
    assert both.lengths()[:2] == [100, 60]
    grow(both, 2, both.n_cells - 100)
    both.refuses(NoRoom, rows(1, 1, start=60))
    assert both.result(lambda backend: backend.seq_remove(0, 0)) is True
    assert both.result(rows(1, 40, start=60)) is None, "what one alone had is free"
    both.refuses(NoRoom, rows(1, 1, start=100))


# --- states --------------------------------------------------------------------------------------------------------


def saved(backend: Subject) -> Any:
    return backend.state_get(0, limit_bytes=1 << 30)


def test_a_state_comes_back_in_another_sequence_and_goes_on(both: Both):
    grow(both, 0, 100)
    states = both.do(saved)
    assert both.result(lambda backend, state: backend.state_set(2, state), states) is True
    assert both.lengths()[:3] == [100, 0, 100]
    grow(both, 2, 130, start=100)
    assert both.result(lambda backend, state: backend.state_set(2, state), states) is True, "it replaces what is there"
    assert both.lengths()[2] == 100


def test_a_state_above_the_limit_is_none(both: Both):
    grow(both, 0, 100)
    assert both.result(lambda backend: backend.state_get(0, limit_bytes=10)) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state[: len(state) // 2],
        lambda state: b"\xff" * len(state),
        lambda state: b"",
        lambda state: b"\0",
    ],
)
def test_a_damaged_state_is_refused_and_leaves_the_sequence_empty(both: Both, damage: Callable[[Any], Any]):
    grow(both, 0, 100)
    states = both.do(saved)
    assert both.result(lambda backend, state: backend.state_set(1, damage(bytes(state))), states) is False
    assert both.lengths()[:2] == [100, 0]
    grow(both, 1, 10)


def test_a_state_that_finds_no_room_is_refused_and_leaves_the_sequence_empty(both: Both):
    if both.kind is MemoryKind.RECURRENT or both.is_split:
        pytest.skip("there is always room")
    grow(both, 0, 200)
    states = both.do(saved)
    grow(both, 1, both.n_cells - 200 - 150)
    assert both.result(lambda backend, state: backend.state_set(2, state), states) is False
    assert both.lengths()[2] == 0
    grow(both, 2, 150)


def test_a_state_of_another_number_of_streams_is_refused(both: Both):
    if not both.is_split:
        pytest.skip("there is one stream")
    grow(both, 0, 100)
    states, seq = both.do(saved), both.n_seqs
    assert both.result(lambda backend, state: backend.state_set(seq, state), states) is False


def test_states_are_cut_and_joined_where_nothing_is_forgotten(both: Both):
    grow(both, 0, 100)
    ranges = [(0, 40), (40, 100)]

    def slices(backend: Subject) -> int:
        return len(list(backend.state_slices(0, ranges)))

    def join(backend: Subject) -> bool:
        first, second = backend.state_slices(0, ranges)
        return backend.state_set(1, backend.state_join(1, [(first, 0, 0, 40), (second, 40, 40, 90)]))

    if both.kind is not MemoryKind.ATTENTION:
        both.refuses(ValueError, slices)
        both.refuses(ValueError, lambda backend: backend.state_join(1, [(b"", 0, 0, 0)]))
        both.refuses(ValueError, lambda backend: backend.seq_copy(0, 1))
        return
    assert both.result(slices) == 2
    assert both.result(join) is True
    assert both.lengths()[:2] == [100, 90]
    grow(both, 1, 95, start=90)


def test_positions_that_a_sequence_does_not_have_cannot_be_cut(shareable: Both):
    shareable.refuses(ValueError, lambda backend: list(backend.state_slices(0, [(0, 1)])))
    grow(shareable, 0, 50)
    shareable.refuses(ValueError, lambda backend: list(backend.state_slices(0, [(40, 51)])))


def test_a_tail_alone_comes_back_behind_the_beginning_that_it_belongs_to(shareable: Both):
    if shareable.is_split:
        pytest.skip("streams share no cells")
    grow(shareable, 0, 100)

    def move(backend: Subject) -> bool:
        (tail,) = backend.state_slices(0, [(60, 100)])
        backend.seq_remove(0, 60)
        is_done = backend.state_set(1, backend.state_join(1, [(tail, 60, 60, 100)]))
        backend.seq_share(1, 0, 60, 100)
        backend.seq_remove(1, 0)
        return is_done

    assert shareable.result(move) is True
    assert shareable.lengths()[:2] == [100, 0]
    grow(shareable, 0, 110, start=100)


def test_a_joined_state_is_good_until_the_next_call(shareable: Both):
    grow(shareable, 0, 100)

    def join_twice(backend: Subject) -> bool:
        data, other = backend.state_slices(0, [(0, 100), (0, 30)])
        joined = backend.state_join(1, [(data, 0, 0, 100)])
        before = bytes(joined)
        backend.state_join(1, [(other, 0, 0, 30)])
        return bytes(joined) == before

    assert shareable.result(join_twice) is False


def all_states(copy: Any) -> list[bytes]:
    while not copy.advance():
        copy.wait(1.0)
    return [bytes(state) for state in copy.states]


def test_a_save_beside_the_steps_is_the_same_as_one_at_once(shareable: Both):
    grow(shareable, 0, 100)
    ranges = [(0, 40), (40, 90)]

    def is_same(backend: Subject) -> bool:
        return all_states(backend.save(0, ranges)) == [bytes(state) for state in backend.state_slices(0, ranges)]

    assert shareable.result(is_same) is True
    assert shareable.result(is_same) is True, "and once more, with the buffer that was lent"


def test_what_is_being_saved_may_go_once_it_has_been_read(shareable: Both):
    grow(shareable, 0, 100)

    def save_and_remove(backend: Subject) -> bool:
        before = [bytes(state) for state in backend.state_slices(0, [(10, 100)])]
        copy = backend.save(0, [(10, 100)])
        assert not copy.has_left
        while not copy.has_left:
            copy.wait(1.0)
            copy.advance()
        backend.seq_remove(0, 0)
        rows(0, 30, token=7)(backend)
        return all_states(copy) == before

    assert shareable.result(save_and_remove) is True


def test_what_cannot_be_saved_is_refused_at_once(both: Both):
    if both.kind is not MemoryKind.ATTENTION:
        grow(both, 0, 50)
        both.refuses(ValueError, lambda backend: backend.save(0, [(0, 50)]))
        return
    both.refuses(ValueError, lambda backend: backend.save(0, [(0, 1)]))
    grow(both, 0, 50)
    for ranges in ([], [(0, 51)], [(-1, 5)], [(7, 7)]):
        both.refuses(ValueError, lambda backend, ranges: backend.save(0, ranges), (ranges, ranges))
    for seq in (-1, both.n_seqs, both.n_all):
        both.refuses(ValueError, lambda backend, seq: backend.save(seq, [(0, 1)]), (seq, seq))


def test_a_sequence_is_copied_and_an_empty_one_is_not(shareable: Both):
    grow(shareable, 0, 100)
    targets = [1, shareable.n_seqs] if shareable.n_away else [1]
    for target in targets:
        assert shareable.result(lambda backend, target: backend.seq_copy(0, target), (target, target)) is True
        assert shareable.lengths()[target] == 100
    shareable.refuses(ValueError, lambda backend: backend.seq_copy(2, 3))


# --- the background ------------------------------------------------------------------------------------------------


def worker_of(backend: Subject) -> Worker:
    assert backend.worker is not None
    return backend.worker


def begin(backend: Subject, seq: int, n_rows: int, *, start: int = 0, token: int = 5) -> None:
    n_filled = min(max(0, n_rows), worker_of(backend).batch.capacity)
    fill(worker_of(backend).batch, seq, n_filled, start=start, token=token)
    worker_of(backend).start(n_rows)


def finish(backend: Subject) -> None:
    while not worker_of(backend).is_over():
        time.sleep(0.001)
    worker_of(backend).finish()


def compute_away(seq: int, n_rows: int, *, start: int = 0, token: int = 5) -> Callable[[Subject], None]:
    """A batch of the background, from its beginning to its end."""

    def call(backend: Subject) -> None:
        begin(backend, seq, n_rows, start=start, token=token)
        finish(backend)

    return call


def test_there_is_a_background_where_cells_are_split_and_nowhere_else(both: Both):
    assert both.result(lambda backend: backend.worker is not None) is both.is_split


@pytest.fixture
def background(both: Both) -> Both:
    if not both.n_away:
        pytest.skip("there is none")
    return both


def is_idle(both: Both) -> bool:
    return both.result(lambda backend: backend.worker.is_busy or worker_of(backend).is_busy) is False


def test_it_has_a_batch_and_sequences_of_its_own(background: Both):
    assert background.result(lambda backend: worker_of(backend).batch.capacity) == N_BATCH
    assert background.result(lambda backend: worker_of(backend).batch is backend.batch) is False
    assert background.result(lambda backend: worker_of(backend).first_seq) == background.n_seqs
    assert background.result(lambda backend: worker_of(backend).n_seqs) == background.n_away


def test_the_background_computes_its_own_sequences_and_no_others(background: Both):
    n_seqs = background.n_seqs
    for seq in (0, n_seqs - 1, n_seqs + background.n_away + 1):
        background.refuses(ValueError, compute_away(seq, 8))
        assert is_idle(background)
    background.refuses(ValueError, rows(n_seqs, 8))
    assert background.result(compute_away(n_seqs, 8)) is None
    assert is_idle(background)
    assert background.lengths()[n_seqs] == 8


@pytest.mark.parametrize("n_rows", [-1, 0, N_BATCH + 1])
def test_a_batch_of_the_background_has_some_rows_and_not_too_many(background: Both, n_rows: int):
    background.refuses(ValueError, compute_away(background.n_seqs, n_rows))
    assert is_idle(background)


def test_what_the_background_must_not_compute_is_refused_before_it_begins(background: Both):
    seq, n_cells = background.n_seqs, background.n_cells
    background.refuses(ValueError, compute_away(seq, 8, start=-1))
    background.refuses(ValueError, compute_away(seq, 8, start=n_cells))
    background.refuses(ValueError, compute_away(seq, 8, token=-1))
    background.refuses(ValueError, lambda backend: compute_away(seq, 8, token=backend.n_vocab)(backend))
    assert is_idle(background)
    assert background.result(compute_away(seq, 8)) is None


@pytest.mark.parametrize("start", [0, 9, 11])
def test_a_row_of_the_background_that_does_not_follow_is_refused_but_not_fatal(background: Both, start: int):
    seq = background.n_seqs
    assert background.result(compute_away(seq, 10)) is None
    background.refuses(DecodeFailed, compute_away(seq, 3, start=start))
    assert is_idle(background)
    assert background.result(compute_away(seq, 3, start=10)) is None


def test_what_the_background_computes_is_left_alone_until_it_is_over(background: Both):
    seq = background.n_seqs
    touches: list[Callable[[Subject], Any]] = [
        lambda backend: backend.seq_remove(seq, 0),
        lambda backend: backend.state_get(seq + 1, limit_bytes=1 << 30),
        lambda backend: backend.seq_copy(seq, 0),
    ]
    for backend in (background.fake, background.real):
        begin(backend, seq, 8)
        assert backend.worker.is_busy
        for touch in touches:
            with pytest.raises(ValueError, match="background"):
                touch(backend)
        rows(0, 8)(backend)
        finish(backend)
        assert worker_of(backend).computed_s > 0
    assert is_idle(background)
    assert background.lengths()[0] == background.lengths()[seq] == 8


def test_what_is_given_up_may_be_there_or_not_and_its_sequence_can_be_touched(background: Both):
    seq = background.n_seqs
    for backend in (background.fake, background.real):
        begin(backend, seq, N_BATCH)
        worker_of(backend).halt()
        assert not backend.worker.is_busy
        assert backend.seq_remove(seq, 0)
    assert background.result(compute_away(seq, N_BATCH)) is None


def test_a_prompt_of_the_background_that_outgrows_the_pool_is_refused(background: Both):
    seq, size = background.n_seqs, background.n_cells - N_BATCH
    for start in range(0, size, N_BATCH):
        assert background.result(compute_away(seq, N_BATCH, start=start)) is None
    assert background.result(compute_away(seq + 1, 1)) is None
    background.refuses(NoRoom, compute_away(seq, N_BATCH, start=size))
    assert background.lengths()[seq : seq + 2] == [size, 1]


def test_a_rebuilt_backend_has_another_background(background: Both):
    """This backend is the module's own: it is rebuilt into what it was."""
    before = (background.fake.worker, background.real.worker)
    background.do(lambda backend: backend.rebuild())
    assert background.result(lambda backend, was: backend.worker is was, before) is False
    assert background.result(compute_away(background.n_seqs, 8)) is None


def in_pool(call: Callable[[Subject], Any]) -> Callable[[Subject], Any]:
    """As a step in the pool."""

    def turned(backend: Subject) -> Any:
        backend.turn_to(pool=True)
        try:
            return call(backend)
        finally:
            backend.turn_to(pool=False)

    return turned


def test_a_step_in_the_pool_goes_on_with_what_the_background_computed(background: Both):
    seq = background.n_seqs
    batches = (background.fake.batch, background.real.batch)
    assert background.result(compute_away(seq, 100)) is None
    assert background.result(in_pool(rows(seq, 3, start=100))) is None
    assert background.lengths()[seq] == 103
    background.refuses(ValueError, in_pool(rows(0, 3)))
    assert background.result(rows(0, 3)) is None, "steps are back in the streams"
    assert background.result(lambda backend, batch: backend.batch is batch, batches) is True
    for backend in (background.fake, background.real):
        begin(backend, seq + 1, 8)
        with pytest.raises(ValueError, match="computing"):
            backend.turn_to(pool=True)
        finish(backend)


def test_there_is_no_pool_beside_one_pool(both: Both):
    if not both.is_split:
        both.refuses(ValueError, lambda backend: backend.turn_to(pool=True))


def test_the_pool_shares_cells_and_has_a_spare_sequence_for_copies(background: Both):
    seq, other = background.n_seqs, background.n_seqs + 1
    assert background.result(compute_away(seq, 100)) is None

    def part(backend: Subject) -> bool:
        """The first 40 tokens of the sequence in a stream, which has no room for all that is there otherwise."""
        backend.seq_share(seq, backend.pool_spare, 0, 40)
        is_copied = backend.seq_copy(backend.pool_spare, 2)
        backend.seq_remove(backend.pool_spare, 0)
        return is_copied

    assert background.result(part) is True
    assert background.lengths()[2] == 40
    assert background.result(lambda backend: backend.seq_share(seq, other, 0, 60)) is None
    background.refuses(ValueError, lambda backend: backend.seq_share(seq, 0, 0, 60))
    background.refuses(ValueError, lambda backend: backend.seq_share(0, other, 0, 3))
    n_cells = background.n_cells
    for start in range(0, n_cells - 100, N_BATCH):
        n_rows = min(N_BATCH, n_cells - 100 - start)
        assert background.result(in_pool(rows(seq + 2, n_rows, start=start))) is None
    background.refuses(NoRoom, in_pool(rows(other, 1, start=60)))


def test_a_stream_gets_warm_beside_the_steps(both: Both):
    def gets_warm(backend: Subject) -> bool:
        deadline_s = time.monotonic() + 30
        while not backend.warm(0, 100):
            assert time.monotonic() < deadline_s
        return backend.warm(0, 50)

    if both.kind is not MemoryKind.ATTENTION:
        both.refuses(ValueError, gets_warm)
        return
    assert both.result(gets_warm) is True
    for seq in (-1, both.n_all):
        both.refuses(ValueError, lambda backend, seq: backend.warm(seq, 10), (seq, seq))


# --- adapters ------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(both: Both, opened: tuple[Case, LlamaBackend], models: Callable[[str], Path]) -> Iterator[AdapterSet]:
    """A set of one control vector, which neither backend has loaded."""
    model = models(opened[0].model)
    path = write_vector(model, model.with_suffix(".vector"))
    digest = hashlib.sha256(path.read_bytes()).digest()
    yield AdapterSet.of([Adapter(str(path), digest)])
    both.real.use(BASE)
    both.real.batch.adapter_hash = b""
    both.real.free_adapter(digest)


def test_rows_are_computed_with_the_adapters_in_use_or_not_at_all(both: Both, adapter: AdapterSet):
    def decode(backend: Subject, adapter_hash: bytes) -> None:
        backend.batch.adapter_hash = adapter_hash
        rows(0, 4)(backend)

    both.refuses(ValueError, lambda backend: backend.use(adapter))
    both.do(lambda backend: backend.load_adapter(adapter.adapters[0]))
    both.do(lambda backend: backend.load_adapter(adapter.adapters[0]))
    both.do(lambda backend: backend.use(adapter))
    both.refuses(ValueError, decode, (b"",) * 2)
    both.refuses(ValueError, decode, (b"another",) * 2)
    assert both.result(decode, (adapter.hash,) * 2) is None
    both.do(lambda backend: backend.seq_remove(0, 0))
    both.do(lambda backend: backend.use(BASE))
    both.refuses(ValueError, decode, (adapter.hash,) * 2)
    assert both.result(decode, (b"",) * 2) is None


def test_an_adapter_that_is_left_is_not_in_use(both: Both, adapter: AdapterSet):
    both.do(lambda backend: backend.load_adapter(adapter.adapters[0]))
    both.do(lambda backend: backend.use(adapter))
    assert both.result(lambda backend: backend.leave_adapter(adapter.adapters[0].digest)) is True
    assert both.result(rows(0, 4)) is None
    both.do(lambda backend: backend.free_adapter(adapter.adapters[0].digest))
    both.refuses(ValueError, lambda backend: backend.use(adapter))
    both.refuses(BadModelFile, lambda backend: backend.load_adapter(Adapter("/nowhere/broken", b"?" * 32)))


def test_the_background_keeps_to_its_own_adapters(both: Both, adapter: AdapterSet):
    if not both.n_away:
        pytest.skip("there is none here")
    both.do(lambda backend: backend.load_adapter(adapter.adapters[0]))

    def compute(backend: Subject, adapter_hash: bytes) -> bool:
        """Whether the adapter could be freed meanwhile."""
        worker = backend.worker
        fill(worker.batch, worker.first_seq, 8)
        worker.batch.adapter_hash = adapter_hash
        worker.start(8)
        could_leave = backend.leave_adapter(adapter.adapters[0].digest)
        while not worker.is_over():
            time.sleep(0.001)
        worker.finish()
        return could_leave

    both.do(lambda backend: backend.worker.use(adapter))
    both.refuses(ValueError, compute, (b"",) * 2)
    assert both.result(compute, (adapter.hash,) * 2) is False
    assert both.result(lambda backend: backend.leave_adapter(adapter.adapters[0].digest)) is True
    both.refuses(ValueError, compute, (adapter.hash,) * 2)
    for backend in (both.fake, both.real):
        backend.worker.batch.adapter_hash = b""
