"""The model picker."""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any

import pytest
from msgspec.structs import replace

from localrun.errors import DiskFull
from localrun.snapshot import PullRow
from localrun.tui.widgets.prompt import Prompt

SIZE = (100, 30)
FILE = os.path.abspath("my.gguf")


async def test_choosing_a_model_switches_the_chat_and_keeps_the_other_conversation(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        desk.daemon.publish()
        await pilot.press(*"one", "enter")
        desk.daemon.say("said by tiny")
        desk.daemon.end_answer()
        await desk.see(pilot, "● done")
        await pilot.press(*"draft", "ctrl+o")
        await desk.see(pilot, "› tiny")
        await desk.see(pilot, "loaded")
        await pilot.press(*"qwen", "enter")
        await desk.see(pilot, "This is qwen3:0.6b.")
        assert "said by tiny" not in desk.seen(desk.app)
        assert desk.app.screen.query_one(Prompt).text == "draft"
        await pilot.press("enter")
        await desk.until(pilot, lambda: len(desk.daemon.questions) == 2)
        assert desk.daemon.questions[1] == ("qwen3:0.6b", [{"role": "user", "content": "draft"}])
        await pilot.press("f3")
        await desk.see(pilot, "Enter chooses")
        await pilot.press(*"tiny", "enter")
        await desk.see(pilot, "said by tiny")


@pytest.mark.parametrize("width", [40, 60])
async def test_a_narrow_window_has_the_sizes_of_all_models(desk: Any, width: int) -> None:
    async with desk.open((width, 24)) as pilot:
        desk.daemon.publish()
        await pilot.press("f3")
        await desk.see(pilot, "big:70b")
        for name, size in (
            ("tiny", "5.4 MB"),
            ("qwen3:0.6b", "640 MB"),
            ("qwen3:4b", "2.5 GB"),
            ("big:70b", "40.0 GB"),
        ):
            assert re.search(rf"│   {re.escape(name)} +{size} |│ › {name} +{size} ", desk.seen(desk.app)), name
        assert "…" not in desk.seen(desk.app)


async def test_each_model_has_one_line_in_80_columns(desk: Any) -> None:
    async with desk.open((80, 24)) as pilot:
        desk.daemon.rows[0]["details"]["quantization_level"] = "Q4_K_M"
        desk.daemon.publish(engines=(replace(desk.engine, expires_in_s=299.0),))
        await desk.see(pilot, "● ready")
        await pilot.press("f3")
        await desk.see(pilot, "big:70b")
        lines = [line.strip(" │▁▂▃▄▅▆▇█") for line in desk.seen(desk.app).splitlines()]
        assert [line.split()[-1] for line in lines if line.startswith(("› tiny", "qwen3:0.6b", "big"))] == [
            "4m", "Q8_0", "GB",
        ]  # fmt: skip
        at = next(number for number, line in enumerate(lines) if line.startswith("› tiny"))
        assert lines[at].endswith("loaded, 4m")
        assert lines[at + 1].startswith("qwen3:0.6b")


async def test_a_model_that_was_planned_with_says_how_many_chats_there_can_be(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        desk.daemon.rows[0]["forecast"] = {"chats": 11, "tokens_per_s": 9.62, "made_at": "2026-11-24T02:34:00+00:00"}
        desk.daemon.rows[1]["forecast"] = {"chats": 1, "tokens_per_s": 123.4, "made_at": "2026-11-24T02:34:00+00:00"}
        await pilot.press("f3")
        await desk.see(pilot, "about 11 chats at once at 9.6 tok/s each")
        await pilot.press("down")
        await desk.see(pilot, "about one chat at once at 123 tok/s")
        await pilot.press("down")
        await desk.until(pilot, lambda: "at once" not in desk.seen(desk.app))


async def test_arrows_choose_and_escape_does_not(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:0.6b")
        await pilot.press("escape")
        await desk.until(pilot, lambda: "Enter chooses" not in desk.seen(desk.app))
        assert desk.app.session.model == "tiny"
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:0.6b")
        await pilot.press("down", "enter")
        await desk.until(pilot, lambda: desk.app.session.model == "qwen3:0.6b")


async def test_a_path_is_offered_as_an_absolute_path_and_has_to_be_a_model(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:0.6b")
        await pilot.press(*"./my.gguf")
        await desk.see(pilot, "file /")
        await pilot.press("enter")
        await desk.see(pilot, "there is no model '/")
        assert desk.app.session.model != FILE
        desk.daemon.rows.append({"name": FILE})
        await pilot.press("enter")
        await desk.until(pilot, lambda: desk.app.session.model == FILE)


async def test_nothing_found_and_no_daemon(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:0.6b")
        await pilot.press(*"zzz")
        await desk.see(pilot, "No model")
        await pilot.press("enter", "escape")
        desk.daemon.is_up = False
        await pilot.press("f3")
        await desk.see(pilot, "no daemon answers")


async def test_an_answer_goes_on_while_another_model_is_looked_at(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"one", "enter")
        desk.daemon.say("first half, ")
        await desk.see(pilot, "first half,")
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:0.6b")
        await pilot.press("down", "enter")
        await desk.see(pilot, "This is qwen3:0.6b.")
        desk.daemon.say("second half")
        desk.daemon.end_answer()
        await pilot.press("f3")
        await desk.see(pilot, "Enter chooses")
        await pilot.press(*"tiny", "enter")
        await desk.see(pilot, "first half, second half")
        await desk.see(pilot, "● done")


async def test_a_model_of_the_catalogue_is_pulled_by_enter_and_goes_on_when_this_closes(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        desk.daemon.publish()
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:4b")
        text = desk.seen(desk.app)
        assert next(line for line in text.split("\n") if "qwen3:4b" in line).count("fits") == 1
        assert "wants 64 GB" in text
        await pilot.press(*"4b", "enter")
        await desk.until(pilot, lambda: desk.daemon.pulled == ["qwen3:4b"])
        row = PullRow(
            model="qwen3:4b", state="pulling", status="pulling", total_bytes=2_000_000_000,
            completed_bytes=500_000_000, bytes_per_s=10_000_000, eta_s=150.0,
        )  # fmt: skip
        desk.daemon.pull_rows = [row]
        await desk.see(pilot, "qwen3:4b  25% · 500 MB of 2.0 GB · 10.0 MB/s · 2m 30s left")
        await pilot.press("escape")
        desk.daemon.rows.append({"name": "qwen3:4b", "size": 2_000_000_000, "details": {}})
        desk.daemon.end_pull()
        await desk.see(pilot, "qwen3:4b is here")


async def test_a_pull_can_be_cancelled_and_a_failure_is_said(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        desk.daemon.publish()
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:4b")
        await pilot.press(*"4b", "enter")
        desk.daemon.pull_rows = [PullRow(model="qwen3:4b", state="planning", status="looking")]
        await desk.see(pilot, "qwen3:4b  looking")
        await pilot.press("ctrl+x")
        await desk.see(pilot, "Enter resumes")
        await pilot.press("enter")
        await desk.until(pilot, lambda: desk.daemon.pulled == ["qwen3:4b"] * 2)
        desk.daemon.end_pull(DiskFull("the disk is full"))
        await desk.see(pilot, "the disk is full")


async def test_the_hub_is_searched_after_the_last_letter(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:4b")
        await pilot.press(*"llama")
        await desk.see(pilot, "someone/llama-GGUF")
        assert desk.daemon.searches == ["llama"], "one question, not one a letter"
        await pilot.press("enter")
        await desk.until(pilot, lambda: desk.daemon.pulled == ["hf.co/someone/llama-GGUF"])


async def test_a_hub_that_cannot_be_asked_is_said(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def search(query: str) -> dict[str, Any]:
        return {"catalog": [], "hub": [], "problem": f"no way to ask for {query}"}

    monkeypatch.setattr(desk.daemon, "search", search)
    async with desk.open(SIZE) as pilot:
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:4b")
        for query in ("qwen3", "llama"):
            await pilot.press(*["backspace"] * 5, *query)
            await desk.see(pilot, f"The hub was not searched: no way to ask for {query}")


async def test_a_model_that_was_unloaded_meanwhile_is_not_loaded(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        desk.daemon.publish()
        await desk.see(pilot, "● ready")
        await pilot.press("f3")
        await desk.see(pilot, "loaded")
        await pilot.press("down")
        desk.daemon.publish(engines=())
        await desk.until(pilot, lambda: "loaded" not in desk.seen(desk.app))
        desk.daemon.publish()
        await desk.see(pilot, "loaded")
        await pilot.press("enter")
        await desk.see(pilot, "This is qwen3:0.6b.")


async def test_what_went_wrong_before_it_was_opened_is_no_news(desk: Any) -> None:
    def failed(model: str, started_at_s: float) -> PullRow:
        return PullRow(model=model, state="failed", status="", error=f"{model}: no", started_at_s=started_at_s)

    desk.daemon.pull_rows = [failed("old", 1.0)]
    async with desk.open(SIZE) as pilot:
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:4b")
        await desk.until(pilot, lambda: desk.app.session.pulls.rows)
        assert "old: no" not in desk.seen(desk.app)
        await pilot.press(*"4b", "enter")
        await desk.see(pilot, "Pulling qwen3:4b; it continues when this window is closed.")
        desk.daemon.pull_rows = [failed("old", 1.0), failed("old", 2.0), failed("qwen3:4b", 3.0)]
        desk.daemon.end_pull(DiskFull("the disk is full"))
        await desk.see(pilot, "qwen3:4b: no")
        await desk.until(pilot, lambda: "Pulling" not in desk.seen(desk.app))
        assert desk.seen(desk.app).count("old: no") == 1


async def test_a_path_may_look_like_markup(desk: Any) -> None:
    desk.daemon.rows.append({"name": "/models/[/q8].gguf"})
    async with desk.open(SIZE) as pilot:
        await pilot.press("f3")
        await desk.see(pilot, "/models/[/q8].gguf")
        await pilot.press(*"q8", "ctrl+g")
        await desk.see(pilot, "completion, tools")
        assert "─ /models/[/q8].gguf ─" in desk.seen(desk.app)


async def test_details_load_unload_and_delete(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        desk.daemon.publish()
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:0.6b")
        await pilot.press(*"0.6", "ctrl+g")
        await desk.see(pilot, "completion, tools")
        await desk.see(pilot, "14.7 MB of 8.6 GB")
        await pilot.press("escape", "ctrl+u")
        await desk.until(pilot, lambda: desk.daemon.loads == ["qwen3:0.6b"])
        await pilot.press("ctrl+d")
        await desk.see(pilot, "deletes qwen3:0.6b")
        may_end = asyncio.Event()
        remove = desk.daemon.remove

        async def slow(model: str) -> dict[str, Any]:
            await may_end.wait()
            return await remove(model)

        desk.daemon.remove = slow
        await pilot.press("ctrl+d")
        await desk.see(pilot, "Deleting qwen3:0.6b…")
        # A large model takes the daemon seconds; keys go on.
        await pilot.press("backspace", "backspace", "backspace")
        await desk.see(pilot, "tiny  ")
        may_end.set()
        await desk.see(pilot, "Deleted qwen3:0.6b")


async def test_the_keys_that_work_everywhere_work_in_dialogs(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press("f3")
        await desk.see(pilot, "Enter chooses")
        await pilot.press("f10")
        await desk.see(pilot, "this help")
        await pilot.press("f10")
        await desk.see(pilot, "Enter chooses")
        await pilot.press("f4")
        await desk.until(pilot, lambda: desk.app.current_mode == "logs")
        assert "Enter chooses" not in desk.seen(desk.app)
        await pilot.press("f1")
        await desk.until(pilot, lambda: desk.app.current_mode == "chat")
        assert "Enter chooses" not in desk.seen(desk.app), "the dialog was closed"
        await pilot.press("ctrl+l")
        await desk.see(pilot, "Enter opens")
        await pilot.press("f1")
        await desk.until(pilot, lambda: "Enter opens" not in desk.seen(desk.app))
