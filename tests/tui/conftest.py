"""A daemon made of queues, and ways to look at a screen as a person would.

The test plays the daemon: it says the pieces of an answer and publishes snapshots, when and as it likes. No clock is
involved; a test waits for what it expects to see.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from textual.app import App
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.events import Key
from textual.keys import _character_to_key
from textual.pilot import Pilot

from localrun.client import ChatMetrics, ChatPiece, PullPiece
from localrun.errors import Cancelled, DaemonUnreachable, LocalrunError, ModelNotFound
from localrun.server.openapi.operations import document
from localrun.snapshot import (
    Aggregate,
    EngineRow,
    LogLine,
    Percentiles,
    PullRow,
    RequestRow,
    RequestState,
    Snapshot,
    SystemRow,
    UsageReport,
    UsageRow,
)
from localrun.tui.app import LocalrunApp

PATIENCE_S = 60.0
# What the clock says: 2023-11-14 22:13:20 UTC.
NOW_S = 1_700_000_000.0
REQUEST_ID = "req_0123456789ab"

TINY = EngineRow(
    model="tiny", pid=4321, state="ready", n_ctx=4096, slots=8, slots_busy=2, kv_cells=32768, kv_cells_used=1204,
    step_s=0.0185, target_itl_s=0.1, rss_bytes=312 * 1024**2, backend="CPU", expires_in_s=292.0,
)  # fmt: skip


class FakeDaemon:
    """`questions` are the chats that arrived, `closed` counts the streams that were closed before their end."""

    def __init__(self) -> None:
        self.name = ""
        self.questions: list[tuple[str, list[dict[str, Any]]]] = []
        self.settings: list[tuple[dict[str, Any] | None, bool | str | None]] = []
        self.closed = 0
        self.cancelled: list[str] = []
        self.connections = 0
        self.is_up = True
        self.refusal: LocalrunError = DaemonUnreachable("no daemon answers; `localrun serve` starts one")
        self.rows: list[dict[str, Any]] = [
            {"name": "tiny:latest", "size": 5_400_000, "details": {"parameter_size": "2.4M"}},
            {"name": "qwen3:0.6b", "size": 640_000_000, "details": {"quantization_level": "Q8_0"}},
        ]
        self.capabilities = ["completion", "tools"]
        self.templates: dict[str, str | LocalrunError] = {}
        self.n_shown = 0
        self._pieces: asyncio.Queue[ChatPiece | Exception] = asyncio.Queue()
        self.log_starts: list[int] = []
        self.searches: list[str] = []
        self.pulled: list[str] = []
        self.pull_rows: list[PullRow] = []
        self.loads: list[str] = []
        self.usages: list[tuple[str, int]] = []
        self.used: list[UsageRow] = []
        self._pull_pieces: asyncio.Queue[PullPiece | Exception] = asyncio.Queue()
        self._log_lines: asyncio.Queue[LogLine | None] = asyncio.Queue()
        self._snapshots: asyncio.Queue[Snapshot | None] = asyncio.Queue()

    def connect(self, base_url: str, name: str) -> FakeDaemon:
        self.name = name
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None

    async def options(self) -> dict[str, Any]:
        self._check_up()
        options: dict[str, Any] = document()["components"]["schemas"]["Options"]["properties"]
        return options

    async def chat(
        self,
        model: str,
        messages: list[dict[str, Any]],
        *,
        options: dict[str, Any] | None = None,
        think: bool | str | None = None,
        lane: str = "default",
        tools: list[dict[str, Any]] | None = None,
    ) -> AsyncGenerator[ChatPiece, None]:
        self._check_up()
        self.questions.append((model, messages))
        self.settings.append((options, think))
        ended = False
        try:
            while not ended:
                piece = await self._pieces.get()
                if isinstance(piece, Exception):
                    ended = True
                    raise piece
                ended = piece.done
                yield piece
        finally:
            self.closed += not ended

    async def events(self, hz: int = 4) -> AsyncGenerator[Snapshot, None]:
        self.connections += 1
        self._check_up()
        while (snapshot := await self._snapshots.get()) is not None:
            yield snapshot
        raise DaemonUnreachable("the daemon went away")

    async def logs(self, since: int = 0) -> AsyncGenerator[LogLine, None]:
        self._check_up()
        self.log_starts.append(since)
        while (line := await self._log_lines.get()) is not None:
            if line.number <= since:  # as the daemon: its numbers only grow
                continue
            if line.number > since:
                yield line
        raise DaemonUnreachable("the daemon went away")

    async def cancel(self, request_id: str) -> bool:
        self._check_up()
        self.cancelled.append(request_id)
        return True

    async def models(self) -> list[dict[str, Any]]:
        self._check_up()
        return self.rows

    async def catalog(self) -> list[dict[str, Any]]:
        self._check_up()
        return [
            {
                "name": "qwen3:4b",
                "repo": "Qwen/Qwen3-4B-GGUF",
                "quants": {"Q4_K_M": 2.5},
                "memory_gb": 6,
                "use": "chat",
            },
            {"name": "big:70b", "repo": "org/big", "quants": {"Q4_K_M": 40.0}, "memory_gb": 64, "use": "chat"},
        ]

    async def search(self, query: str) -> dict[str, Any]:
        self._check_up()
        self.searches.append(query)
        return {"catalog": [], "hub": [{"repo": f"someone/{query}-GGUF", "n_downloads": 1234, "is_gated": False}]}

    async def pull(self, model: str) -> AsyncGenerator[PullPiece, None]:
        self._check_up()
        self.pulled.append(model)
        while not isinstance(piece := await self._pull_pieces.get(), Exception):
            yield piece
            if piece.status == "success":
                return
        raise piece

    async def pulls(self) -> list[PullRow]:
        self._check_up()
        return self.pull_rows

    async def cancel_pull(self, model: str) -> None:
        self._pull_pieces.put_nowait(Cancelled("the pull was cancelled"))

    async def usage(self, by: str, days: int) -> UsageReport:
        self._check_up()
        self.usages.append((by, days))
        return UsageReport(by=by, since="2026-10-25", rows=self.used)

    async def show(self, model: str) -> dict[str, Any]:
        self._check_up()
        if model not in {row["name"].removesuffix(":latest") for row in self.rows}:
            raise ModelNotFound(f"there is no model {model!r} here")
        self.n_shown += 1
        template = self.templates.get(model, "{{ messages }}")
        if isinstance(template, LocalrunError):
            raise template
        return {
            "template": template,
            "details": {"parameter_size": "2.4M", "quantization_level": "Q8_0"},
            "model_info": {"general.architecture": "llama", "llama.context_length": 4096},
            "capabilities": self.capabilities,
            "license": "MIT",
        }

    async def fit(self, model: str) -> dict[str, Any]:
        device = {"name": "RAM", "weights_bytes": 5 << 20, "kv_bytes": 8 << 20, "compute_bytes": 1 << 20}
        device |= {"other_bytes": 0, "total_bytes": 14 << 20, "usable_bytes": 8 << 30}
        return {
            "fits": True, "context": 4096, "slots": 8, "kv_cells": 32768, "kv_type": "f16", "devices": [device],
            "notes": ["all of it fits"], "problem": None,
        }  # fmt: skip

    async def load(self, model: str) -> None:
        self.loads.append(model)

    async def unload(self, model: str) -> None:
        self.loads.append(f"not {model}")

    async def remove(self, model: str) -> dict[str, Any]:
        self.rows = [row for row in self.rows if row["name"] != model]
        return {"freed_bytes": 640_000_000}

    def _check_up(self) -> None:
        if not self.is_up:
            raise self.refusal

    # What a test makes it do.

    def say(self, text: str = "", *, thinking: str = "", tool_calls: list[dict[str, Any]] | None = None) -> None:
        piece = ChatPiece(text=text, thinking=thinking, tool_calls=tool_calls or [], request_id=REQUEST_ID)
        self._pieces.put_nowait(piece)

    def end_answer(self, *, reason: str = "stop", n_output: int = 87, speedup: float = 1.0) -> None:
        metrics = ChatMetrics(
            prompt_tokens=512, cached_tokens=480, output_tokens=n_output, load_s=0, prefill_s=0.2,
            decode_s=n_output / 100, total_s=1.2, speedup=speedup,
        )  # fmt: skip
        self._pieces.put_nowait(ChatPiece(done=True, done_reason=reason, metrics=metrics, request_id=REQUEST_ID))

    def fail_answer(self, error: Exception) -> None:
        self._pieces.put_nowait(error)

    def publish(self, *requests: RequestRow, time_s: float = 1000.0, engines: tuple[EngineRow, ...] = (TINY,)) -> None:
        self.publish_snapshot(snapshot_of(*requests, time_s=time_s, engines=engines))

    def publish_snapshot(self, snapshot: Snapshot) -> None:
        self._snapshots.put_nowait(snapshot)

    def log(self, number: int, text: str, level: str = "info", source: str = "tiny") -> None:
        self._log_lines.put_nowait(LogLine(number, 1_700_000_000.0, level, source, text))

    def end_log(self) -> None:
        self._log_lines.put_nowait(None)

    def end_pull(self, error: Exception | None = None) -> None:
        self._pull_pieces.put_nowait(error or PullPiece(status="success"))

    def go_away(self) -> None:
        self.is_up = False
        self._snapshots.put_nowait(None)


def snapshot_of(*requests: RequestRow, time_s: float = 1000.0, engines: tuple[EngineRow, ...] = (TINY,)) -> Snapshot:
    n_drafted = sum(row.drafted_tokens for row in requests)
    return Snapshot(
        time_s=time_s,
        uptime_s=60.0,
        version="0.1.0",
        aggregate=Aggregate(
            decode_tokens_per_s=sum(row.tokens_per_s or 0 for row in requests),
            prefill_tokens_per_s=600.0,
            running=len(requests),
            queued=3,
            prefix_hit_rate=0.63,
            draft_hit_rate=sum(row.accepted_tokens for row in requests) / n_drafted if n_drafted else None,
            ttft_s=Percentiles(0.31, 1.24, 2.2, 44),
            itl_s=Percentiles(0.0125, 0.061, 0.09, 4000),
        ),
        engines=list(engines),
        requests=list(requests),
        system=SystemRow(cpu_percent=87, memory_total_bytes=16 * 1024**3, memory_available_bytes=11 * 1024**3, cores=2),
    )


def row(request_id: str, state: str = "decode", **changes: Any) -> RequestRow:
    """A request in the middle of its answer, unless `changes` say otherwise."""
    values: dict[str, Any] = {
        "client": "zed", "api": "/api/chat", "model": "tiny", "lane": "default", "slot": 0, "prompt_tokens": 512,
        "computed_tokens": 512, "cached_tokens": 480, "output_tokens": 40, "tokens_per_s": 42.0,
        "tokens_per_s_avg": 39.5, "ttft_s": 0.31, "itl_p50_s": 0.0245, "age_s": 3.0,
    }  # fmt: skip
    return RequestRow(id=request_id, state=RequestState(state), **values | changes)


def seen(app: App[Any]) -> str:
    """What stands on the screen, line by line."""
    return "\n".join(strip.text.replace("\xa0", " ").rstrip() for strip in app.screen._compositor.render_strips())


async def until(pilot: Pilot[Any], condition: Callable[[], object]) -> None:
    """Waits for what should come, and then for what came with it; fails when it does not. Looks less often for what
    takes long: drawing a screen and settling it cost more than what is waited for."""
    delay_s = 0.01
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(delay_s)
            delay_s = min(0.1, delay_s * 1.1)
            if condition():
                await pilot.pause(0)


class Desk:
    """What tests get: a fake daemon, and an app that talks to it."""

    row = staticmethod(row)
    seen = staticmethod(seen)
    until = staticmethod(until)
    snapshot_of = staticmethod(snapshot_of)
    engine = TINY
    request_id = REQUEST_ID

    def __init__(self, history_file: Path | None = None, url: str = "http://127.0.0.1:1") -> None:
        self.daemon = FakeDaemon()
        self.n_starts = 0
        self.refusal: LocalrunError | None = None
        self.retry_delays_s = [0.02]
        start_daemon = None if url.startswith("https") else self._start_daemon
        self.app = LocalrunApp(
            url, connect=self.daemon.connect, retry_delays_s=self.retry_delays_s,
            history_file=history_file, start_daemon=start_daemon, clock=lambda: NOW_S,
        )  # fmt: skip

    def _start_daemon(self) -> None:
        """What Ctrl-R does where no daemon answers; `refusal` is why it cannot."""
        self.n_starts += 1
        if self.refusal is not None:
            raise self.refusal
        self.daemon.is_up = True

    def open(self, size: tuple[int, int]) -> Any:
        """Runs the app in a terminal of this size, as an async context that gives the pilot."""
        return self.app.run_test(size=size, notifications=True)

    async def see(self, pilot: Pilot[Any], text: str) -> None:
        """Waits until `text` stands on the screen."""
        try:
            await until(pilot, lambda: text in seen(self.app))
        except TimeoutError:
            pytest.fail(f"{text!r} did not appear on:\n{seen(self.app)}")


@pytest.fixture(scope="session", autouse=True)
def parsed_once() -> Iterator[None]:
    """The rules of style sheets are the same for every app of a run; parsing them is most of what opening one takes."""
    parse, known = Stylesheet._parse_rules, dict[tuple[object, ...], list[RuleSet]]()

    def parse_once(self: Stylesheet, *source: Any, **more: Any) -> list[RuleSet]:
        key = (source, tuple(more.items()), tuple(self._variables.items()))
        if key not in known:
            known[key] = parse(self, *source, **more)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", parse_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def typed_at_once() -> Iterator[None]:
    """A word arrives as from quick hands: its letters are drawn together, as a terminal's driver gives them."""
    press_keys = App._press_keys

    async def press(self: App[Any], keys: Iterable[str]) -> None:
        for _, run in itertools.groupby(keys, key=len):
            *before, last = run
            if len(last) > 1:
                await press_keys(self, [*before, last])
                continue
            for letter in before:
                event = Key(letter if letter.isalnum() else _character_to_key(letter), letter)
                event.set_sender(self)
                self._driver.send_message(event)
            await press_keys(self, [last])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(App, "_press_keys", press)
        yield


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    # The theme and the pictures follow the terminal's colours, which must not be those of whoever runs the tests.
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield Desk()
    monkeypatch.undo()
    time.tzset()
