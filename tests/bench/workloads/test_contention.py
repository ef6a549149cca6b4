"""Several clients, and more than the server can do."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from localrun.bench.results import Options
from localrun.bench.streams import CUT_SHORT
from localrun.bench.workloads.throughput import FAIRNESS, HOG, MOUSE, N_BY_CLIENT, N_HOG_STREAMS, OVERLOAD
from tests.bench.conftest import Asked, FakeServer, Reply

FEW_MICE = Options(seed=1, seconds=0.1)


def paced(asked: Asked) -> Reply:
    return Reply([(0.002, "x")] * asked.body["max_tokens"])


def test_the_mouse_is_measured_alone_and_beside_the_hog(server: FakeServer) -> None:
    server.reply = paced
    result = asyncio.run(FAIRNESS.run(server.target, FEW_MICE))
    assert Counter(record.group for record in result.records) == {"alone": 3, "hog": N_HOG_STREAMS, "beside": 1}
    clients = {asked.headers["X-Localrun-Client"] for asked in server.asked}
    assert {HOG, MOUSE} <= clients
    hog = [record for record in result.records if record.client == HOG]
    beside = next(record for record in result.records if record.group == "beside")
    assert any(len(record.arrivals_s) >= 8 and record.arrivals_s[7] <= beside.sent_at_s for record in hog)
    assert {record.problem for record in hog} == {CUT_SHORT}
    assert result.metrics["completion_ratio"] == 1.0
    assert 0 < result.metrics["mouse_service_share"] < 0.5
    assert set(FAIRNESS.shown(result.metrics)) == set(FAIRNESS.headline)


def test_a_hog_that_is_refused_waits_before_it_tries_again(server: FakeServer) -> None:
    def reply(asked: Asked) -> Reply:
        is_hog = asked.headers["X-Localrun-Client"] == HOG
        refused = is_hog and sum(each.headers["X-Localrun-Client"] == HOG for each in server.asked) > 2
        return Reply(status=429, headers={"Retry-After": "30"}) if refused else paced(asked)

    server.reply = reply
    result = asyncio.run(FAIRNESS.run(server.target, FEW_MICE))
    assert result.metrics["refused_count"] == N_HOG_STREAMS - 2
    assert "mouse_latency_p50_s" in result.metrics


# --- overload ---

SHORT = Options(seed=1, seconds=0.05)


def test_all_are_served_and_the_second_part_comes_at_twice_the_rate(server: FakeServer) -> None:
    result = asyncio.run(OVERLOAD.run(server.target, SHORT))
    burst = [record for record in result.records if record.group == "burst"]
    assert Counter(record.client for record in burst) == N_BY_CLIENT
    assert result.metrics["burst_completion_ratio"] == result.metrics["open_completion_ratio"] == 1.0
    assert result.parameters["open_rate_per_s"] == pytest.approx(2 * 64 / result.metrics["burst_wall_s"])
    assert set(OVERLOAD.shown(result.metrics)) == set(OVERLOAD.headline)


def test_the_greedy_client_of_a_server_that_goes_by_arrival_starves_the_others(server: FakeServer) -> None:
    """The answers of the others begin when the greedy one's have ended."""
    n_left = N_BY_CLIENT["greedy"]
    lock, is_over = threading.Lock(), threading.Event()

    def greedy(count: int) -> Iterator[tuple[float, str]]:
        nonlocal n_left
        for _ in range(count):
            yield 0.0, "x"
        with lock:
            n_left -= 1
            if n_left == 0:
                is_over.set()

    def other(count: int) -> Iterator[tuple[float, str]]:
        is_over.wait(10)
        yield from [(0.0, "x")] * count

    def reply(asked: Asked) -> Reply:
        waits = asked.headers["X-Localrun-Client"] in ("b", "c", "d")
        is_greedy = asked.headers["X-Localrun-Client"] == "greedy"
        count = asked.body["max_tokens"]
        return Reply(other(count) if waits else greedy(count) if is_greedy else [(0.0, "x")] * count)

    server.reply = reply
    result = asyncio.run(OVERLOAD.run(server.target, SHORT))
    assert result.metrics["burst_lowest_share_ratio"] == 0.0
    assert result.metrics["burst_jain_ratio"] == pytest.approx(0.25)
    assert result.metrics["burst_difference_of_bound"] > 0


def test_refusals_are_counted_apart_from_failures(server: FakeServer) -> None:
    """Of the burst one request in four is refused, every other of these without saying when to come back."""
    lock = threading.Lock()
    n_asked = 0

    def reply(asked: Asked) -> Reply:
        nonlocal n_asked
        with lock:
            n_asked += 1
            index = n_asked - 2  # the first one finds out how to ask
        if 0 <= index < 64 and index % 4 == 3:
            return Reply(status=429, headers={"Retry-After": "3"} if index % 8 == 3 else {})
        if index == 0:
            return Reply(status=500, message="lost")
        return Reply([(0.0, "x")] * asked.body["max_tokens"])

    server.reply = reply
    result = asyncio.run(OVERLOAD.run(server.target, SHORT))
    assert result.metrics["burst_refused_count"] == 16
    assert result.metrics["burst_refused_without_retry_after_count"] == 8
    assert result.metrics["burst_failed_count"] == 1
    assert result.metrics["burst_completion_ratio"] == pytest.approx(47 / 64)


def test_a_server_that_serves_nobody_is_said(server: FakeServer) -> None:
    server.reply = lambda asked: Reply([(0.0, "x")]) if asked.body["max_tokens"] == 1 else Reply(status=503)
    result = asyncio.run(OVERLOAD.run(server.target, SHORT))
    assert result.metrics["burst_failed_count"] == 64
    assert "burst" in result.note
