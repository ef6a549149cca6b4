"""An engine that crashes before its first token: once more without the quick kernels, and nobody notices."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import msgspec
import psutil
import pytest

from localrun import wire
from localrun.errors import EngineDied, LocalrunError
from localrun.server.engines.link import EngineLink
from tests.server.engines.test_link import OPEN, SCRIPT, _Sink, _submit
from tests.server.waiting import until

Recovered = list[tuple[EngineLink, str]]


def _link(script: str, recovered: Recovered, ended: list[EngineLink]) -> EngineLink:
    return EngineLink(
        model="m", command=[sys.executable, SCRIPT, script], on_step=lambda link, step: None, on_end=ended.append,
        on_recovered=lambda link, how: recovered.append((link, how)),
    )  # fmt: skip


async def test_a_crash_while_loading_loads_again_without_quick_kernels() -> None:
    recovered: Recovered = []
    link, sink = _link("quick-load", recovered, ended := []), _Sink()
    await link.open(OPEN, 30)
    assert not link.is_starting_again
    assert recovered == [], "it has not said anything yet"
    _submit(link, sink)
    await asyncio.wait_for(sink.over.wait(), 20)
    assert recovered == [(link, "was killed by SIGSEGV")]
    assert ended == []
    await link.stop()


async def test_what_was_asked_before_the_crash_is_answered_after_it(caplog: pytest.LogCaptureFixture) -> None:
    recovered: Recovered = []
    link, sinks = _link("quick-submit", recovered, ended := []), [_Sink(), _Sink(), _Sink()]
    await link.open(OPEN, 30)
    first_pid = link.pid
    for sink in sinks[:2]:
        _submit(link, sink)
    with caplog.at_level(logging.WARNING, "localrun.engine"):
        await until(lambda: link.is_starting_again)
        _submit(link, sinks[2])  # while nobody listens
        counting = asyncio.ensure_future(link.count((wire.Segment("ab"),)))
        for sink in sinks:
            await asyncio.wait_for(sink.over.wait(), 20)
    assert await counting == (97, 98)
    assert [sink.error for sink in sinks] == [None, None, None]
    assert [sum(len(delta.tokens) for delta in sink.deltas) for sink in sinks] == [2, 2, 2]
    assert [how for _, how in recovered] == ["was killed by SIGILL"]
    assert link.pid != first_pid
    assert len([record for record in caplog.records if "without the quick kernels" in record.message]) == 1
    assert (link.n_outstanding, ended, link.died) == (0, [], False)
    await link.stop()
    assert ended == [link]


async def test_a_request_that_was_cancelled_meanwhile_is_not_asked_again() -> None:
    link, sinks = _link("quick-submit", [], []), [_Sink(), _Sink()]
    await link.open(OPEN, 30)
    ids = [_submit(link, sink) for sink in sinks]
    await until(lambda: link.is_starting_again)
    link.cancel(ids[0])
    for sink in sinks:
        await asyncio.wait_for(sink.over.wait(), 20)
    finishes = [[delta.finish for delta in sink.deltas if delta.finish] for sink in sinks]
    assert len(finishes[0]) == len(finishes[1]) == 1
    await link.stop()


async def test_a_second_crash_is_the_error_and_says_what_to_type() -> None:
    recovered: Recovered = []
    link, sinks = _link("always-submit", recovered, ended := []), [_Sink(), _Sink()]
    await link.open(OPEN, 30)
    for sink in sinks:
        _submit(link, sink)
    for sink in sinks:
        await asyncio.wait_for(sink.over.wait(), 20)
        assert isinstance(sink.error, EngineDied)
        assert "SIGILL" in sink.error.message
        assert "different processor" in sink.error.message
        assert "native_build install --force" in sink.error.message
    assert ended == [link]
    assert recovered == []


async def test_there_is_no_second_start_after_a_token_a_kill_or_without_quick_kernels() -> None:
    async def ends_at_once(script: str, signal_number: int, *, answer_first: bool, message: wire.Open) -> LocalrunError:
        link, sink = _link(script, [], gone := []), _Sink()
        await link.open(message, 30)
        if answer_first:
            _submit(link, sink)
            await asyncio.wait_for(sink.over.wait(), 20)
        os.kill(link.pid or 0, signal_number)
        await until(lambda: bool(gone))
        assert link.error is not None
        return link.error

    plain = msgspec.structs.replace(OPEN, use_extra_bufts=False)
    answered = await ends_at_once("echo", signal.SIGSEGV, answer_first=True, message=OPEN)
    assert "the next request starts a new one" in answered.message
    assert "SIGKILL" in (await ends_at_once("ready", signal.SIGKILL, answer_first=False, message=OPEN)).message
    assert "SIGSEGV" in (await ends_at_once("ready", signal.SIGSEGV, answer_first=False, message=plain)).message


async def test_stopping_ends_the_second_process_too() -> None:
    link, sink = _link("quick-submit", [], ended := []), _Sink()
    await link.open(OPEN, 30)
    _submit(link, _Sink())
    _submit(link, sink)
    await until(lambda: link.is_starting_again)
    await link.stop()
    assert sink.over.is_set()
    assert ended == [link]
    assert not psutil.pid_exists(link.pid or -1)
