"""One engine process and the conversation with it: every way that it can go wrong, on both event loops."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import uvloop

from localrun import framing, wire
from localrun.errors import BadModelFile, EngineDied, EngineFailed, LocalrunError, QueueFull, TooLarge, Unavailable
from localrun.server.engines import machine
from localrun.server.engines.link import EngineLink
from tests.fakes import ENGINE

SCRIPT = str(Path(__file__).parents[1] / "scripted_engine.py")
OPEN = wire.Open(
    model_path="none", n_slots=2, n_kv_cells=512, n_batch=32, n_threads=1, n_gpu_layers=0, kv_type="f16",
    target_itl_s=0.1, ram_cache_bytes=0, max_queue=8,
)  # fmt: skip


class _Sink:
    id = "req_x"

    def __init__(self, *, has_begun: bool = True, has_shown: bool = False, is_on_trial: bool = False) -> None:
        self.has_begun, self.has_shown, self.is_on_trial = has_begun, has_shown, is_on_trial
        self.record = self
        self.is_blamed = self.is_alone = False
        self.deltas: list[wire.Delta] = []
        self.error: LocalrunError | None = None
        self.over = asyncio.Event()

    def on_started(self, started: wire.Started) -> None:
        pass

    def on_delta(self, delta: wire.Delta, now_s: float) -> None:
        self.deltas.append(delta)
        if delta.finish is not None:
            self.over.set()

    def on_engine_gone(self, error: LocalrunError, *, is_blamed: bool, is_alone: bool) -> bool:
        assert self.error is None, "told twice"
        self.is_blamed, self.is_alone = is_blamed, is_alone
        self.error = error
        self.over.set()
        return False


def _link(script: str, ended: list[EngineLink] | None = None) -> EngineLink:
    command = ENGINE if script == "fake" else [sys.executable, SCRIPT, script]
    seen = ended if ended is not None else []
    return EngineLink(model="m", command=command, on_step=lambda link, step: None, on_end=seen.append)


def _submit(link: EngineLink, sink: _Sink, n_predict: int = 4) -> int:
    message = wire.Submit(
        id=link.next_id(), segments=(wire.Segment("hi"),), n_predict=n_predict, ignore_eos=True,
        sampling=wire.Sampling(temperature=0),
    )  # fmt: skip
    link.submit(message, sink)
    return message.id


def _gone(pid: int | None) -> bool:
    """No process by that id, not even a zombie."""
    assert pid is not None
    return not psutil.pid_exists(pid)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    return asyncio.run if request.param == "asyncio" else uvloop.run


Run = Callable[[Coroutine[Any, Any, None]], None]


def test_a_request_goes_out_and_its_news_come_in(run: Run) -> None:
    async def main() -> None:
        link, sink = _link("fake"), _Sink()
        ready = await link.open(OPEN, 30)
        assert ready.n_ctx == 512
        _submit(link, sink, n_predict=4)
        assert link.n_outstanding == 1
        await sink.over.wait()
        assert sink.deltas[-1].finish is wire.Finish.LENGTH
        assert sum(len(delta.tokens) for delta in sink.deltas) == 4
        assert link.n_outstanding == 0
        assert (await link.count((wire.Segment("abc"),))).tokens == (97, 98, 99)
        assert link.stats is not None
        (longest,) = link.long_steps()[:1]
        assert "decode" in longest.parts
        assert sum(longest.parts.values()) == pytest.approx(longest.seconds)
        assert time.time() - longest.at_s < 60
        pid = link.pid
        await link.stop()
        assert _gone(pid)

    run(main())


def test_a_kill_is_noticed_and_named(run: Run) -> None:
    async def main() -> None:
        ended: list[EngineLink] = []
        link, sinks = _link("ready", ended), [_Sink(), _Sink()]
        await link.open(OPEN, 30)
        for sink in sinks:
            _submit(link, sink)
        counting = asyncio.ensure_future(link.count(()))
        pid = link.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for sink in sinks:
            await sink.over.wait()
            assert isinstance(sink.error, EngineDied)
            assert "SIGKILL" in sink.error.message
        await asyncio.wait([counting])
        with pytest.raises(LocalrunError):
            raise counting.exception() or AssertionError("answered")
        assert ended == [link]
        assert link.died
        assert _gone(pid)
        with pytest.raises(EngineDied):
            _submit(link, _Sink())
        await link.stop()

    run(main())


def test_the_last_lines_of_a_dead_engine_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        link, sink = _link("ready"), _Sink()
        await link.open(msgspec.structs.replace(OPEN, use_extra_bufts=False), 30)
        _submit(link, sink)
        os.kill(link.pid or 0, signal.SIGSEGV)
        await sink.over.wait()

    with caplog.at_level(logging.INFO, "localrun.engine"):
        asyncio.run(main())
    assert "[m] a line for the log" in caplog.messages
    assert any("SIGSEGV" in message and "a line for the log" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("script", "error_class", "text"),
    [
        ("refuse", BadModelFile, "no such architecture"),
        ("abort", BadModelFile, "SIGABRT"),
        ("threads", EngineDied, "TasksMax"),
        ("killed", EngineDied, "ran out of memory"),
        ("exit", EngineDied, "status 3"),
    ],
)
def test_a_load_that_fails_says_how(run: Run, script: str, error_class: type[LocalrunError], text: str) -> None:
    async def main() -> None:
        link = _link(script)
        with pytest.raises(error_class, match=text):
            await link.open(OPEN, 30)
        assert _gone(link.pid)

    run(main())


def test_a_load_that_takes_too_long_is_ended_even_if_it_ignores_signals(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localrun.server.engines.link.TERMINATE_GRACE_S", 0.1)

    async def main() -> None:
        link = _link("hang")
        with pytest.raises(EngineFailed, match="load_timeout_s"):
            await link.open(OPEN, 0.5)
        assert _gone(link.pid)

    run(main())


def test_a_program_that_cannot_start_is_an_error_and_not_a_crash(run: Run) -> None:
    async def main() -> None:
        link = EngineLink(
            model="m", command=["/nonexistent/engine"], on_step=lambda link, step: None, on_end=lambda link: None
        )
        with pytest.raises(EngineFailed, match="could not be started"):
            await link.open(OPEN, 5)

    run(main())


async def _open_and_wait_for_the_end(script: str) -> None:
    ended = asyncio.Event()
    command = [sys.executable, SCRIPT, script]
    link = EngineLink(model="m", command=command, on_step=lambda link, step: None, on_end=lambda link: ended.set())
    await link.open(OPEN, 30)
    await asyncio.wait_for(ended.wait(), 10)
    assert isinstance(link.error, EngineDied)
    assert _gone(link.pid)


def test_an_engine_that_breaks_the_framing_is_killed(run: Run) -> None:
    run(_open_and_wait_for_the_end("garbage"))


def test_an_engine_that_closes_its_stdout_is_killed() -> None:
    asyncio.run(_open_and_wait_for_the_end("mute"))


def test_stopping_ends_what_runs_with_unavailable(run: Run) -> None:
    async def main() -> None:
        link, sink = _link("ready"), _Sink()
        await link.open(OPEN, 30)
        _submit(link, sink)
        await link.stop()
        assert isinstance(sink.error, Unavailable)
        assert not link.died
        assert _gone(link.pid)

    run(main())


def test_nothing_is_left_open(run: Run) -> None:
    async def main() -> None:
        this = psutil.Process()
        before, children_before = this.num_fds(), set(this.children())
        for _ in range(5):
            link = _link("echo")
            await link.open(OPEN, 30)
            await link.stop()
        assert this.num_fds() <= before + 2  # the loop's own, made at first use
        assert set(this.children()) <= children_before

    run(main())


def test_clearing_is_answered_by_what_it_freed_or_by_the_end(run: Run) -> None:
    async def main() -> None:
        link = _link("echo")
        await link.open(OPEN, 30)
        assert await link.clear_cache(ram=True, disk=False) == wire.Cleared(id=1, ram_bytes=7, disk_bytes=0)
        assert await link.clear_cache(ram=True, disk=True) == wire.Cleared(id=2, ram_bytes=7, disk_bytes=5)
        await link.stop()
        with pytest.raises(Unavailable):
            await link.clear_cache(ram=True, disk=True)
        silent = _link("flood")
        await silent.open(OPEN, 30)
        clearing = asyncio.create_task(silent.clear_cache(ram=True, disk=True))
        await asyncio.sleep(0)
        assert silent.n_outstanding == 1
        silent.kill("was killed by a test")
        with pytest.raises(EngineDied):
            await clearing

    run(main())


def test_a_huge_log_line_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        link = _link("long-line")
        await link.open(OPEN, 30)
        await link.count(())
        await link.stop()

    with caplog.at_level(logging.INFO, "localrun.engine"):
        asyncio.run(main())
    lines = [message for message in caplog.messages if "yyyy" in message]
    assert len(lines) == 1
    assert len(lines[0]) < 5000


DAEMON = """
import asyncio, sys, uvloop
from localrun import wire
from localrun.server.engines.link import EngineLink
from tests_open import ENGINE, OPEN

async def main():
    links = [EngineLink(model=str(n), command=ENGINE, on_step=lambda *a: None, on_end=print) for n in range(2)]
    for link in links:
        await link.open(OPEN, 30)
    print(*[link.pid for link in links], flush=True)
    await asyncio.sleep(600)

(uvloop if sys.argv[1] == "uvloop" else asyncio).run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_engines_end_when_the_daemon_is_killed(loop: str, tmp_path: Path) -> None:
    (tmp_path / "tests_open.py").write_text(f"from localrun.wire import Open\nOPEN = {OPEN!r}\nENGINE = {ENGINE!r}\n")
    (tmp_path / "daemon.py").write_text(DAEMON)

    async def main() -> None:
        daemon = await asyncio.create_subprocess_exec(
            sys.executable, str(tmp_path / "daemon.py"), loop, stdout=asyncio.subprocess.PIPE
        )
        assert daemon.stdout is not None
        pids = [int(word) for word in (await asyncio.wait_for(daemon.stdout.readline(), 60)).split()]
        engines = [psutil.Process(pid) for pid in pids]
        daemon.kill()
        await daemon.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, engines, timeout=10)
        for engine in alive:
            engine.kill()
        assert len(pids) == 2
        assert alive == []

    asyncio.run(main())


async def test_a_crash_is_one_and_a_kill_is_none_and_an_answer_is_noted_once() -> None:
    async def end_of(script: str, signal_number: int, *, answer_first: bool) -> tuple[EngineLink, int]:
        answered: list[EngineLink] = []
        gone = asyncio.Event()
        link = EngineLink(
            model="m", command=[sys.executable, SCRIPT, script], on_step=lambda link, step: None,
            on_end=lambda link: gone.set(), on_answered=answered.append,
        )  # fmt: skip
        await link.open(OPEN, 30)
        for _ in range(2 * answer_first):
            _submit(link, sink := _Sink())
            await asyncio.wait_for(sink.over.wait(), 20)
        os.kill(link.pid or 0, signal_number)
        await gone.wait()
        return link, len(answered)

    link, n_answered = await end_of("echo", signal.SIGSEGV, answer_first=True)
    assert (link.crash, link.has_answered, n_answered) == ("was killed by SIGSEGV", True, 1)
    link, n_answered = await end_of("ready", signal.SIGKILL, answer_first=False)
    assert (link.crash, link.has_answered, n_answered) == (None, False, 0)


async def test_who_was_on_trial_is_to_blame_or_else_all_that_had_begun() -> None:
    async def blamed(*sinks: _Sink) -> list[bool]:
        link = _link("ready")
        await link.open(OPEN, 30)
        for sink in sinks:
            _submit(link, sink)
        link.kill("was killed by a test")
        for sink in sinks:
            await asyncio.wait_for(sink.over.wait(), 20)
        assert len({sink.is_alone for sink in sinks}) == 1
        assert sinks[0].is_alone == (sum(sink.is_blamed for sink in sinks) == 1)
        return [sink.is_blamed for sink in sinks]

    waiting, running, shown = partial(_Sink, has_begun=False), partial(_Sink), partial(_Sink, has_shown=True)
    tried = partial(_Sink, is_on_trial=True)
    assert await blamed(shown(), running(), waiting()) == [True, True, False]
    assert await blamed(waiting(), waiting()) == [True, True]
    assert await blamed(shown(), tried(), waiting()) == [False, True, False]
    assert await blamed(shown(), tried(), running()) == [False, True, True]


async def test_an_engine_for_another_processor_says_what_to_type() -> None:
    link, sinks = _link("always-submit"), [_Sink(), _Sink()]
    await link.open(OPEN, 30)
    for sink in sinks:
        _submit(link, sink)
    for sink in sinks:
        await asyncio.wait_for(sink.over.wait(), 20)
        assert isinstance(sink.error, EngineDied)
        assert "SIGILL" in sink.error.message
        assert "different processor" in sink.error.message
        assert "native_build install --force" in sink.error.message


async def test_a_count_that_is_refused_raises_what_the_engine_says() -> None:
    link = _link("full")
    await link.open(OPEN, 30)
    with pytest.raises(QueueFull, match="full") as refused:
        await link.count((wire.Segment("a"),))
    assert refused.value.retry_after_s == 7.0
    await link.stop()


@pytest.mark.parametrize(
    ("signal_name", "oom_kills", "was_killed"),
    [
        ("SIGKILL", [3, 3], True),
        ("SIGKILL", [3, 4], False),
        ("SIGKILL", [None, None], False),
        ("SIGTERM", [3, 4], True),
        ("SIGSEGV", [3, 3], False),
    ],
)
async def test_who_is_to_blame_if_others_end_an_engine(
    monkeypatch: pytest.MonkeyPatch, signal_name: str, oom_kills: list[int | None], was_killed: bool
) -> None:
    """Nobody; but the kernel kills for memory, which a request may have used up."""
    left = iter(oom_kills)
    monkeypatch.setattr(machine, "oom_kills", lambda: next(left))
    link, sink = _link("ready"), _Sink()
    await link.open(OPEN, 30)
    _submit(link, sink)
    os.kill(link.pid or 0, getattr(signal, signal_name))
    await asyncio.wait_for(sink.over.wait(), 20)
    assert (link.was_killed, sink.is_blamed) == (was_killed, not was_killed)


def test_a_request_that_no_frame_holds_fails_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine took it for a broken pipe, and ended with everybody's requests on it."""

    async def main() -> None:
        link, sink = _link("fake"), _Sink()
        await link.open(OPEN, 30)
        monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 10_000)
        large = wire.Submit(id=link.next_id(), segments=(wire.Segment("x" * 20_000),), n_predict=1)
        with pytest.raises(TooLarge, match="too large for an engine"):
            link.submit(large, sink)
        with pytest.raises(TooLarge):
            await link.count((wire.Segment("x" * 20_000),))
        assert link.n_outstanding == 0
        _submit(link, sink, n_predict=4)
        await sink.over.wait()
        assert sink.deltas[-1].finish is wire.Finish.LENGTH
        await link.stop()

    run(main())
