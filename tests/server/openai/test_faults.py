"""/v1 when things go wrong: full queues, lanes, cancels, engines that die, clients that leave."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from tests.daemon import Daemon, running_daemon

HELLO = [{"role": "user", "content": "hello"}]


def chat(daemon: Daemon, **fields: Any) -> httpx2.Response:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "temperature": 0} | fields
    return daemon.post("/v1/chat/completions", body)


def complete(daemon: Daemon, **fields: Any) -> httpx2.Response:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "temperature": 0} | fields
    return daemon.post("/v1/completions", body)


def test_interactive_requests_take_slots_of_batch_ones_and_both_get_their_whole_answers() -> None:
    with running_daemon(LOCALRUN_SLOTS="1", LOCALRUN_FAKE_STEP_MS="10") as daemon:
        alone = complete(daemon, max_tokens=150, ignore_eos=True).json()["choices"][0]["text"]
        with ThreadPoolExecutor(1) as pool:
            batch = pool.submit(lambda: complete(daemon, max_tokens=150, ignore_eos=True, lane="batch"))
            while not any(
                row["state"] == "decode" for row in daemon.http.get("/localrun/v1/snapshot").json()["requests"]
            ):
                time.sleep(0.01)
            short = complete(daemon, max_tokens=3, ignore_eos=True, lane="interactive", latency=20)
            assert short.json()["usage"]["completion_tokens"] == 3
            assert not batch.done(), "it did not wait for the batch request"
            assert batch.result().json()["choices"][0]["text"] == alone
        assert daemon.http.get("/localrun/v1/snapshot").json()["engines"][0]["preemptions_total"] == 1


def test_waiting_requests_are_told_how_long() -> None:
    with running_daemon(LOCALRUN_SLOTS="1", LOCALRUN_FAKE_STEP_MS="10") as daemon:
        complete(daemon, max_tokens=2)
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(lambda: complete(daemon, max_tokens=100, ignore_eos=True)) for _ in range(2)]
            waits: list[float] = []
            while not all(answer.done() for answer in answers):
                rows = daemon.http.get("/localrun/v1/requests").json()["requests"]
                waits += [row["predicted_wait_s"] for row in rows if row["predicted_wait_s"] is not None]
                assert all(row["queue_position"] for row in rows if row["predicted_wait_s"] is not None)
                time.sleep(0.02)
        assert waits
        assert max(waits) > 0


def test_a_cancelled_stream_ends_with_an_error_and_without_done() -> None:
    with running_daemon(LOCALRUN_FAKE_STEP_MS="10") as daemon:
        body = {"model": "tiny", "prompt": "x", "stream": True, "ignore_eos": True, "n": 2}
        with daemon.http.stream("POST", "/v1/completions", json=body) as response:
            stream = response.iter_lines()
            next(stream)
            request_id = response.headers["x-localrun-request"].split(", ")[1]
            daemon.http.delete(f"/localrun/v1/requests/{request_id}")
            data = [line.removeprefix("data: ") for line in stream if line]
        assert json.loads(data[-1])["error"]["code"] == "cancelled"
        wait_until_idle(daemon)


def test_without_resume_an_engine_that_dies_ends_its_streams_and_is_replaced() -> None:
    with running_daemon(LOCALRUN_RESUME="off", LOCALRUN_FAKE_STEP_MS="10") as daemon:
        body = {"model": "tiny", "prompt": "x", "stream": True, "ignore_eos": True}
        with daemon.http.stream("POST", "/v1/completions", json=body) as response:
            stream = response.iter_lines()
            next(stream)
            os.kill(daemon.http.get("/localrun/v1/snapshot").json()["engines"][0]["pid"], signal.SIGKILL)
            data = [line.removeprefix("data: ") for line in stream if line]
        error = json.loads(data[-1])["error"]
        assert (error["code"], error["type"]) == ("engine_died", "api_error")
        assert complete(daemon).status_code == 200


def test_a_client_that_leaves_frees_all_its_choices() -> None:
    with running_daemon(LOCALRUN_FAKE_STEP_MS="10") as daemon:
        body = {"model": "tiny", "prompt": "x", "stream": True, "ignore_eos": True, "n": 4}
        with daemon.http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        wait_until_idle(daemon)
        assert complete(daemon, max_tokens=2).status_code == 200


def wait_until_idle(daemon: Daemon) -> None:
    deadline_s = time.monotonic() + 30
    while (aggregate := daemon.http.get("/localrun/v1/snapshot").json()["aggregate"])["running"]:
        assert time.monotonic() < deadline_s, aggregate
        time.sleep(0.02)
