from __future__ import annotations

from pathlib import Path

import pytest

from localrun.hardware import thread_choice
from localrun.hardware.thread_choice import ModelShape, SavedChoice, Threads, best, find, is_steady, keep, read

SHAPE = ModelShape(30, 77_000_000)


def kept(decode: int = 8, *, build: str = "b", processors: str = "p", n_layers: int = 30) -> SavedChoice:
    return SavedChoice(
        processors=processors, build=build, shape=ModelShape(n_layers, SHAPE.weights_bytes),
        threads=Threads(decode, 16), model="llama3.2", n_tried=(8, 16), at_s=1e9,
    )  # fmt: skip


# --- the rule --------------------------------------------------------------------------------------------------------


def test_the_quickest_number_wins():
    assert best({8: {1: [10.0, 11, 10]}, 16: {1: [7.0, 7, 9]}}) == 16


def test_the_median_counts_and_not_one_lucky_time():
    assert best({8: {1: [10.0, 10, 10]}, 16: {1: [12.0, 12, 3]}}) == 8


@pytest.mark.parametrize(("seconds", "n_threads"), [(9.8, 8), (10.0, 8), (9.5, 16)])
def test_more_threads_must_gain_enough(seconds: float, n_threads: int):
    assert best({16: {1: [seconds] * 3}, 8: {1: [10.0] * 3}}) == n_threads


def test_fewer_threads_win_though_a_little_slower():
    assert best({4: {1: [10.3] * 3}, 8: {1: [10.0] * 3}, 16: {1: [10.0] * 3}}) == 4


def test_what_was_measured_once_must_gain_more():
    assert best({8: {1: [10.0]}, 16: {1: [9.3]}}) == 8
    assert best({8: {1: [10.0]}, 16: {1: [8.0]}}) == 16


def test_numbers_of_rows_count_alike_however_long_their_steps_are():
    """One row is a tenth quicker with 8, four rows a third with 16: not 4 times as important for being longer."""
    assert best({8: {1: [9.0] * 3, 4: [40.0] * 3}, 16: {1: [10.0] * 3, 4: [30.0] * 3}}) == 16
    assert best({8: {1: [9.0] * 3, 4: [40.0] * 3}, 16: {1: [12.0] * 3, 4: [39.0] * 3}}) == 8


def test_a_busy_machine_is_told_by_its_spread():
    assert is_steady({8: {1: [10.0, 10.5, 11]}, 16: {1: [7.0, 7.2, 30]}})
    assert not is_steady({8: {1: [10.0, 10.5, 11]}, 16: {1: [7.0, 12, 30]}})


# --- the file --------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_found_for_its_like_alone(tmp_path: Path):
    path = tmp_path / "cache" / "threads.json"
    keep(path, kept())
    assert find(path, "p", "b", SHAPE) == Threads(8, 16)
    assert find(path, "other", "b", SHAPE) is None
    assert find(path, "p", "other", SHAPE) is None
    assert find(path, "p", "b", ModelShape(31, SHAPE.weights_bytes)) is None
    assert [each.name for each in path.parent.iterdir()] == ["threads.json"]


def test_a_new_measurement_replaces_the_old_one(tmp_path: Path):
    path = tmp_path / "threads.json"
    for each in (kept(), kept(4, n_layers=1), kept(6)):
        keep(path, each)
    assert [each.threads.decode for each in read(path)] == [4, 6]


def test_old_entries_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(thread_choice, "MAX_ENTRIES", 3)
    path = tmp_path / "threads.json"
    for n_layers in range(5):
        keep(path, kept(n_layers=n_layers))
    assert [each.shape.n_layers for each in read(path)] == [2, 3, 4]


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"processors": "p"}]', "\xff"])
def test_a_damaged_file_holds_nothing_and_is_replaced(tmp_path: Path, text: str):
    path = tmp_path / "threads.json"
    path.write_bytes(text.encode("latin-1"))
    assert read(path) == []
    keep(path, kept())
    assert find(path, "p", "b", SHAPE) == Threads(8, 16)


def test_a_folder_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path):
    path = tmp_path / "threads.json"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        keep(path, kept())
    assert list(tmp_path.iterdir()) == [path]
