"""The live numbers of an answer: where they come from, and when they are shown."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from localrun.client import ChatMetrics
from localrun.tui.answer_progress import AnswerProgress, StatusPart, fit_parts
from tests.says import says

METRICS = ChatMetrics(
    prompt_tokens=512, cached_tokens=480, output_tokens=200, load_s=0, prefill_s=0.1, decode_s=2.0, total_s=2.5
)


def _texts(progress: AnswerProgress) -> list[str]:
    return [part.text for part in progress.parts()]


def test_the_row_is_found_by_request_id_among_others(desk: Any) -> None:
    progress = AnswerProgress("tui-1", request_id="mine")
    progress.see(desk.snapshot_of(desk.row("other"), desk.row("mine", output_tokens=77, tokens_per_s=31.0)))
    assert _texts(progress) == [
        "decoding", "31.0 tok/s", "TTFT 310 ms", "prompt 512", "cached 480", "output 77", "ctx 14%",
    ]  # fmt: skip


def test_before_the_header_only_a_single_running_request_of_this_client_counts(desk: Any) -> None:
    progress = AnswerProgress("tui-1")
    progress.see(desk.snapshot_of(desk.row("a"), desk.row("b", client="tui-1", state="done")))
    assert _texts(progress) == ["sending"]
    one = desk.row("c", "prefill", client="tui-1", computed_tokens=128)
    progress.see(desk.snapshot_of(one, desk.row("d", client="tui-1")))
    assert _texts(progress) == ["sending"]
    progress.see(desk.snapshot_of(one))
    assert _texts(progress)[0] == "prefill 25%"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"state": "loading", "age_s": 2.1}, "loading the model, 2s"),
        ({"state": "queued", "queue_position": 3}, "queued, place 3"),
        ({"state": "queued", "queue_position": 3, "predicted_wait_s": 12.3}, "queued, place 3, about 12s"),
        ({"state": "queued"}, "queued"),
        ({"state": "prefill", "prompt_tokens": None}, "prefill"),
        ({"state": "prefill", "computed_tokens": 511}, "prefill 99%"),
        ({"state": "decode"}, "decoding"),
        ({"state": "cancelled"}, "ending"),
    ],
)
def test_states_in_words(desk: Any, changes: dict[str, Any], text: str) -> None:
    progress = AnswerProgress("tui-1", request_id="mine")
    progress.see(desk.snapshot_of(desk.row("mine", **changes)))
    assert _texts(progress)[0] == text


def test_text_that_came_beats_an_older_snapshot(desk: Any) -> None:
    progress = AnswerProgress("tui-1", request_id="mine", has_text=True)
    progress.see(desk.snapshot_of(desk.row("mine", "prefill")))
    assert _texts(progress)[0] == "decoding"


def test_no_rate_before_ten_tokens(desk: Any) -> None:
    progress = AnswerProgress("tui-1", request_id="mine")
    progress.see(desk.snapshot_of(desk.row("mine", output_tokens=9)))
    assert progress.tokens_per_s is None
    progress.see(desk.snapshot_of(desk.row("mine", output_tokens=10)))
    assert progress.tokens_per_s == 42.0


def test_the_end_is_told_by_the_metrics_and_the_ttft_by_the_row(desk: Any) -> None:
    progress = AnswerProgress("tui-1", request_id="mine")
    progress.see(desk.snapshot_of(desk.row("mine", output_tokens=150)))
    progress.finish("done", "stop", METRICS)
    assert _texts(progress) == [
        "done", "100 tok/s", "TTFT 310 ms", "prompt 512", "cached 480", "output 200", "ctx 17%",
    ]  # fmt: skip
    assert progress.caption() == "200 tokens · 100 tok/s"


def test_captions_say_how_much_faster_drafts_made_it() -> None:
    for speedup, more in ((2.14, " · 2.1x with drafts"), (1.04, ""), (0.9, "")):
        progress = AnswerProgress("tui-1")
        progress.finish("done", "stop", replace(METRICS, speedup=speedup))
        assert progress.caption() == f"200 tokens · 100 tok/s{more}"


def test_captions_say_how_it_ended(desk: Any) -> None:
    cut = AnswerProgress("tui-1")
    cut.finish("done", "length", METRICS)
    assert says(cut.caption(), "200 tokens", "100 tok/s", "length limit")
    assert _texts(cut)[0] == "length limit"
    stopped = AnswerProgress("tui-1", request_id="mine")
    stopped.see(desk.snapshot_of(desk.row("mine", "cancelled", output_tokens=40)))
    stopped.finish("stopped")
    assert stopped.caption() == "40 tokens · 39.5 tok/s · stopped"
    failed = AnswerProgress("tui-1")
    failed.finish("failed")
    assert failed.caption() == "incomplete"


def test_a_narrow_line_drops_the_least_important_and_keeps_the_order() -> None:
    parts = [StatusPart("decoding", 0), StatusPart("42 tok/s", 1), StatusPart("TTFT 1 s", 2), StatusPart("tiny", 9)]
    assert [part.text for part in fit_parts(parts, 80, gap=3)] == ["decoding", "42 tok/s", "TTFT 1 s", "tiny"]
    assert [part.text for part in fit_parts(parts, 30, gap=3)] == ["decoding", "42 tok/s", "TTFT 1 s"]
    assert [part.text for part in fit_parts(parts, 20, gap=3)] == ["decoding", "42 tok/s"]
    assert [part.text for part in fit_parts(parts, 3, gap=3)] == ["decoding"]
