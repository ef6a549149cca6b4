"""Foreign text cannot command the terminal."""

from __future__ import annotations

from rich.cells import cell_len

from localrun.tui.plain_text import block, column, fit, line

_HOSTILE = "zed\x1b[2J\x9b31m\x07\u202emodel"


def test_no_control_character_survives() -> None:
    for clean in (block(_HOSTILE), line(_HOSTILE), fit(_HOSTILE, 40)):
        assert clean == "zed�[2J�31m��model"


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


def test_wide_characters_are_cut_and_aligned_by_cells() -> None:
    assert fit("狐狸的故事", 10) == "狐狸的故事"
    assert cell_len(fit("狐狸的故事", 6)) <= 6
    for text in ("狐狸的故事很長", "🦊🦊🦊", "fox", "x" * 99):
        assert cell_len(column(text, 8)) == cell_len(column(text, 8, right=True)) == 8
