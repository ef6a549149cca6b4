"""What is written about an answer's speed."""

from __future__ import annotations

import io
import os

import pytest
from msgspec.structs import replace

from localrun.cli.answer import (
    StatusLine,
    StreamMeter,
    decode_rate,
    metrics_table,
    prefill_rate,
    summary,
)
from localrun.client import ChatMetrics
from localrun.snapshot import RequestRow, RequestState
from tests.says import says

METRICS = ChatMetrics(
    prompt_tokens=30, cached_tokens=10, output_tokens=11, load_s=0.5, prefill_s=0.2, decode_s=0.5, total_s=1.25
)
ONE_TOKEN = ChatMetrics(
    prompt_tokens=30, cached_tokens=30, output_tokens=1, load_s=0, prefill_s=0, decode_s=0, total_s=0.1
)


def test_rates_count_only_what_was_computed_in_their_time():
    assert decode_rate(METRICS) == 20.0
    assert prefill_rate(METRICS) == 100.0


def test_there_is_no_rate_of_one_token_or_of_a_cached_prompt():
    assert decode_rate(ONE_TOKEN) is None
    assert prefill_rate(ONE_TOKEN) is None
    assert "eval rate:            - tokens/s" in metrics_table(ONE_TOKEN)


def test_the_table_has_every_line():
    assert metrics_table(METRICS).splitlines() == [
        "total duration:       1.25s",
        "load duration:        500.0ms",
        "prompt eval count:    30 token(s)",
        "prompt cached count:  10 token(s)",
        "prompt eval duration: 200.0ms",
        "prompt eval rate:     100.00 tokens/s",
        "eval count:           11 token(s)",
        "eval duration:        500.0ms",
        "eval rate:            20.00 tokens/s",
    ]


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0.0ms"), (3.4, "3.40s"), (59.999, "1m0.00s"), (125, "2m5.00s")])
def test_a_duration_of_the_table_is_one_word(seconds, shown):
    """Scripts take what follows the colon."""
    assert metrics_table(replace(METRICS, total_s=seconds)).split()[2] == shown


def drafted(speedup: float) -> ChatMetrics:
    return replace(METRICS, drafted_tokens=9, accepted_tokens=7, speedup=speedup)


def test_the_table_says_what_was_drafted():
    assert metrics_table(drafted(2.134)).splitlines()[-3:] == [
        "draft count:          9 token(s)",
        "draft accepted count: 7 token(s)",
        "speedup by drafts:    2.13x",
    ]


def test_the_summary_says_how_much_faster_drafts_made_it_if_that_can_be_noticed():
    assert summary(drafted(2.134), 0.7).startswith("20.00 tokens/s, 11 tokens, 2.1x with drafts, first")
    assert "1.1x" in summary(drafted(1.05), 0.7)
    assert "draft" not in summary(drafted(1.04), 0.7) + summary(drafted(0.5), 0.7)


def test_the_summary_is_one_line():
    line = summary(METRICS, 0.7)
    assert says(line, "20.00 tokens/s", "11 tokens", "700 ms", "10 of 30")
    assert "\n" not in line


def test_waiting_shows_for_how_long():
    assert StreamMeter(100.0).line(101.25) == "waiting for the first token, 1.2 s"


def test_rate_and_tokens_are_the_daemon_s():
    """A piece may hold several tokens."""
    meter = StreamMeter(100.0)
    meter.add(100.1)
    meter.add(100.2)
    assert meter.line(100.4) == "... tokens/s, first after 0.10 s"
    meter.row = RequestRow(
        id="req_1", client="run", api="/api/chat", model="tiny", lane="default", state=RequestState.DECODE,
        output_tokens=9, tokens_per_s=33.333,
    )  # fmt: skip
    assert meter.line(100.4) == "33.3 tokens/s, 9 tokens, first after 0.10 s"


class Terminal(io.StringIO):
    """Records what is written; its size can change."""

    size = os.terminal_size((40, 24))

    def fileno(self) -> int:
        return 99

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: terminal.size)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return terminal


def test_text_scrolls_above_the_last_row_while_it_is_open(terminal):
    with StatusLine(terminal) as line:
        assert "\x1b[1;23r" in terminal.getvalue()
        line.show("55 tokens/s")
        assert "\x1b[24;1H\x1b[2K\x1b[2m55 tokens/s\x1b[0m\x1b8" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b7\x1b[24;1H\x1b[2K\x1b[r\x1b8")


def test_the_row_is_given_back_when_the_answer_fails(terminal):
    with pytest.raises(KeyboardInterrupt), StatusLine(terminal):
        raise KeyboardInterrupt
    assert "\x1b[r" in terminal.getvalue()


def test_a_long_text_never_wraps(terminal):
    with StatusLine(terminal) as line:
        line.show("x" * 100)
    assert "x" * 39 in terminal.getvalue()
    assert "x" * 40 not in terminal.getvalue()


def test_a_resized_terminal_gets_its_row_back_and_no_more_lines(terminal):
    with StatusLine(terminal) as line:
        terminal.size = os.terminal_size((40, 30))
        line.show("one")
        assert terminal.getvalue().count("\x1b[r") == 1
        line.show("two")
    assert "one" not in terminal.getvalue()
    assert "two" not in terminal.getvalue()
    assert terminal.getvalue().count("\x1b[r") == 1


def test_a_tiny_terminal_gets_none(terminal):
    terminal.size = os.terminal_size((40, 2))
    with StatusLine(terminal) as line:
        line.show("one")
    assert terminal.getvalue() == ""
