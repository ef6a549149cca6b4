"""The last rows of a decode are taken off again: what then follows is what follows the same tokens freshly computed.

llama.cpp itself allows more than that: it takes snapshots for good that an earlier decode left, or that belong to
another sequence by now. So what is refused here would be wrong, which the tests of the bare calls show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from localrun.engine.backend import SNAPSHOTS, MemoryKind, NoRoom
from localrun.engine.native import llama
from localrun.engine.native.library import native
from localrun.engine.native.llama import LlamaBackend
from localrun.models import memory
from tests.engine.conftest import compute, n_held, saved_state
from tests.fakes.backend import FakeBackend
from tests.support.synthesis.synthesize import synthesize

HYBRIDS = ("tiny-qwen35", "tiny-lfm2")
N_SEQS, N_BATCH, N_CELLS, N_WINDOW = 4, 32, 1024, 64
ROUNDING = 0.02
NEXT = 77


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rollback")


def opened(folder: Path, name: str) -> LlamaBackend:
    path = folder / f"{name}.gguf"
    if not path.exists():
        synthesize(name, "F16", path)
    return LlamaBackend(
        str(path), n_cells=N_CELLS, n_seqs=N_SEQS, n_batch=N_BATCH, n_threads=1, n_gpu_layers=0, kv_type="f16"
    )


@pytest.fixture(scope="module", params=HYBRIDS)
def open_hybrid(request: pytest.FixtureRequest, folder: Path) -> Iterator[LlamaBackend]:
    backend = opened(folder, request.param)
    yield backend
    backend.close()


@pytest.fixture
def hybrid(open_hybrid: LlamaBackend) -> LlamaBackend:
    for seq in range(N_SEQS):
        assert open_hybrid.seq_remove(seq, 0)
    return open_hybrid


def text(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 2000, count).tolist()


def begin(backend: LlamaBackend, seq: int, count: int) -> list[int]:
    """Begin a sequence with so many tokens."""
    tokens = text(seq, count)
    for start in range(0, count, N_BATCH):
        compute(backend, seq, tokens[start : start + N_BATCH], start=start)
    return tokens


def step(backend: LlamaBackend, tokens: Mapping[int, list[int]], counts: Mapping[int, int]) -> None:
    """One decode of so many new rows of each sequence, in this order; the tokens are appended."""
    row, batch = 0, backend.batch
    for seq, count in counts.items():
        for token in text(100 + seq, count):
            batch.seq[row], batch.pos[row], batch.token[row] = seq, len(tokens[seq]), token
            batch.wants_logits[row] = 0
            tokens[seq].append(token)
            row += 1
    batch.wants_logits[row - 1] = 1
    backend.decode(row)


def assert_as_fresh(backend: LlamaBackend, seq: int, tokens: list[int]) -> None:
    """What follows the tokens that a sequence has is what follows them in a new one, the last."""
    assert n_held(backend, seq) == len(tokens)
    found = compute(backend, seq, [NEXT], start=len(tokens))
    fresh = N_SEQS - 1
    assert backend.seq_remove(fresh, 0)
    for start in range(0, len(tokens), N_BATCH):
        compute(backend, fresh, tokens[start : start + N_BATCH], start=start)
    expected = compute(backend, fresh, [NEXT], start=len(tokens))
    assert np.abs(found - expected).max() < ROUNDING * np.abs(expected).max()


def test_so_many_snapshots_as_were_asked_for(hybrid: LlamaBackend):
    assert hybrid.memory_kind is MemoryKind.HYBRID
    assert hybrid.n_rollback == native.llama_n_rs_seq(hybrid.main.native) == SNAPSHOTS


def test_the_estimate_of_memory_counts_as_many(hybrid: LlamaBackend):
    assert (memory.SNAPSHOTS, memory.SNAPSHOTS_BYTES) == (SNAPSHOTS, llama.SNAPSHOTS_BYTES)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_all_rows_of_a_step_but_its_first_are_taken_off_as_far_as_snapshots_go(hybrid: LlamaBackend, count: int):
    for n_back in range(1, count + 1):
        assert hybrid.seq_remove(0, 0)
        tokens = {0: begin(hybrid, 0, 20)}
        compute(hybrid, 0, [NEXT, NEXT], start=20)  # leaves snapshots that are too old soon
        tokens[0] += [NEXT, NEXT]
        step(hybrid, tokens, {0: count})
        is_possible = n_back <= min(count - 1, SNAPSHOTS)
        assert hybrid.seq_remove(0, len(tokens[0]) - n_back) is is_possible
        if is_possible:
            del tokens[0][-n_back:]
        assert_as_fresh(hybrid, 0, tokens[0])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_every_sequence_of_a_step_goes_back_as_far_as_it_must(hybrid: LlamaBackend, order: tuple[int, ...]):
    tokens = {seq: begin(hybrid, seq, 20 + seq) for seq in (1, 0, 2)}
    step(hybrid, tokens, dict.fromkeys(order, 4))
    for seq, n_back in zip(order, (3, 1, 2), strict=True):
        assert hybrid.seq_remove(seq, len(tokens[seq]) - n_back)
        del tokens[seq][-n_back:]
    for seq in order:
        assert_as_fresh(hybrid, seq, tokens[seq])


@pytest.mark.parametrize("counts", [{1: 2, 0: 4, 2: 4}, {0: 8, 1: 4, 2: 8}, {0: 20, 1: 4}])
def test_a_state_that_may_have_lost_its_snapshots_does_not_go_back(hybrid: LlamaBackend, counts: dict[int, int]):
    tokens = {seq: begin(hybrid, seq, 20) for seq in range(3)}
    step(hybrid, tokens, counts)
    assert not hybrid.seq_remove(1, len(tokens[1]) - 1)
    for seq in counts:
        assert_as_fresh(hybrid, seq, tokens[seq])


def test_where_states_may_go_back_after_different_numbers_of_rows_that_is_right(hybrid: LlamaBackend):
    rng = np.random.default_rng(3)
    n_allowed = n_refused = 0
    for _ in range(60):
        tokens = {int(seq): begin(hybrid, int(seq), 8) for seq in rng.permutation(3)}
        order = rng.permutation(3)[: rng.integers(2, 4)].tolist()
        step(hybrid, tokens, {seq: int(rng.integers(1, 5)) if rng.integers(2) else 4 for seq in order})
        for seq in order:
            n_back = min(len(tokens[seq]) - 9, int(rng.integers(0, 4)))
            if n_back and hybrid.seq_remove(seq, len(tokens[seq]) - n_back):
                del tokens[seq][-n_back:]
                n_allowed += 1
            else:
                n_refused += n_back > 0
        for seq in order:
            assert_as_fresh(hybrid, seq, tokens[seq])
        for seq in range(N_SEQS):
            assert hybrid.seq_remove(seq, 0)
    assert n_allowed > 30
    assert n_refused


def test_llama_cpp_itself_takes_snapshots_that_stayed_behind_when_states_changed_places(hybrid: LlamaBackend):
    """Once this fails, different numbers of rows need not be refused any more."""
    tokens = {seq: begin(hybrid, seq, 20) for seq in range(3)}
    step(hybrid, tokens, {1: 2, 0: 4, 2: 4})
    states = native.llama_get_memory(hybrid.main.native)
    assert native.llama_memory_seq_rm(states, 1, len(tokens[1]) - 1, -1)
    with pytest.raises(AssertionError):
        assert_as_fresh(hybrid, 1, tokens[1][:-1])


def test_a_state_goes_back_once_and_only_before_anything_else_happens(hybrid: LlamaBackend):
    tokens = {0: begin(hybrid, 0, 20), 1: begin(hybrid, 1, 20)}
    step(hybrid, tokens, {0: 4})
    assert hybrid.seq_remove(0, 23)
    assert not hybrid.seq_remove(0, 22)
    assert_as_fresh(hybrid, 0, tokens[0][:23])
    step(hybrid, tokens, {1: 4})
    step(hybrid, tokens, {0: 1})
    assert not hybrid.seq_remove(1, 22), "another step came after its own"
    step(hybrid, tokens, {1: 3})
    state = saved_state(hybrid, 1)
    assert hybrid.seq_remove(1, 0)
    assert hybrid.state_set(1, state)
    assert not hybrid.seq_remove(1, 25), "the snapshots are not part of a saved state"
    assert_as_fresh(hybrid, 1, tokens[1])


def test_a_middle_is_never_taken_off(hybrid: LlamaBackend):
    tokens = {0: begin(hybrid, 0, 20)}
    step(hybrid, tokens, {0: 4})
    assert not hybrid.seq_remove(0, 22, 23)
    assert_as_fresh(hybrid, 0, tokens[0])


def test_what_went_back_is_saved_as_it_is_then(hybrid: LlamaBackend):
    tokens = {0: begin(hybrid, 0, 20)}
    step(hybrid, tokens, {0: 4})
    assert hybrid.seq_remove(0, 22)
    state = saved_state(hybrid, 0)
    assert hybrid.state_set(1, state)
    for seq in (0, 1):
        assert_as_fresh(hybrid, seq, tokens[0][:22])


def test_a_sequence_that_went_back_waits_while_others_compute(hybrid: LlamaBackend):
    tokens = {seq: begin(hybrid, seq, 20) for seq in (1, 0, 2)}
    step(hybrid, tokens, {0: 4})
    assert hybrid.seq_remove(0, 22)
    step(hybrid, tokens, {1: 1, 2: 1})
    step(hybrid, tokens, {2: 3})
    assert_as_fresh(hybrid, 0, tokens[0][:22])


def test_states_that_are_large_have_fewer_snapshots_or_none(folder: Path, monkeypatch: pytest.MonkeyPatch):
    whole = opened(folder, "tiny-qwen35")
    state_bytes = len(saved_state_of_one_token(whole))
    whole.close()
    for n_affordable in (2, 0):
        monkeypatch.setattr(llama, "SNAPSHOTS_BYTES", state_bytes * N_SEQS * n_affordable)
        backend = opened(folder, "tiny-qwen35")
        assert backend.n_rollback == n_affordable
        tokens = {0: begin(backend, 0, 10)}
        step(backend, tokens, {0: 4})
        assert not backend.seq_remove(0, 13 - n_affordable)
        assert backend.seq_remove(0, 14 - n_affordable)
        backend.close()


def saved_state_of_one_token(backend: LlamaBackend) -> bytearray:
    compute(backend, 0, [0])
    return saved_state(backend, 0)


def test_a_kind_without_snapshots_never_goes_back(folder: Path):
    backend = opened(folder, "tiny-mamba")
    assert backend.n_rollback == 0
    tokens = {0: begin(backend, 0, 20)}
    step(backend, tokens, {0: 4})
    assert not backend.seq_remove(0, 23)
    assert_as_fresh(backend, 0, tokens[0])
    backend.close()


# --- windows -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def window(folder: Path) -> Iterator[LlamaBackend]:
    backend = opened(folder, "tiny-gemma3")
    yield backend
    backend.close()


@pytest.mark.parametrize("n_before", [30, N_WINDOW - 4, N_WINDOW + 3, 3 * N_WINDOW + 5])
def test_a_step_in_or_beyond_a_window_goes_back(window: LlamaBackend, n_before: int):
    assert window.memory_kind is MemoryKind.WINDOW
    assert window.n_rollback >= 8
    for n_back in range(1, 9):
        assert window.seq_remove(0, 0)
        tokens = {0: begin(window, 0, n_before), 1: begin(window, 1, 40)}
        step(window, tokens, {0: 8, 1: 3})
        assert window.seq_remove(0, len(tokens[0]) - n_back)
        assert_as_fresh(window, 0, tokens[0][:-n_back])
        assert window.seq_remove(1, 0)


def test_what_a_window_still_allows_is_right_however_far_back(window: LlamaBackend):
    """A random run of steps and removals of any depth in three sequences."""
    rng = np.random.default_rng(5)
    tokens: dict[int, list[int]] = {seq: [] for seq in range(3)}
    n_allowed = n_refused = 0
    for seq in range(N_SEQS):
        window.seq_remove(seq, 0)
    for _ in range(200):
        seq = int(rng.integers(3))
        if len(tokens[seq]) > 200:
            assert window.seq_remove(seq, 0)
            tokens[seq].clear()
        count = int(rng.choice([1, 2, 8, N_BATCH]))
        step(window, tokens, {seq: count})
        is_last = bool(rng.integers(2))
        n_back = int(rng.integers(1, (count if is_last else len(tokens[seq])) + 1))
        if n_back == len(tokens[seq]):
            continue
        is_done = window.seq_remove(seq, len(tokens[seq]) - n_back)
        assert is_done or not is_last, "the rows of the last step can always be taken off"
        n_allowed, n_refused = n_allowed + is_done, n_refused + (not is_done)
        if is_done:
            del tokens[seq][-n_back:]
            assert_as_fresh(window, seq, tokens[seq])
            tokens[seq].append(NEXT)
    assert n_allowed > 20
    assert n_refused > 5


# --- the fake ------------------------------------------------------------------------------------------------------


def test_the_fake_refuses_what_the_real_one_refuses(hybrid: LlamaBackend):
    fake = FakeBackend(n_cells=N_CELLS, n_seqs=N_SEQS, n_batch=N_BATCH, memory_kind=MemoryKind.HYBRID)
    assert fake.n_rollback == hybrid.n_rollback
    rng = np.random.default_rng(9)
    lengths = [0, 0, 0]
    told = []
    for _ in range(300):
        counts = {int(seq): int(rng.integers(1, 6)) for seq in rng.permutation(3)[: rng.integers(1, 4)]}
        if rng.integers(2):
            counts = dict.fromkeys(counts, 4)
        for backend in (fake, hybrid):
            row = 0
            for seq, count in counts.items():
                rows = slice(row, row + count)
                backend.batch.token[rows], backend.batch.seq[rows] = 5, seq
                backend.batch.pos[rows] = range(lengths[seq], lengths[seq] + count)
                row += count
            backend.batch.wants_logits[:row] = 0
            backend.decode(row)
        for seq, count in counts.items():
            lengths[seq] += count
        for seq in rng.integers(0, 3, 2).tolist():
            to = max(0, lengths[seq] - int(rng.integers(0, 5)))
            is_done, expected = fake.seq_remove(seq, to), hybrid.seq_remove(seq, to)
            assert is_done == expected, (counts, seq, to, lengths)
            told.append(is_done)
            lengths[seq] = to if is_done else lengths[seq]
        for seq in range(3):
            if lengths[seq] > 200:
                assert fake.seq_remove(seq, 0)
                assert hybrid.seq_remove(seq, 0)
                lengths[seq] = 0
    assert 50 < sum(told) < 550


def test_a_step_that_found_no_room_leaves_nothing_to_go_back_to(folder: Path):
    backend = opened(folder, "tiny-qwen35")
    tokens = {0: begin(backend, 0, N_CELLS - 12)}
    step(backend, tokens, {0: 4})
    with pytest.raises(NoRoom):
        compute(backend, 1, text(1, 30))
    assert not backend.seq_remove(0, len(tokens[0]) - 1)
    assert n_held(backend, 0) == len(tokens[0])
    backend.close()
