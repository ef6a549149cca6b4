"""The background thread: in order, bounded, and not ended by a job that fails."""

from __future__ import annotations

import logging
import threading

import pytest

from localrun.engine.cache.disk import WriterThread


@pytest.fixture
def background():
    made = WriterThread("test", backlog_bytes=100)
    yield made
    made.close(10.0)


def test_jobs_run_in_order(background):
    done: list[int] = []
    for number in range(200):
        assert background.put(lambda number=number: done.append(number))
    assert background.flush(10.0)
    assert done == list(range(200))


def test_a_full_backlog_refuses_data_and_takes_the_rest(background):
    go, began = threading.Event(), threading.Event()
    background.put(lambda: (began.set(), go.wait(10.0)), 60)
    began.wait(10.0)
    done: list[str] = []
    assert background.is_behind
    assert not background.put(lambda: done.append("too much"), 60)
    assert background.put(lambda: done.append("fits"), 40)
    assert background.put(lambda: done.append("without data"))
    assert not background.flush(0.01)
    go.set()
    assert background.flush(10.0)
    assert done == ["fits", "without data"]
    assert not background.is_behind
    assert background.put(lambda: done.append("later"), 60)


def test_one_job_may_be_larger_than_the_backlog(background):
    assert background.put(lambda: None, 1000)
    assert background.flush(10.0)


def test_a_failing_job_is_logged_and_the_next_one_runs(background, caplog):
    done: list[int] = []
    with caplog.at_level(logging.ERROR):
        background.put(lambda: 1 // 0)
        background.put(lambda: done.append(1))
        background.flush(10.0)
    assert done == [1]
    assert "ZeroDivisionError" in caplog.text


def test_closing_drops_what_waits_and_takes_nothing_more():
    background = WriterThread("test", backlog_bytes=100)
    go, began = threading.Event(), threading.Event()
    done: list[int] = []
    background.put(lambda: (began.set(), go.wait(10.0)))
    background.put(lambda: done.append(1))
    began.wait(10.0)
    threading.Timer(0.05, go.set).start()
    background.close(10.0)
    assert not background.put(lambda: done.append(2))
    assert done == []
