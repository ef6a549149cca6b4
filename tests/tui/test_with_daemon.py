"""The app against real daemons: what the fakes elsewhere promise is what they do.

With fake engines where an answer has to be slow enough to be stopped, with `tiny` where real numbers are wanted.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.widgets import Digits

from localrun.snapshot import RequestState, Snapshot
from localrun.tui import short_text
from localrun.tui.app import LocalrunApp
from localrun.tui.widgets.kv_map import KvMap
from localrun.tui.widgets.prompt import Prompt
from localrun.tui.widgets.tables import LiveTable
from localrun.tui.widgets.vitals import RequestDetail, Vitals
from tests.daemon import running_daemon

# Slow enough to be stopped in the middle, on any machine.
_STEP_MS = "100"
_BODY = {"model": "tiny", "prompt": "go on", "max_tokens": 500, "ignore_eos": True}
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


async def test_chat_stop_watch_cancel_and_lose_the_daemon(desk: Any) -> None:
    with running_daemon(LOCALRUN_FAKE_STEP_MS=_STEP_MS) as daemon:
        app = desk.app = LocalrunApp(daemon.url, retry_delays_s=(0.1,))
        async with app.run_test(size=(100, 30), notifications=True) as pilot:
            await desk.see(pilot, "the first question")
            await pilot.press(*"hello", "enter")
            await desk.see(pilot, "● decoding")
            await desk.see(pilot, "TTFT")
            await desk.see(pilot, "cached 0")
            await pilot.press("escape")
            await desk.see(pilot, "● stopped")
            assert app.session.snapshot is not None
            await desk.until(pilot, lambda: _states(app) == [RequestState.CANCELLED])

            other = asyncio.create_task(asyncio.to_thread(daemon.post, "/v1/completions", _BODY))
            await pilot.press("f2")
            await desk.see(pilot, "decode      python-h")
            # The selection is still on the request that was there first.
            await pilot.press("up", "x")
            await desk.see(pilot, "Cancelled the request of")
            assert (await other).status_code == 499
            assert _states(app)[-1] is not RequestState.DONE

            await pilot.press("f1")
            await pilot.pause()
            await pilot.press(*"draft")
            daemon.stop()
            await desk.see(pilot, "No daemon at")
            assert app.screen.query_one(Prompt).text == "draft"


async def test_the_daemon_and_an_engine_that_die_in_mid_answer_are_said_and_what_came_is_kept(
    desk: Any, tmp_path: Path
) -> None:
    with running_daemon(LOCALRUN_RESUME="off", LOCALRUN_FAKE_STEP_MS=_STEP_MS) as daemon:
        app = desk.app = LocalrunApp(daemon.url, retry_delays_s=(0.1,), history_file=tmp_path / "chats.db")
        async with app.run_test(size=(100, 40), notifications=True) as pilot:
            await desk.see(pilot, "● ready")
            await pilot.press(*"one", "enter")
            await desk.see(pilot, "output 1")
            await pilot.press(*"draft")
            os.kill(app.session.snapshot.engines[0].pid, signal.SIGKILL)  # type: ignore[union-attr,arg-type]
            await desk.see(pilot, "The answer failed")
            assert app.screen.query_one(Prompt).text == "draft"
            # The next question loads the model again.
            await pilot.press("enter")
            await desk.see(pilot, "● decoding")
            await desk.see(pilot, "output 1")
            daemon.stop(signal.SIGKILL)
            await desk.see(pilot, "No daemon at")
            await desk.until(pilot, lambda: not app.screen.view.is_answering)  # type: ignore[attr-defined]
            (chat,) = app.session.history.chats()
            said = [(message.role, bool(message.content)) for message in app.session.history.branch(chat.id)]
            assert said == [("user", True), ("assistant", True)] * 2
            assert "Traceback" not in desk.seen(app)


async def test_the_log_goes_on_with_the_next_daemon(desk: Any) -> None:
    with running_daemon() as daemon:
        app = desk.app = LocalrunApp(daemon.url, retry_delays_s=(0.1,), first="logs")
        async with app.run_test(size=(100, 30), notifications=True) as pilot:
            for _ in range(4):  # so that the next daemon has logged less
                await asyncio.to_thread(daemon.post, "/api/generate", model="tiny", prompt="go on", keep_alive=0)
            await desk.until(pilot, lambda: desk.seen(app).count("unloading tiny") == 4)
            daemon.stop()
            await desk.see(pilot, "No daemon at")
            with running_daemon("--port", str(daemon.port)) as other:
                await desk.until(pilot, lambda: "No daemon at" not in desk.seen(app))
                await asyncio.to_thread(other.post, "/api/generate", model="tiny", prompt="go on", keep_alive=0)
                await desk.until(pilot, lambda: desk.seen(app).count("unloading tiny") == 5)


async def test_quitting_while_an_answer_streams_stores_what_came(desk: Any, tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    with running_daemon(LOCALRUN_FAKE_STEP_MS=_STEP_MS) as daemon:
        desk.app = LocalrunApp(daemon.url, history_file=path)
        async with desk.app.run_test(size=(100, 30)) as pilot:
            await pilot.press(*"one", "enter")
            await desk.see(pilot, "output 1")
            await pilot.press("ctrl+q")
        desk.app = LocalrunApp(daemon.url, history_file=path)
        async with desk.app.run_test(size=(100, 30)) as pilot:
            (chat,) = desk.app.session.history.chats()
            assert [message.role for message in desk.app.session.history.branch(chat.id)] == ["user", "assistant"]


async def test_history_branches_logs_and_models_with_tiny(desk: Any, tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    with running_daemon(fake=False) as daemon:
        app = desk.app = LocalrunApp(daemon.url, history_file=path)
        async with app.run_test(size=(120, 40), notifications=True) as pilot:
            await desk.see(pilot, "● ready")
            await pilot.press("enter")  # the marked question: the first answer is one key away
            await _answered(desk, pilot, 2)
            first = app.screen.view.conversation.last_answer()  # type: ignore[attr-defined]
            await pilot.press(*"And then?", "enter")
            await _answered(desk, pilot, 4)
            await _type(pilot, "/edit")
            await desk.until(pilot, lambda: app.screen.query_one(Prompt).text == "And then?")
            await pilot.press(*" Go on.", "enter")
            await _answered(desk, pilot, 4)
            # What was computed for the branch before serves this one.
            await desk.until(pilot, lambda: _cached(desk) > 0)
            await desk.see(pilot, "version 2 of 2")

            await pilot.press("f4")
            await desk.see(pilot, "loaded" if "loaded" in daemon.log else "info")
            await pilot.press("slash", *"zzzz", "enter")
            await desk.until(pilot, lambda: "info " not in desk.seen(app))
            await pilot.press("escape", "f3")
            await desk.see(pilot, "loaded,")
            await pilot.press("ctrl+g")
            await desk.see(pilot, "on this machine fits")
            await pilot.press("escape", "escape", "f1")
            await _type(pilot, "/model nobody-has-this")
            await desk.see(pilot, "nobody-has-this")
            assert app.session.model == "tiny"

        app = desk.app = LocalrunApp(daemon.url, history_file=path)
        async with app.run_test(size=(120, 40), notifications=True) as pilot:
            await pilot.press("ctrl+l", *"fox")
            await desk.see(pilot, "[fox]")
            await pilot.press("enter")
            await desk.see(pilot, "version 2 of 2")
            assert app.screen.view.conversation.messages[1].content == first  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [(100, 30), (160, 48)], ids=["100x30", "160x48"])
async def test_no_number_on_the_monitor_is_one_that_the_api_does_not_have(
    desk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path))
    with running_daemon(fake=False) as daemon:
        app = desk.app = LocalrunApp(daemon.url, first="monitor")
        async with app.run_test(size=size, notifications=True) as pilot:
            await desk.see(pilot, "No requests")
            asked = [asyncio.create_task(asyncio.to_thread(daemon.post, "/v1/completions", _BODY)) for _ in range(3)]
            await desk.until(pilot, lambda: len(_states(app)) == 3)
            await asyncio.gather(*asked)
            await desk.until(pilot, lambda: _states(app) == [RequestState.DONE] * 3)
            await pilot.press("p")
            await desk.see(pilot, "PAUSED")
            await pilot.pause()
            shown = app.screen.query_one(Vitals).snapshot
            assert shown is not None
            aggregate, text = shown.aggregate, desk.seen(app)
            for part in (
                f"TTFT   p50 {short_text.seconds(aggregate.ttft_s.p50)}",
                f"ITL    p50 {short_text.seconds(aggregate.itl_s.p50)}",
                f"prefix {short_text.percent(aggregate.prefix_hit_rate)}",
                "" if aggregate.draft_hit_rate is None else f"drafts {short_text.percent(aggregate.draft_hit_rate)}",
                f"CPU    {shown.system.cpu_percent:.0f}%",
            ):
                assert part in text, text
            address = daemon.url.removeprefix("http://")
            unknown = _numbers(_shown_text(app).replace(address, "")) - _known_numbers(shown)
            assert not unknown, f"{unknown} on the screen are in no field of the snapshot:\n{_shown_text(app)}"
            # And the snapshot is what the API says of finished requests, asked for anew.
            rows = {row["id"]: row for row in daemon.http.get("/localrun/v1/snapshot").json()["requests"]}
            assert [rows[row.id]["output_tokens"] for row in shown.requests] == [500] * 3
            for row in shown.requests:
                for field in ("prompt_tokens", "cached_tokens", "output_tokens", "ttft_s", "tokens_per_s_avg"):
                    assert rows[row.id][field] == getattr(row, field)


def _shown_text(app: LocalrunApp) -> str:
    """All texts of the monitor with numbers in them, but the axes of the graph and the digits that stand for slots."""
    screen = app.screen
    kv_map = screen.query_one(KvMap).render().plain.split("\n") if screen.query_one(KvMap).size.width else [""]
    parts = [screen.query_one(Vitals).render().plain, screen.query_one(RequestDetail).render().plain]
    parts += [kv_map[0], *(line for line in kv_map if line.startswith("RAM "))]
    parts += [digits.value for digits in screen.query(Digits)]
    for table in screen.query(LiveTable):
        parts += [str(table.get_row_at(index)[0]) for index in range(table.row_count)]
    # Names, and the ranks of percentiles.
    return re.sub(r"req_\w+|/v1/\w+|p50|p95|p99", "", "\n".join(parts))


def _numbers(text: str) -> set[str]:
    return set(_NUMBER.findall(text))


def _known_numbers(snapshot: Snapshot) -> set[str]:
    """Every number of a snapshot in every way in which the interface writes numbers; and those that it computes: the
    memory in use, the shares of cached tokens, computed prompts and accepted drafts, and everything that waits."""
    system, aggregate = snapshot.system, snapshot.aggregate
    values: list[float] = list(_values(msgspec.to_builtins(snapshot)))
    values += [system.memory_total_bytes - system.memory_available_bytes, aggregate.queued + aggregate.loading]
    values += [row.draft_hit_rate for row in snapshot.requests if row.draft_hit_rate is not None]
    for engine in snapshot.engines:
        values.append(engine.cached_tokens_total / max(1, engine.prompt_tokens_total))
        values.append(engine.ram_restored_tokens_total + engine.disk_restored_tokens_total)
    texts = []
    for value in values:
        texts += [f"{value}", f"{value:.0f}", f"{value / 1e9:.1f}", short_text.rate(value), short_text.seconds(value)]
        texts += [short_text.age(value), short_text.size(round(value)), short_text.percent(value)]
        texts += [short_text.count(round(value), widest=widest) for widest in (999, 9_999, 99_999)]
    return _numbers(" ".join(texts))


def _values(tree: Any) -> Iterator[float]:
    if isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _values(part)
    elif isinstance(tree, int | float):
        yield tree


def _states(app: LocalrunApp) -> list[RequestState]:
    return [row.state for row in app.session.snapshot.requests] if app.session.snapshot else []


async def _answered(desk: Any, pilot: Any, n_messages: int) -> None:
    """Waits until the marked chat has so many messages and nothing is being answered."""
    view = desk.app.screen.view
    await desk.until(pilot, lambda: len(view.conversation.messages) == n_messages and not view.is_answering)


def _cached(desk: Any) -> int:
    progress = desk.app.screen.view.progress
    return progress.metrics.cached_tokens if progress and progress.metrics else 0


async def _type(pilot: Any, command: str) -> None:
    pilot.app.screen.query_one(Prompt).put(command)
    await pilot.press("enter")
