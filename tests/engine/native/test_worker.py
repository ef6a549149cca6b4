"""The real background: a second native context, computed in a thread, paused, given up, and its states moved."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from localrun.engine.backend import DecodeFailed
from localrun.engine.native import library
from localrun.engine.native.llama import LlamaBackend
from localrun.engine.native.threads import PIECE_S, ComputeLock
from localrun.engine.native.worker import LlamaWorker, Pieces
from tests.engine.conftest import compute, open_tiny

PATIENCE_S = 60.0
PROMPT = [300 + at * 7 % 900 for at in range(180)]


@pytest.fixture(scope="module")
def split(tiny_gguf: Path) -> Iterator[LlamaBackend]:
    backend = open_tiny(tiny_gguf, n_cells=1024, n_seqs=4, n_batch=192, may_split=True)
    yield backend
    backend.close()


@pytest.fixture
def backend(split: LlamaBackend) -> LlamaBackend:
    for seq in range(split.n_seqs + split.worker.n_seqs):
        split.seq_remove(seq, 0)
    return split


def begin(backend: LlamaBackend, tokens: list[int], *, start: int = 0) -> None:
    worker = worker_of(backend)
    batch, count = worker.batch, len(tokens)
    batch.token[:count] = tokens
    batch.pos[:count] = range(start, start + count)
    batch.seq[:count] = 0
    batch.wants_logits[:count] = 0
    worker.start(count)


def worker_of(backend: LlamaBackend) -> LlamaWorker:
    assert backend.worker is not None
    return backend.worker


def finish(backend: LlamaBackend) -> None:
    while not worker_of(backend).is_over():
        time.sleep(0.001)
    worker_of(backend).finish()


def move(backend: LlamaBackend, source: int, target: int, n_tokens: int) -> None:
    """By pieces and at once: the same."""
    (data,) = backend.state_slices(source, [(0, n_tokens)])
    assert backend.seq_copy(source, target)
    np.testing.assert_array_equal(next(backend.state_slices(target, [(0, n_tokens)])), data)
    assert backend.seq_remove(target, 0)
    assert backend.state_set(target, backend.state_join(target, [(data, 0, 0, n_tokens)]))
    np.testing.assert_array_equal(next(backend.state_slices(target, [(0, n_tokens)])), data)


def test_a_prompt_of_the_background_goes_on_in_a_stream_with_the_same_logits(backend: LlamaBackend):
    expected = compute(backend, 0, PROMPT[:128])
    expected = compute(backend, 0, PROMPT[128:], start=128)
    begin(backend, PROMPT[:-1])
    finish(backend)
    move(backend, backend.n_seqs, 2, len(PROMPT) - 1)
    np.testing.assert_allclose(compute(backend, 2, PROMPT[-1:], start=len(PROMPT) - 1), expected, atol=2e-2)


def test_streams_are_computed_rightly_while_the_background_is_under_way(backend: LlamaBackend):
    compute(backend, 1, PROMPT[:20])
    alone = [compute(backend, 1, [PROMPT[at]], start=at) for at in range(20, 26)]
    backend.seq_remove(1, 20)
    begin(backend, PROMPT[:-1])
    beside = [compute(backend, 1, [PROMPT[at]], start=at) for at in range(20, 26)]
    finish(backend)
    np.testing.assert_array_equal(alone, beside)
    move(backend, backend.n_seqs, 3, len(PROMPT) - 1)
    away = compute(backend, 3, PROMPT[-1:], start=len(PROMPT) - 1)
    backend.seq_remove(0, 0)
    compute(backend, 0, PROMPT[:128])
    np.testing.assert_allclose(away, compute(backend, 0, PROMPT[128:], start=128), atol=2e-2)


def test_what_is_under_way_can_be_given_up_and_begun_anew(backend: LlamaBackend):
    for _ in range(3):
        begin(backend, PROMPT[:-1])
        worker_of(backend).halt()
        assert not backend.worker.is_busy
        assert backend.seq_remove(backend.n_seqs, 0)
    begin(backend, PROMPT[:-1])
    finish(backend)
    move(backend, backend.n_seqs, 1, len(PROMPT) - 1)


def test_a_failure_between_two_pieces_is_an_error_and_no_answer(backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Pieces, "is_end", lambda _: True)
    monkeypatch.setattr(Pieces, "note", fail)
    begin(backend, PROMPT[:-1])
    with pytest.raises(DecodeFailed, match="MemoryError"):
        finish(backend)
    monkeypatch.undo()
    assert backend.seq_remove(backend.n_seqs, 0)
    begin(backend, PROMPT[:-1])
    finish(backend)


@pytest.fixture
def _slow_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every thread that says something lost its processor right after."""
    say, wait = threading.Event.set, threading.Event.wait

    def say_and_sleep(event: threading.Event) -> None:
        say(event)
        time.sleep(0.005)

    def wait_for_an_answer(event: threading.Event, timeout: float | None = None) -> bool:
        is_set = wait(event, PATIENCE_S if timeout is None else timeout)
        assert is_set or timeout is not None, "it is never answered"
        return is_set

    monkeypatch.setattr(threading.Event, "set", say_and_sleep)
    monkeypatch.setattr(threading.Event, "wait", wait_for_an_answer)


@pytest.mark.usefixtures("_slow_to_say")
def test_the_end_of_one_batch_does_not_answer_for_a_pause_of_the_next(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
):
    worker = worker_of(backend)
    nodes, is_end = [], Pieces.is_end
    monkeypatch.setattr(Pieces, "is_end", lambda pieces: nodes.append(1) or is_end(pieces))
    for _ in range(5):
        backend.seq_remove(backend.n_seqs, 0)
        for start in (0, 90):
            begin(backend, PROMPT[:90], start=start)
            with backend.turns.step():
                n_nodes = len(nodes)
                time.sleep(0.01)
                assert len(nodes) == n_nodes, "the background computes while it is paused"
            while not worker.is_over():
                pass
            worker.finish()


@pytest.mark.usefixtures("_slow_to_say")
def test_a_worker_that_is_slow_to_wait_answers_the_next_pause_too(backend: LlamaBackend):
    """It says that it is paused, loses its processor, and comes back when the step is over and the next one begins."""
    backend.rebuild()  # a new worker begins with short pieces
    begin(backend, PROMPT[:-1])
    for _ in range(10):
        with backend.turns.step():
            pass
    finish(backend)


def test_nobody_touches_a_sequence_of_the_background_while_it_is_computed(backend: LlamaBackend):
    begin(backend, PROMPT[:-1])
    with pytest.raises(ValueError, match="in the background"):
        backend.seq_remove(backend.n_seqs, 0)
    finish(backend)
    assert backend.seq_remove(backend.n_seqs, 0)


def test_states_of_a_stream_go_on_in_the_pool(backend: LlamaBackend):
    compute(backend, 1, PROMPT[:100])
    pieces = list(backend.state_slices(1, [(0, 40), (40, 100)]))
    expected = compute(backend, 1, PROMPT[100:], start=100)
    seq = backend.n_seqs
    state = backend.state_join(seq, [(pieces[0], 0, 0, 40), (pieces[1], 40, 40, 100)])
    assert backend.state_set(seq, state)
    np.testing.assert_allclose(compute(backend, seq, PROMPT[100:], start=100), expected, atol=2e-2)


def test_a_stream_has_its_share_of_the_cells_and_no_more(backend: LlamaBackend):
    assert backend.n_cells // backend.n_seqs == 256
    compute(backend, 0, [5] * 128)
    compute(backend, 0, [5] * 128, start=128)
    compute(backend, 1, [6] * 8)


def pieces_of(pieces: Pieces, n_nodes: int, node_s: float) -> list[int]:
    """The sizes of the pieces into which a graph of so many nodes is cut."""
    found, size = [], 0
    for _ in range(n_nodes):
        size += 1
        if pieces.is_end():
            found.append(size)
            pieces.note(size * node_s)
            size = 0
    return found


def test_pieces_become_as_long_as_they_should_be():
    pieces = Pieces()
    assert pieces_of(pieces, 600, PIECE_S / 10)[-3:] == [10, 10, 10]
    assert pieces_of(pieces, 600, PIECE_S / 40)[-3:] == [40, 40, 40]


def test_a_node_that_takes_longer_than_a_piece_is_one_by_itself():
    pieces = Pieces()
    pieces_of(pieces, 600, PIECE_S / 40)
    assert pieces_of(pieces, 600, PIECE_S * 3)[-3:] == [1, 1, 1]


def test_one_quick_piece_at_most_doubles_the_next():
    pieces = Pieces()
    pieces.is_end()
    pieces.note(0.0)
    assert pieces_of(pieces, 6, 0.0) == [2, 4]


def test_turns_exclude_each_other_and_come_to_everybody():
    turns, n_each = ComputeLock(), 200
    inside: list[str] = []
    wrong: list[str] = []
    done: dict[str, int] = {}

    def compute(name: str) -> None:
        inside.append(name)
        if sum(other != "beside" for other in inside) > 1:
            wrong.append(name)
        time.sleep(0)
        inside.remove(name)
        done[name] = done.get(name, 0) + 1

    def pieces(name: str) -> None:
        beside = name == "beside"
        for _ in range(n_each):
            turns.take(beside=beside)
            compute(name)
            turns.leave(beside=beside)

    def steps() -> None:
        for _ in range(n_each):
            with turns.step() as is_alone:
                if is_alone and inside:
                    wrong.append("not alone")
                compute("step")

    threads = [threading.Thread(target=pieces, args=(name,), daemon=True) for name in ("one", "other", "beside")]
    threads.append(threading.Thread(target=steps, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert wrong == []
    assert done == dict.fromkeys(("one", "other", "beside", "step"), n_each)


def test_a_long_operation_beside_holds_up_nobody():
    turns = ComputeLock()
    turns.take(beside=True)
    with turns.step() as is_alone:
        assert not is_alone
        assert turns.is_wanted(beside=True)
    turns.take()
    assert not turns.is_wanted()
    turns.leave()
    turns.leave(beside=True)
    with turns.step() as is_alone:
        assert is_alone


def test_a_piece_goes_before_the_next_step():
    turns, order, has_taken = ComputeLock(), [], threading.Event()

    def piece() -> None:
        turns.take()
        order.append("piece")
        turns.leave()

    with turns.step():
        thread = threading.Thread(target=piece)
        thread.start()
        while not turns.is_wanted():
            has_taken.wait(0.001)
    with turns.step():
        order.append("step")
    thread.join()
    assert order == ["piece", "step"]


def test_teams_of_openmp_end_where_the_other_thread_computes_next(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libgomp counts the members of all threads' teams, also of those that wait, and puts everybody to sleep."""
    ended: list[int] = []
    monkeypatch.setattr(
        "localrun.engine.native.library._pause_teams", lambda: lambda _kind: ended.append(threading.get_ident())
    )
    begin(backend, PROMPT)
    assert ended == [threading.get_ident()]
    finish(backend)
    assert len(ended) == 2, "the background's thread, after its batch"
    assert ended[1] != threading.get_ident()


def test_a_team_of_libgomp_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one, if this system has it: before its first graph and between two."""
    try:
        gomp = ctypes.CDLL("libgomp.so.1")
    except OSError:
        pytest.skip("no libgomp here")
    monkeypatch.setattr("localrun.engine.native.library.native", SimpleNamespace(_lib=gomp))
    library._pause_teams.cache_clear()
    try:
        pause = library._pause_teams()
        assert pause is not None
        assert pause(1) == 0, "omp_pause_soft: done"
        library.end_team()
    finally:
        library._pause_teams.cache_clear()
