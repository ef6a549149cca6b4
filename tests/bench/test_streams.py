"""Requests against a scripted server: what arrives, what fails, and how it is recorded."""

from __future__ import annotations

import asyncio
import socket
import statistics
import threading
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.bench.metrics import gaps_s
from localrun.bench.results import Options, StreamRecord, Target
from localrun.bench.streams import (
    CUT_SHORT,
    N_NUMBERS,
    Endpoint,
    PromptForm,
    RequestRefused,
    arrivals_s,
    numbers,
    post_stream,
)
from localrun.errors import BadRequest, DaemonUnreachable, LocalrunError
from tests.bench.conftest import Asked, FakeServer, Reply


@given(st.integers(0, 2**31), st.text(max_size=10), st.integers(0, 50))
def test_the_same_seed_and_label_give_the_same_numbers(seed: int, label: str, count: int) -> None:
    found = numbers(seed, label, count)
    assert len(found) == count
    assert found == numbers(seed, label, count)
    assert all(0 <= number < N_NUMBERS for number in found)


def test_another_seed_or_label_begins_differently() -> None:
    beginnings = {tuple(numbers(seed, label, 8)) for seed in range(10) for label in ("a", "b")}
    assert len(beginnings) == 20


@given(st.lists(st.integers(0, N_NUMBERS - 1), min_size=1))
def test_a_prompt_has_a_token_or_a_word_per_number(chosen: list[int]) -> None:
    assert len(PromptForm.IDS.prompt(chosen)) == len(PromptForm.LOW_IDS.prompt(chosen)) == len(chosen)
    text = PromptForm.TEXT.prompt(chosen)
    assert isinstance(text, str)
    assert len(text.split()) == len(chosen)


def test_the_highest_number_is_the_highest_id() -> None:
    for wording in (PromptForm.IDS, PromptForm.LOW_IDS):
        ids = wording.prompt(range(N_NUMBERS))
        assert isinstance(ids, list)
        assert wording is PromptForm.LOW_IDS or max(ids) == ids[-1]
        assert min(ids) > 32


def test_prompts_with_a_common_beginning_keep_it_in_every_wording() -> None:
    system = numbers(1, "system", 20)
    for wording in PromptForm:
        one, other = (wording.prompt(system + numbers(1, label, 5)) for label in ("a", "b"))
        common = wording.prompt(system)
        assert one[: len(common)] == other[: len(common)] == common
        assert one != other


URL = "/v1/completions"


def answered(raw: bytes) -> bytes:
    """What a POST gets from a server that sends these bytes and closes the connection. Raises what it raises."""
    got = b""

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(raw)
        connection.close()

    def take(data: bytes, _now_s: float) -> None:
        nonlocal got
        got += data

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            asyncio.run(post_stream(f"http://127.0.0.1:{listener.getsockname()[1]}{URL}", b"{}", take))
        finally:
            thread.join()
    return got


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nhello",
    ],
)
def test_an_answer_may_end_by_length_by_chunk_or_by_closing(raw: bytes) -> None:
    assert answered(raw) == b"hello"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ],
)
def test_an_answer_that_breaks_off_is_an_error(raw: bytes) -> None:
    with pytest.raises(LocalrunError, match="complete"):
        answered(raw)


def test_what_is_not_http_is_said() -> None:
    with pytest.raises(LocalrunError, match="not HTTP"):
        answered(b"220 smtp ready\r\n")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "status 400: too long"),
        (b'{"error": "too long"}', "status 400: too long"),
        (b"Bad Request", "status 400: Bad Request"),
        (b'["odd"]', 'status 400: ["odd"]'),
    ],
)
def test_a_refusal_says_the_server_s_reason(body: bytes, reason: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        answered(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert (caught.value.http_status, caught.value.message, caught.value.retry_after_s) == (400, reason, None)


@pytest.mark.parametrize(("header", "seconds"), [(b"7", 7.0), (b"Wed, 21 Oct 2026 07:28:00 GMT", None)])
def test_when_to_come_back_is_read_where_it_is_a_number(header: bytes, seconds: float | None) -> None:
    with pytest.raises(RequestRefused) as caught:
        answered(b"HTTP/1.1 429 Busy\r\nRetry-After: %b\r\nContent-Length: 0\r\n\r\n" % header)
    assert caught.value.retry_after_s == seconds


PROMPT = numbers(1, "prompt", 5)


def use(server: FakeServer, work: Callable[[Endpoint], Awaitable[StreamRecord]], **options: object) -> StreamRecord:
    async def run() -> StreamRecord:
        return await work(Endpoint(server.target, Options(seed=1, **options)))  # type: ignore[arg-type]

    return asyncio.run(run())


def test_a_stream_is_recorded_piece_by_piece_with_the_server_s_counts(server: FakeServer) -> None:
    server.reply = lambda _: Reply([(0.0, "one two"), (0.02, ""), (0.02, "three")], n_output=7, n_cached=3)
    record = use(server, lambda endpoint: endpoint.send(PROMPT, 7, group="cold", client="me"))
    assert record.is_complete
    assert (record.n_prompt, record.n_cached, record.n_output) == (5, 3, 7)
    assert len(record.arrivals_s) == 2
    assert record.arrivals_s[1] - record.arrivals_s[0] > 0.03
    assert (record.group, record.client, record.status) == ("cold", "me", 200)
    assert record.sent_at_s <= record.arrivals_s[0] <= record.ended_at_s


def test_what_is_asked_for(server: FakeServer) -> None:
    use(server, lambda endpoint: endpoint.send(PROMPT, 7, client="me"), latency="interactive", lane="batch")
    (asked,) = server.asked
    assert asked.body["prompt"] == PromptForm.IDS.prompt(PROMPT)
    assert (asked.body["max_tokens"], asked.body["ignore_eos"], asked.body["temperature"]) == (7, True, 0)
    assert asked.headers["X-Localrun-Client"] == "me"
    assert asked.headers["X-Localrun-Latency"] == "interactive"
    assert asked.headers["X-Localrun-Lane"] == "batch"


def test_without_usage_a_piece_is_a_token(server: FakeServer) -> None:
    server.reply = lambda _: Reply([(0.0, "x")] * 4, usage=False)
    record = use(server, lambda endpoint: endpoint.send(PROMPT, 4))
    assert record.is_complete
    assert record.n_output == 4


def test_a_refusal_is_recorded_with_its_status_and_when_to_come_back(server: FakeServer) -> None:
    server.reply = lambda _: Reply(status=429, headers={"Retry-After": "7"}, message="the queue is full")
    record = use(server, lambda endpoint: endpoint.send(PROMPT, 4))
    assert (record.status, record.retry_after_s, record.is_complete) == (429, 7.0, False)
    assert "the queue is full" in record.problem


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply([(0.0, "x")], breaks=True), "connection broke"),
        (Reply([(0.0, "x"), (5.0, "y")]), "no end after 0.3 s"),
        (Reply([]), "no text"),
        (Reply(status=500, message="the engine died"), "the engine died"),
    ],
)
def test_a_stream_that_fails_does_not_raise_but_says_why(server: FakeServer, reply: Reply, problem: str) -> None:
    server.reply = lambda _: reply
    record = use(server, lambda endpoint: endpoint.send(PROMPT, 4), request_timeout_s=0.3)
    assert not record.is_complete
    assert problem in record.problem


def test_a_stream_that_is_cut_says_so_also_when_it_never_began(server: FakeServer) -> None:
    server.reply = lambda _: Reply([(0.0, "x"), (5.0, "y")])

    async def run() -> list[StreamRecord]:
        endpoint = Endpoint(server.target, Options(seed=1))
        running = endpoint.begin(PROMPT, 4)
        await endpoint.until(lambda: bool(running.record.arrivals_s), 10.0)
        endpoint.begin(PROMPT, 4)
        await endpoint.cut_all()
        return endpoint.records

    records = asyncio.run(run())
    assert [record.problem for record in records] == [CUT_SHORT, CUT_SHORT]
    assert [len(record.arrivals_s) for record in records] == [1, 0]


def test_a_late_request_is_measured_from_when_it_should_have_been_sent(server: FakeServer) -> None:
    async def late(endpoint: Endpoint) -> StreamRecord:
        early_s = asyncio.get_running_loop().time()
        await asyncio.sleep(0.05)
        return await endpoint.begin(PROMPT, 4, intended_at_s=early_s).task

    record = use(server, late)
    assert record.ttft_s > 0.05
    assert record.sent_at_s - record.intended_at_s >= 0.045


@pytest.mark.parametrize(
    ("accepts", "wording"), [(1300, PromptForm.IDS), (256, PromptForm.LOW_IDS), (0, PromptForm.TEXT)]
)
def test_the_most_exact_prompts_that_the_server_takes(server: FakeServer, accepts: int, wording: PromptForm) -> None:
    def reply(asked: Asked) -> Reply:
        prompt = asked.body["prompt"]
        is_refused = not isinstance(prompt, str) and max(prompt) >= accepts
        return Reply(status=400, message="not a token") if is_refused else Reply([(0.0, "x")])

    server.reply = reply

    async def found() -> PromptForm:
        endpoint = Endpoint(server.target, Options(seed=1))
        await endpoint.connect()
        return endpoint.wording

    assert asyncio.run(found()) is wording


def test_a_server_that_refuses_for_another_reason_is_an_error(server: FakeServer) -> None:
    server.reply = lambda _: Reply(status=404, message="no such model")
    with pytest.raises(RequestRefused, match="no such model"):
        asyncio.run(Endpoint(server.target, Options(seed=1)).connect())
    assert len(server.asked) == 1


def test_a_first_answer_without_text_is_an_answer(server: FakeServer) -> None:
    server.reply = lambda _: Reply([(0.0, "")])
    asyncio.run(Endpoint(server.target, Options(seed=1)).connect())
    assert len(server.asked) == 1


def test_a_server_that_does_not_answer_is_given_up(server: FakeServer) -> None:
    server.reply = lambda _: Reply([(5.0, "x")])
    with pytest.raises(LocalrunError, match=r"did not answer in 0\.1 s"):
        asyncio.run(Endpoint(server.target, Options(seed=1, request_timeout_s=0.1)).connect())


def test_nobody_there_is_an_error_before_anything_is_measured() -> None:
    endpoint = Endpoint(Target("none", "http://127.0.0.1:9", "model"), Options(seed=1))
    with pytest.raises(DaemonUnreachable):
        asyncio.run(endpoint.connect())


def test_other_protocols_are_refused_with_the_reason() -> None:
    with pytest.raises(BadRequest, match="speaks HTTP"):
        asyncio.run(Endpoint(Target("box", "ftp://127.0.0.1", "model"), Options(seed=1)).connect())


@settings(max_examples=50)
@given(st.floats(0.1, 50), st.floats(0.1, 20), st.floats(0.2, 5), st.integers(0, 2**31))
def test_times_ascend_within_the_window_and_repeat_with_the_seed(
    rate_per_s: float, seconds: float, burstiness: float, seed: int
) -> None:
    times = arrivals_s(rate_per_s=rate_per_s, seconds=seconds, burstiness=burstiness, seed=seed)
    assert times == sorted(times)
    assert all(0 <= at < seconds for at in times)
    assert times == arrivals_s(rate_per_s=rate_per_s, seconds=seconds, burstiness=burstiness, seed=seed)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_the_mean_is_the_rate_and_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    gaps = gaps_s(arrivals_s(rate_per_s=10.0, seconds=2000.0, burstiness=burstiness, seed=1))
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    # Of a Gamma distribution the coefficient of variation is 1 / sqrt(shape).
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_another_seed_gives_other_times() -> None:
    assert arrivals_s(rate_per_s=5, seconds=5, seed=1) != arrivals_s(rate_per_s=5, seconds=5, seed=2)
