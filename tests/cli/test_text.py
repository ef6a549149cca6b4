"""Numbers as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from operator import itemgetter

import pytest

from localrun.cli import text
from localrun.cli.text import ago, columns, duration, size
from localrun.visible import visible


def test_columns_line_up_without_trailing_spaces():
    assert (
        columns(("NAME", "SIZE"), [("a-long-name", "1"), ("b", "22")])
        == "NAME         SIZE\na-long-name  1\nb            22"
    )
    assert columns(("NAME", "SIZE"), []) == "NAME  SIZE"


def test_a_table_leaves_out_what_has_no_room_and_never_cuts_a_name(monkeypatch):
    header, row = ("NAME", "ID", "NOTE", "SIZE"), ("a-long-name", "0123456789", "x" * 30, "12 MB")
    whole = columns(header, [row])
    shapes = [text.Column(name, itemgetter(at), goes=at, is_cut=name == "NOTE") for at, name in enumerate(header)]

    def shown(width: int) -> list[str]:
        monkeypatch.setattr(text, "terminal_columns", lambda: width)
        return text.table(shapes, [row]).splitlines()

    assert "\n".join(shown(0)) == "\n".join(shown(62)) == whole
    assert shown(61)[0].split() == ["NAME", "NOTE", "SIZE"]
    assert shown(40)[1] == f"a-long-name  {'x' * 19}…  12 MB"
    assert shown(31)[1] == "a-long-name  12 MB"
    assert shown(5) == ["NAME", "a-long-name"]
    assert text.table(shapes, []) == "NAME  ID  NOTE  SIZE"


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 KB"),
        (9_500_000, "9.5 MB"),
        (123_456_789_000, "123 GB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_sizes(n_bytes, text):
    assert size(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0123, "12 ms"), (1.5, "1.50 s"), (125, "2 min 5 s"), (7260, "2 h 1 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("elapsed", "text"),
    [
        (timedelta(seconds=-5), "just now"),
        (timedelta(minutes=1), "1 minute ago"),
        (timedelta(hours=30), "1 day ago"),
        (timedelta(days=400), "400 days ago"),
    ],
)
def test_ages(elapsed, text):
    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert ago(now - elapsed, now) == text


def test_control_characters_become_pictures():
    assert visible("a\x1b]52;c;eA==\x07b\x7f\x9b1m\r") == "a␛]52;c;eA==␇b␡\ufffd1m␍"


def test_text_stays():
    text = "größe\n\tこんにちは 👋🏽"
    assert visible(text) == text
