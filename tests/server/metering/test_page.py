"""What operators ask of the page for Prometheus: which side is at fault, also the first time, and for which model."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from localrun import __version__
from localrun.server.http.connection import MAX_HEAD_BYTES
from tests.daemon import N_CTX, Daemon, running_daemon

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        yield running


def samples(daemon: Daemon) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(daemon.http.get("/metrics").text)
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"localrun_{name}", frozenset(labels.items())


def test_what_is_refused_before_it_is_a_request_is_counted(daemon: Daemon) -> None:
    before = samples(daemon)
    for sent in (b"\x16\x03\x01\x00", b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"x" * 2 * MAX_HEAD_BYTES):
        with socket.create_connection(("127.0.0.1", daemon.port)) as client, contextlib.suppress(ConnectionError):
            client.sendall(sent)
            while client.recv(4096):
                pass
    after = samples(daemon)
    for status, n_more in (("400", 2), ("431", 1)):
        wanted = key("http_responses_total", family="connection", status=status)
        assert after[wanted] - before.get(wanted, 0) == n_more


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_are_calls_ended_by_them_on_every_api(daemon: Daemon, stream: bool) -> None:
    schema = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
    function = {"name": "look", "parameters": schema}
    chat = CHAT | {"stream": stream, "max_tokens": 500, "temperature": 0}
    chat |= {"tools": [{"type": "function", "function": function}]}
    bodies = {
        "/v1/chat/completions": chat | {"tool_choice": "required"},
        "/api/chat": chat | {"tool_choice": "required"},
        "/v1/messages": chat | {"tools": [{"name": "look", "input_schema": schema}], "tool_choice": {"type": "any"}},
        "/v1/responses": {"model": "tiny", "input": "hello", "stream": stream, "temperature": 0}
        | {"tools": [{"type": "function"} | function], "tool_choice": "required"},
    }
    for n_calls, (path, body) in enumerate(bodies.items(), 1):
        assert daemon.post(path, body).status_code == 200
        ends = samples(daemon)
        assert ends[key("request_ends_total", model="tiny", reason="tool_calls")] == n_calls, path
        assert ends[key("request_ends_total", model="tiny", reason="stop")] == 0
    rows = daemon.http.get("/localrun/v1/requests").json()["requests"]
    assert {row["finish_reason"] for row in rows} == {"tool_calls"}


def test_a_refusal_is_counted_by_status_and_reason(daemon: Daemon) -> None:
    """And its series was there with 0 before, or no rate would see the first one."""
    daemon.post("/v1/chat/completions", CHAT)
    before = samples(daemon)
    assert daemon.post("/v1/chat/completions", CHAT | {"messages": "none"}).status_code == 400
    too_long = CHAT | {"messages": [{"role": "user", "content": "x" * N_CTX}]}
    assert daemon.post("/v1/chat/completions", too_long).status_code == 400
    assert daemon.post("/v1/chat/completions", CHAT | {"model": "none-such"}).status_code == 404
    headers = {"origin": "https://elsewhere.example"}
    assert daemon.http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 403
    assert daemon.http.get("/api/nothing").status_code == 404
    after = samples(daemon)
    for wanted, n_more in (
        (key("http_responses_total", family="openai", status="400"), 2),
        (key("http_responses_total", family="openai", status="403"), 1),
        (key("http_responses_total", family="openai", status="404"), 1),
        (key("http_responses_total", family="ollama", status="404"), 1),
        (key("errors_total", code="bad_request", status="400"), 1),
        (key("errors_total", code="context_length_exceeded", status="400"), 1),
        (key("errors_total", code="forbidden", status="403"), 1),
        (key("errors_total", code="model_not_found", status="404"), 1),
        (key("request_ends_total", model="tiny", reason="context_length_exceeded"), 1),
        (key("request_ends_total", model="", reason="model_not_found"), 1),
        (key("requests_total", model="", api="/v1/chat/completions", outcome="failed"), 1),
        (key("requests_total", model="tiny", api="/v1/chat/completions", outcome="failed"), 1),
    ):
        assert after[wanted] - before[wanted] == n_more, wanted


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/completions", {"prompt": "x", "max_tokens": 1000}),
                         ("/v1/responses", {"input": "x", "max_output_tokens": 1000})]
)  # fmt: skip
def test_a_stream_that_breaks_off_is_an_error_of_the_daemon_s(path: str, fields: dict[str, Any]) -> None:
    """Its status was sent before."""
    body = {"model": "tiny", "stream": True, "ignore_eos": True} | fields
    with running_daemon("--resume", "off", LOCALRUN_FAKE_STEP_MS="20") as daemon:
        with daemon.http.stream("POST", path, json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            (engine,) = daemon.http.get("/localrun/v1/snapshot").json()["engines"]
            os.kill(engine["pid"], signal.SIGKILL)
            assert any("engine_died" in line for line in lines)
        found = samples(daemon)
        assert found[key("errors_total", code="engine_died", status="500")] == 1
        assert found[key("request_ends_total", model="tiny", reason="engine_died")] == 1


def test_an_answer_is_counted_by_why_it_ended_and_how_long_it_was(daemon: Daemon) -> None:
    daemon.post("/v1/chat/completions", CHAT)
    found = samples(daemon)
    assert found[key("request_ends_total", model="tiny", reason="length")] == 1
    assert found[key("request_ends_total", model="tiny", reason="stop")] == 0
    assert found[key("request_output_tokens_sum", model="tiny")] == 3
    assert found[key("request_prompt_tokens_sum", model="tiny")] == found[key("prompt_tokens_total", model="tiny")]
    assert found[key("http_responses_total", family="openai", status="200")] == 1
    (build,) = [dict(labels) for name, labels in found if name == "localrun_build_info"]
    assert build["version"] == __version__
    assert found[key("slots", model="tiny")] == 4
    assert found[key("engine_memory_bytes", model="tiny")] > 0


def test_a_full_queue_is_counted_by_the_model_that_is_loaded() -> None:
    with running_daemon("--slots", "1", "--max-queue", "1", LOCALRUN_FAKE_STEP_MS="20") as daemon:
        assert daemon.post("/api/copy", source="tiny", destination="other").status_code == 200
        body = {"model": "tiny", "prompt": "x", "ignore_eos": True, "max_tokens": 1000}
        with (
            daemon.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as running,
            ThreadPoolExecutor() as pool,
        ):
            lines = running.iter_lines()  # whose end is the stream's
            assert next(lines)
            waiting = pool.submit(daemon.post, "/v1/completions", body | {"max_tokens": 1})
            while samples(daemon)[key("requests_queued", model="tiny")] < 1:
                time.sleep(0.01)
            assert daemon.post("/v1/completions", body | {"model": "other"}).status_code == 429
            found = samples(daemon)
            running.close()
            assert waiting.result().status_code == 200
        assert found[key("request_ends_total", model="tiny", reason="queue_full")] == 1
        assert found[key("http_responses_total", family="openai", status="429")] == 1


def test_the_series_of_a_model_that_is_gone_go(daemon: Daemon) -> None:
    assert daemon.post("/api/copy", source="tiny", destination="other").status_code == 200
    assert daemon.post("/v1/chat/completions", CHAT | {"model": "other"}).status_code == 200
    assert any(("model", "other") in labels for _, labels in samples(daemon))
    assert daemon.http.request("DELETE", "/api/delete", json={"model": "other"}).status_code == 200
    assert not any(("model", "other") in labels for _, labels in samples(daemon))


def test_llama_servers_names_are_there_as_well(daemon: Daemon) -> None:
    answers = [daemon.post("/v1/chat/completions", CHAT).json() for _ in range(2)]
    found = {name.removeprefix("llamacpp:"): value for (name, _), value in samples(daemon).items()}
    timings = [answer["timings"] for answer in answers]
    assert found["prompt_tokens_total"] == sum(one["prompt_n"] for one in timings)
    assert found["prompt_tokens_cached_total"] == sum(one["cache_n"] for one in timings)
    assert found["tokens_predicted_total"] == sum(one["predicted_n"] for one in timings) == 6
    assert found["prompt_seconds_total"] == pytest.approx(sum(one["prompt_ms"] for one in timings) / 1000)
    assert found["tokens_predicted_seconds_total"] == pytest.approx(sum(one["predicted_ms"] for one in timings) / 1000)
    assert found["n_decode_total"] >= 6
    assert found["n_tokens_max"] == timings[0]["prompt_n"] + timings[0]["cache_n"] + 3
    assert found["n_busy_slots_per_decode"] >= 0
    assert (found["requests_processing"], found["requests_deferred"]) == (0, 0)
    started_at_s = int(daemon.http.get("/metrics").headers["process-start-time-unix"])
    assert started_at_s <= answers[0]["created"] <= started_at_s + 86_400
