"""Numbers as short text: digits, units, and the edges between them. Foreign text cannot command the terminal."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from localrun.tui import short_text
from localrun.tui.short_text import block, column, fit, line


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0.0"), (8.42, "8.4"), (99.94, "99.9"), (99.96, "100"), (842.4, "842"), (12_345.0, "12.3k")],
)
def test_rate(value: float | None, text: str) -> None:
    assert short_text.rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0.0008, "0.8 ms"), (0.012, "12 ms"), (0.9994, "999 ms"), (0.9996, "1.0 s"), (4.24, "4.2 s"),
        (9.96, "10 s"), (99.0, "99 s"), (185.0, "3m 05s"),
    ],
)  # fmt: skip
def test_seconds(value: float | None, text: str) -> None:
    assert short_text.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (-0.2, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (7620.0, "2h 07m"), (2e5, "2d")]
)
def test_age(value: float | None, text: str) -> None:
    assert short_text.age(value) == text


@pytest.mark.parametrize(
    ("value", "widest", "text"),
    [
        (None, 99_999, "–"), (0, 99_999, "0"), (1204, 99_999, "1,204"), (32_768, 9_999, "32.8k"), (999, 999, "999"),
        (100_000, 99_999, "100k"), (999_400, 99_999, "999k"), (999_600, 99_999, "1.0M"), (7_000_000_000, 99, "7.0G"),
        (2 * 10**12, 99, "2.0T"),
    ],
)  # fmt: skip
def test_count(value: int | None, widest: int, text: str) -> None:
    assert short_text.count(value, widest=widest) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0, "0 B"), (640, "640 B"), (5_400_000, "5.4 MB"), (312_000_000, "312 MB"), (999, "999 B"),
        (1001, "1.0 KB"), (16 * 10**9, "16.0 GB"), (3 * 10**12, "3.0 TB"),
    ],
)  # fmt: skip
def test_size(value: int | None, text: str) -> None:
    assert short_text.size(value) == text


def test_percent_says_all_only_for_all_and_none_only_for_none() -> None:
    shares = [None, 0.0, 0.0001, 0.5, 0.9999, 1.0]
    assert [short_text.percent(share) for share in shares] == ["–", "0%", "1%", "50%", "99%", "100%"]


_HOSTILE = "zed\x1b[2J\x9b31m\x07\u202emodel"


def test_no_control_character_survives() -> None:
    for clean in (block(_HOSTILE), line(_HOSTILE), fit(_HOSTILE, 40)):
        assert clean == "zed␛[2J�31m␇�model"


def test_block_keeps_lines_and_tabs() -> None:
    assert block("a\tb\r\nc\rd\n\ne") == "a\tb\nc\nd\n\ne"


def test_line_is_one_line() -> None:
    assert line(" a\n\n b\tc\r\n") == "a b c"


def test_fit_cuts_with_an_ellipsis() -> None:
    assert [fit("openai-python", width) for width in (20, 13, 12, 1)] == [
        "openai-python",
        "openai-python",
        "openai-pyth…",
        "…",
    ]


def test_a_models_name_that_is_too_wide_goes_without_what_is_before_it() -> None:
    for name, file in (("/home/a/models/b.gguf", "b.gguf"), ("hf.co/owner/repo:Q4_K_M", "repo:Q4_K_M")):
        assert short_text.model(name, len(name)) == name
        assert short_text.model(name, len(name) - 1) == short_text.model(name, len(file)) == file
        assert short_text.model(name, len(file) - 1) == file[:-2] + "…"


def test_wide_characters_are_cut_and_aligned_by_cells() -> None:
    assert fit("狐狸的故事", 10) == "狐狸的故事"
    assert cell_len(fit("狐狸的故事", 6)) <= 6
    for text in ("狐狸的故事很長", "🦊🦊🦊", "fox", "x" * 99):
        assert cell_len(column(text, 8)) == cell_len(column(text, 8, right=True)) == 8
