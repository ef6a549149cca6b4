"""The monitor: rows, numbers, cancel, sort, pause."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from textual.widget import Widget
from textual.widgets import DataTable, Digits

from localrun.snapshot import BatchRow, DraftRow, GpuRow, KvRunRow
from localrun.tui.daemon import Recorder, snapshots
from localrun.tui.screens.details import RequestScreen
from localrun.tui.widgets.tables import RequestTable
from tests.tui.conftest import TINY

WIDE = (150, 36)
NARROW = (80, 24)


async def _open(desk: Any, pilot: Any) -> None:
    await pilot.press("f2")
    await desk.until(pilot, lambda: desk.app.screen.query(RequestTable))


def _table_lines(desk: Any) -> list[str]:
    """The rows of the request table, as they stand on the screen."""
    lines = [text for text in desk.seen(desk.app).split("\n") if "tok/s" not in text]
    return [text for text in lines if text.split()[:1] and text.split()[0] in _STATES]


_STATES = {"loading", "queued", "prefill", "decode", "done", "cancelled", "failed"}


async def test_every_column_of_a_request_in_a_wide_terminal(desk: Any) -> None:
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(
            desk.row(
                "a",
                slot=3,
                lane="batch",
                api="/v1/chat/completions",
                client="aider",
                prompt_tokens=2345,
                age_s=65.0,
                drafted_tokens=8,
                accepted_tokens=6,
            ),
            desk.row("b", "prefill", computed_tokens=256, output_tokens=0, ttft_s=None, tokens_per_s=None),
        )
        await desk.see(pilot, "aider")
        first, second = _table_lines(desk)
        assert first.split() == [
            "decode", "aider", "v1/chat/comp…", "tiny", "batch", "3", "2,345", "480", "40", "75%", "42.0", "39.5", "█",
            "310", "ms", "24", "ms", "1m", "05s",
        ]  # fmt: skip
        assert second.split()[:2] == ["prefill", "50%"]


async def test_own_requests_have_a_name_and_routes_are_whole_where_there_is_room(desk: Any) -> None:
    async with desk.open((200, 40)) as pilot:
        await _open(desk, pilot)
        api = "/v1/chat/completions"
        own = desk.row("own", client=desk.daemon.name, api=api)
        desk.daemon.publish(own, desk.row("b", client="tui-1", api=api))
        await desk.see(pilot, "this chat")
        assert sorted(line.split()[1:4] for line in _table_lines(desk)) == [
            ["this", "chat", api[1:]],
            ["tui-1", api[1:], "tiny"],
        ]
        desk.daemon.publish(own)
        await desk.until(pilot, lambda: len(_table_lines(desk)) == 1)
        await pilot.press("enter")
        await desk.see(pilot, "Esc closes")
        own.cached_tokens = 7
        desk.daemon.publish(own)
        await desk.until(pilot, lambda: desk.app.screen._row.cached_tokens == 7)
        assert desk.app.screen._row.client == "this chat"


@pytest.mark.parametrize("width", [50, 60, 70, 80, 100, 126, 150])
async def test_nodes_of_a_cluster_have_a_column_that_fits(desk: Any, width: int) -> None:
    """Beside a table without nodes there is none."""
    async with desk.open((width, 36)) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("a"))
        await desk.see(pilot, "decode")
        assert "node" not in desk.seen(desk.app)
        there = [replace(TINY, node=name, replica=name, slots_busy=busy, slots=8, tokens_per_s=10.0 * busy)
                 for name, busy in (("studio-1", 3), ("studio-2", 5))]  # fmt: skip
        desk.daemon.publish(desk.row("a", node="studio-2", age_s=4.0), engines=tuple(there), time_s=1001)
        await desk.until(pilot, lambda: desk.seen(desk.app).count("/8") == 2)
        lines = desk.seen(desk.app).split("\n")
        assert max(map(len, lines)) <= width
        (asked,) = _table_lines(desk)
        assert " studio" in asked
        engines = [line for line in lines if "/8" in line]
        for line, name, busy in zip(engines, ("studio-1", "studio-2"), ("3/8", "5/8"), strict=True):
            assert f" {name} " in line
            assert f" {busy} " in line
        assert ("50.0" in engines[1]) == (width >= 63), "tokens per second of a node"


async def test_the_map_is_of_the_node_that_a_request_is_on(desk: Any) -> None:
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        there = [replace(TINY, node=name, replica=name, kv_cells=8192, kv_cells_used=used)
                 for name, used in (("n1", 4000), ("n2", 16))]  # fmt: skip
        desk.daemon.publish(desk.row("a", node="n2"), engines=tuple(there))
        await desk.see(pilot, "KV cells of tiny: 16")


async def test_the_important_columns_fit_eighty(desk: Any) -> None:
    async with desk.open(NARROW) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(
            desk.row("a", client="openai-python/3.52", model="qwen3:0.6b-instruct"),
            desk.row("b", "prefill", computed_tokens=506),
        )
        await desk.see(pilot, "openai-p…")
        header = next(text for text in desk.seen(desk.app).split("\n") if text.strip().startswith("state"))
        assert header.split() == ["state", "client", "model", "prompt", "cached", "output", "tok/s", "TTFT", "age"]
        assert "prefill 99%" in desk.seen(desk.app)
        assert max(len(text) for text in desk.seen(desk.app).split("\n")) <= 80


async def test_models_that_are_given_by_paths_are_told_apart_by_their_files(desk: Any) -> None:
    files = [f"/home/somebody/{'folder/' * 12}{name}.gguf" for name in ("m1", "m2")]
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("a", model=files[0]), engines=tuple(replace(TINY, model=file) for file in files))
        await desk.see(pilot, " m2.gguf ")
        engines = [line.split()[0] for line in desk.seen(desk.app).split("\n") if "/8" in line]
        assert engines == ["m1.gguf", "m2.gguf"]
        assert [line for line in desk.seen(desk.app).split("\n") if " m1.gguf " in line and "/8" not in line]


async def test_aggregate_numbers(desk: Any) -> None:
    async with desk.open(NARROW) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("a"))
        for text in (
            "TTFT   p50 310 ms  p95 1.2 s",
            "ITL    p50 12 ms   p95 61 ms",
            "1,204 of 32.8k",
            "63% cached   queue 3",
            "18 ms of 100 ms target",
            "CPU    87%  RAM 5.4 of 17.2 GB",
            "-2 min",
            "now",
        ):
            await desk.see(pilot, text)
        engine = next(text for text in desk.seen(desk.app).split("\n") if "4321" in text)
        assert engine.split() == ["tiny", "4321", "ready", "2/8", "1.2k/32.8k", "18", "ms", "327", "MB", "4m", "52s"]


async def test_what_was_drafted(desk: Any) -> None:
    """Of each request, of the selected one in detail, and in all; nothing where nothing was."""
    ended = {"drafted_tokens": 1000, "accepted_tokens": 999, "speedup": 2.14}
    drafts = [DraftRow(source="lookup", drafts=90, drafted_tokens=1000, accepted_tokens=999, seconds=0.1)]
    async with desk.open((100, 36)) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("a"))
        await desk.see(pilot, "63% cached   queue 3")
        assert "%" not in _table_lines(desk)[0]
        desk.daemon.publish(desk.row("a"), desk.row("b", "done", age_s=1.0, drafts=drafts, **ended))
        await desk.see(pilot, "63%  drafts 99%  queue 3")
        plain, drafted = _table_lines(desk)
        assert ("%" in plain, "99%" in drafted) == (False, True)
        await pilot.press("down")
        await desk.see(pilot, "drafts 99%, 2.1x")
        await pilot.press("enter")
        await desk.see(pilot, "999 of 1,000 tokens kept: lookup 999/1,000")
        await desk.see(pilot, "2.1x with drafts")


async def test_rows_change_in_place_and_leave(desk: Any) -> None:
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("a", "queued", output_tokens=0), desk.row("b"))
        await desk.see(pilot, "queued")
        desk.daemon.publish(desk.row("a", "decode", output_tokens=77), desk.row("b", "done"), desk.row("c", "loading"))
        await desk.until(pilot, lambda: len(_table_lines(desk)) == 3)
        assert [text.split()[0] for text in _table_lines(desk)] == ["decode", "loading", "done"]
        desk.daemon.publish(desk.row("c"))
        await desk.until(pilot, lambda: len(_table_lines(desk)) == 1)
        desk.daemon.publish()
        await desk.see(pilot, "No requests")


async def test_x_cancels_the_selected_request_even_after_it_has_moved(desk: Any) -> None:
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("a", age_s=9.0), desk.row("b", age_s=5.0), desk.row("c", age_s=1.0))
        await desk.until(pilot, lambda: len(_table_lines(desk)) == 3)
        await pilot.press("down")
        desk.daemon.publish(desk.row("a", "done"), desk.row("b", age_s=6.0), desk.row("c", age_s=2.0))
        await desk.until(pilot, lambda: "done" in desk.seen(desk.app))
        await desk.see(pilot, " b · /api/chat default")
        await pilot.press("x")
        await desk.until(pilot, lambda: desk.daemon.cancelled == ["b"])
        await desk.see(pilot, "Cancelled")


async def test_cancelling_nothing_and_without_a_daemon(desk: Any) -> None:
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        await pilot.press("x")
        await desk.see(pilot, "no request to cancel")
        desk.daemon.publish(desk.row("a"))
        await desk.see(pilot, "decode ")
        desk.daemon.is_up = False
        await pilot.press("x")
        await desk.see(pilot, "no daemon answers")


async def test_s_sorts_and_ended_requests_stay_last(desk: Any) -> None:
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(
            desk.row("a", client="first", tokens_per_s=10.0, age_s=9.0),
            desk.row("b", client="second", tokens_per_s=90.0, age_s=5.0),
            desk.row("c", "done", client="third", tokens_per_s=500.0, age_s=20.0),
        )
        await desk.until(pilot, lambda: len(_table_lines(desk)) == 3)
        await desk.see(pilot, "by arrival")
        assert [text.split()[1] for text in _table_lines(desk)] == ["first", "second", "third"]
        await pilot.press("s")
        await desk.see(pilot, "by tok/s")
        assert [text.split()[1] for text in _table_lines(desk)] == ["second", "first", "third"]


async def test_p_freezes_and_resumes_with_the_newest(desk: Any) -> None:
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("a", client="before"))
        await desk.see(pilot, "before")
        await pilot.press("p")
        await desk.see(pilot, "PAUSED")
        desk.daemon.publish(desk.row("b", client="after"))
        await desk.until(pilot, lambda: desk.app.session.snapshot.requests[0].id == "b")
        assert "before" in desk.seen(desk.app)
        await pilot.press("p")
        await desk.see(pilot, "after")


async def test_that_it_is_paused_is_seen_in_a_narrow_window(desk: Any) -> None:
    async with desk.open((36, 15)) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("a"))
        await pilot.press("p")
        await desk.see(pilot, "PAUSED")


async def test_a_failed_request_says_why(desk: Any) -> None:
    async with desk.open(NARROW) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("req_1", "failed", error="the engine\x1b[2J ended"))
        await desk.see(pilot, "req_1 · the engine␛[2J ended")
        await pilot.resize_terminal(40, 20)
        await desk.see(pilot, "\n the engine␛[2J ended")


async def test_columns_follow_the_width_of_the_terminal(desk: Any) -> None:
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(*(desk.row(f"r{number}", age_s=9.0 - number) for number in range(3)))
        await desk.until(pilot, lambda: len(_table_lines(desk)) == 3)
        await pilot.press("down", "down")
        await pilot.resize_terminal(*NARROW)
        await desk.until(pilot, lambda: " lane" not in desk.seen(desk.app))
        assert len(_table_lines(desk)) == 3
        assert desk.app.screen.query_one(RequestTable).selected_key == "r2"


async def test_a_lost_daemon_is_said_here_too_and_the_numbers_come_back(desk: Any) -> None:
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("a"))
        await desk.see(pilot, "decode ")
        desk.daemon.go_away()
        await desk.see(pilot, "No daemon at 127.0.0.1:1")
        desk.daemon.is_up = True
        desk.daemon.publish(desk.row("b", client="newcomer"), time_s=2.0)
        await desk.see(pilot, "newcomer")
        assert "No daemon" not in desk.seen(desk.app)


async def test_updates_do_not_rebuild_the_table(desk: Any, monkeypatch: Any) -> None:
    added: list[object] = []
    add_row = DataTable.add_row

    def counted(self: Any, *cells: Any, **options: Any) -> Any:
        added.append(options["key"])
        return add_row(self, *cells, **options)

    monkeypatch.setattr(DataTable, "add_row", counted)
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        for tick in range(5):
            desk.daemon.publish(*(desk.row(f"r{n}", output_tokens=100 * n + tick) for n in range(32)))
        await desk.see(pilot, "     204 ")
        keys = [key for key in added if str(key).startswith("r")]
        assert sorted(keys) == sorted(f"r{n}" for n in range(32))


def _runs(*runs: tuple[int, int, str | None, bool]) -> list[KvRunRow]:
    return [KvRunRow(*run) for run in runs]


async def test_the_kv_map_shows_slots_shared_and_kept_cells(desk: Any) -> None:
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        runs = _runs((0, 600, "a", True), (600, 600, "b", False), (1200, 600, None, False))
        engine = replace(TINY, kv_cells=6000, kv_runs=runs)
        desk.daemon.publish(desk.row("a", slot=0), desk.row("b", slot=1), engines=(engine,))
        await desk.see(pilot, "KV cells of tiny")
        text = desk.seen(desk.app)
        lines = text.split("\n")
        left = next(line.index("KV cells of") for line in lines if "KV cells of" in line)
        top = next(at for at, line in enumerate(lines) if "KV cells of" in line)
        marks = "".join(line[left:] for line in lines[top + 1 : top + 10])
        assert 10 < marks.count("░") <= marks.count("1") <= marks.count("0") <= marks.count("░") + 1
        assert marks.count("·") > 5 * marks.count("0")


async def test_in_eighty_columns_map_and_graph_take_turns(desk: Any) -> None:
    async with desk.open(NARROW) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("a"))
        await desk.see(pilot, "-2 min")
        assert "KV cells of" not in desk.seen(desk.app)
        await pilot.press("v")
        await desk.see(pilot, "KV cells of tiny")
        assert "-2 min" not in desk.seen(desk.app)


async def test_a_filter_leaves_what_matches_and_escape_removes_it(desk: Any) -> None:
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        zed = [desk.row("b", client="zed"), desk.row("c", "queued", client="zed")]
        desk.daemon.publish(desk.row("a", client="aider"), *zed)
        await desk.see(pilot, "aider")
        await pilot.press("slash", *"zed dec", "enter")
        await desk.until(pilot, lambda: "aider" not in desk.seen(desk.app))
        assert [text.split()[:2] for text in _table_lines(desk)] == [["decode", "zed"]]
        await pilot.press("slash", *"nothing")
        await desk.see(pilot, "No request of 3")
        await pilot.press("escape")
        await desk.see(pilot, "aider")


async def test_enter_opens_all_about_a_request_and_follows_it(desk: Any) -> None:
    async with desk.open(NARROW) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("a", client="aider", output_tokens=40))
        await desk.see(pilot, "aider")
        await pilot.press("enter")
        await desk.see(pilot, "between tokens")
        desk.daemon.publish(desk.row("a", client="aider", output_tokens=41), time_s=1001.0)
        await desk.see(pilot, "41 tokens")
        await pilot.press("x")
        await desk.until(pilot, lambda: desk.daemon.cancelled == ["a"])
        await desk.see(pilot, "Cancelled")
        desk.daemon.is_up = False
        await pilot.press("x")
        await desk.see(pilot, "no daemon answers")
        await pilot.press("escape")
        await desk.until(pilot, lambda: not isinstance(desk.app.screen, RequestScreen))


async def test_a_recording_may_call_a_request_by_what_looks_like_markup(desk: Any) -> None:
    async with desk.open(NARROW) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("[/]", client="aider"))
        await desk.see(pilot, "aider")
        await pilot.press("enter")
        await desk.see(pilot, "between tokens")
        assert "[/]" in desk.seen(desk.app)


async def test_a_recording_can_be_watched_again(desk: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path))
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("a", client="aider"))
        await desk.see(pilot, "aider")
        await pilot.press("r")
        await desk.see(pilot, "● REC")
        desk.daemon.publish(desk.row("a", client="aider"), time_s=1000.5)
        desk.daemon.publish(desk.row("b", client="zed"), time_s=1001.0)
        await desk.see(pilot, "zed")
        await pilot.press("r")
        await desk.until(pilot, lambda: "REC" not in desk.seen(desk.app))
    (file,) = (tmp_path / "state" / "recordings").iterdir()
    assert [snapshot.requests[0].client for snapshot in snapshots(file)] == ["aider", "zed"]


async def test_a_full_disk_ends_the_recording_only(desk: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path))

    def refuse(recorder: Recorder, snapshot: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Recorder, "write", refuse)
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("a", client="aider"))
        await desk.see(pilot, "aider")
        await pilot.press("r")
        desk.daemon.publish(desk.row("a", client="zed"), time_s=1001.0)
        await desk.see(pilot, "No space left on device")
        await desk.see(pilot, "zed")
        assert "REC" not in desk.seen(desk.app)


async def test_keys_reach_a_table_that_was_empty_at_first(desk: Any) -> None:
    async with desk.open(NARROW) as pilot:
        await _open(desk, pilot)
        await desk.see(pilot, "Waiting")
        desk.daemon.publish()
        await desk.see(pilot, "No requests")
        desk.daemon.publish(desk.row("a", client="aider"), time_s=1001.0)
        await desk.see(pilot, "aider")
        await pilot.press("enter")
        await desk.see(pilot, "between tokens")


async def test_gpus_are_shown_where_there_are_any(desk: Any) -> None:
    card = GpuRow(name="Card", busy_percent=40, memory_used_bytes=6 * 10**9, memory_total_bytes=24 * 10**9)
    gpus = [card, replace(card, busy_percent=45)]
    async with desk.open(NARROW) as pilot:
        await _open(desk, pilot)
        snapshot = desk.snapshot_of(desk.row("a"))
        snapshot.system.gpus = gpus
        desk.daemon.publish_snapshot(snapshot)
        await desk.see(pilot, "45%  VRAM 12.0 of 48.0 GB")


async def test_a_prompt_is_not_all_computed_before_the_first_token(desk: Any) -> None:
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        desk.daemon.publish(desk.row("a", "prefill", output_tokens=0, ttft_s=None, tokens_per_s=None))
        await desk.see(pilot, "prefill 99%")


async def test_what_did_not_change_is_not_drawn_again(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def counted(kind: type[Any]) -> Any:
        render = kind._render_content
        return lambda self: (drawn.append(type(self).__name__), render(self))[1]

    for kind in (Widget, Digits):
        monkeypatch.setattr(kind, "_render_content", counted(kind))
    async with desk.open(WIDE) as pilot:
        await _open(desk, pilot)
        idle = desk.snapshot_of()
        idle.aggregate.prefill_tokens_per_s = 0.0
        for n in range(50):
            desk.daemon.publish_snapshot(replace(idle, time_s=1000.0 + n / 4))
            if n == 5:
                await desk.see(pilot, "queue 3")
                await pilot.pause()
                drawn.clear()
        desk.daemon.publish_snapshot(replace(idle, time_s=1020.0, aggregate=replace(idle.aggregate, queued=4)))
        await desk.see(pilot, "queue 4")
        assert drawn.count("Vitals") == 1, drawn
        assert drawn.count("RateGraph") <= 3, drawn
        assert not {"KvMap", "Digits", "Static"} & set(drawn), drawn


def batch(**changes: Any) -> BatchRow:
    values: dict[str, Any] = {
        "id": "batch_12ab", "api": "/v1/chat/completions", "model": "tiny", "state": "in_progress", "lines": 1200,
        "succeeded": 590, "errored": 10, "running": 7, "lines_per_s": 2.5, "expires_in_s": 3600.0,
    }  # fmt: skip
    return BatchRow(**values | changes)


@pytest.mark.parametrize("size", [NARROW, (120, 40)], ids=["narrow", "wide"])
async def test_batches_show_how_far_they_are(desk: Any, size: tuple[int, int]) -> None:
    async with desk.open(size) as pilot:
        await _open(desk, pilot)
        plain = desk.snapshot_of(desk.row("a"))
        desk.daemon.publish_snapshot(plain)
        await desk.see(pilot, "zed")
        assert "line/s" not in desk.seen(desk.app)
        held = batch(id="msgbatch_34cd", lines_per_s=None, errored=0, waits_for="the disk is full; make room")
        desk.daemon.publish_snapshot(replace(plain, batches=[batch(), held]))
        await desk.see(pilot, "batch_12ab")
        lines = desk.seen(desk.app).split("\n")
        first = next(line for line in lines if "batch_12ab" in line)
        assert first.replace("tiny", "").split() == [
            "batch_12ab", "in", "progress", "████░░░░", "600/1.2k", "10", "2.5", "4m", "00s",
        ]  # fmt: skip
        desk.daemon.publish_snapshot(replace(plain, batches=[batch(lines=50_000, succeeded=12_345), held]))
        await desk.see(pilot, " 12.4k/50.0k ")
        second = next(line for line in lines if "msgbatch_34cd" in line)
        assert "waiting" in second
        assert ("the disk is" in second) is (size != NARROW)
        assert max(map(len, lines)) <= size[0]
        desk.daemon.publish_snapshot(plain)
        await desk.until(pilot, lambda: "batch_12ab" not in desk.seen(desk.app))
