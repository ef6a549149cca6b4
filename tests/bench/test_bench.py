"""The measuring tools against a real daemon process with fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from localrun.bench.results import Options, StreamRecord, Target
from localrun.bench.streams import Endpoint
from localrun.errors import DaemonUnreachable, LocalrunError
from tests.daemon import Daemon, running_daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    # A step has a price, so that a copy of a prompt is worth it.
    with running_daemon(LOCALRUN_FAKE_STEP_MS="2") as running:
        yield running


async def answered(daemon: Daemon, prompts: list[list[int]], n_output: int) -> list[StreamRecord]:
    endpoint = Endpoint(Target("", daemon.url, "tiny"), Options(seed=1))
    exactly = {"max_tokens": n_output, "temperature": 0, "ignore_eos": True}
    return await asyncio.gather(*(endpoint.ask({"prompt": prompt, **exactly}, group="") for prompt in prompts))


def test_streams_report_what_the_server_counted_and_when_text_came(daemon: Daemon) -> None:
    prompts = [[65 + index, 66, 67] for index in range(4)]
    records = asyncio.run(answered(daemon, prompts, 20))
    for record in records:
        assert (record.n_prompt, record.n_output) == (3, 20)
        assert record.arrivals_s == sorted(record.arrivals_s)
        assert record.ttft_s > 0
        assert 1 < len(record.arrivals_s) <= 20


def test_a_repeated_prompt_is_reported_as_cached(daemon: Daemon) -> None:
    def n_cached(first_token: int) -> list[int]:
        prompt = [first_token, *range(32, 131)]
        return [asyncio.run(answered(daemon, [prompt], 4))[0].n_cached for _ in range(2)]

    # Where a copy was slow, the engine may find it quicker to compute a prompt again, for a while.
    assert any(n_cached(200 + n) == [0, 99] for n in range(20))


def test_a_refusal_is_an_error_with_the_server_s_reason(daemon: Daemon) -> None:
    with pytest.raises(LocalrunError, match="no-such-model"):
        asyncio.run(Endpoint(Target("", daemon.url, "no-such-model"), Options(seed=1)).connect())


def test_nobody_listening_is_said_so() -> None:
    with pytest.raises(DaemonUnreachable):
        asyncio.run(Endpoint(Target("", "http://127.0.0.1:9", "tiny"), Options(seed=1)).connect())
