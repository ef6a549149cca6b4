"""Requests against a scripted server: what arrives, what fails, and how it is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from localrun.bench.prompts import Wording, numbers
from localrun.bench.record import StreamRecord
from localrun.bench.results import Options, Target
from localrun.bench.streams import CUT_SHORT, Endpoint
from localrun.bench.wire_client import Refused
from localrun.errors import BadRequest, DaemonUnreachable, LocalrunError
from tests.bench.conftest import Asked, FakeServer, Reply

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
    assert asked.body["prompt"] == Wording.IDS.prompt(PROMPT)
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


@pytest.mark.parametrize(("accepts", "wording"), [(1300, Wording.IDS), (256, Wording.LOW_IDS), (0, Wording.TEXT)])
def test_the_most_exact_prompts_that_the_server_takes(server: FakeServer, accepts: int, wording: Wording) -> None:
    def reply(asked: Asked) -> Reply:
        prompt = asked.body["prompt"]
        is_refused = not isinstance(prompt, str) and max(prompt) >= accepts
        return Reply(status=400, message="not a token") if is_refused else Reply([(0.0, "x")])

    server.reply = reply

    async def found() -> Wording:
        endpoint = Endpoint(server.target, Options(seed=1))
        await endpoint.connect()
        return endpoint.wording

    assert asyncio.run(found()) is wording


def test_a_server_that_refuses_for_another_reason_is_an_error(server: FakeServer) -> None:
    server.reply = lambda _: Reply(status=404, message="no such model")
    with pytest.raises(Refused, match="no such model"):
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


def test_encrypted_servers_are_refused_with_the_reason() -> None:
    with pytest.raises(BadRequest, match="plain HTTP"):
        asyncio.run(Endpoint(Target("tls", "https://127.0.0.1", "model"), Options(seed=1)).connect())
