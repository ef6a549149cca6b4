from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from localrun.tui.app import LocalrunApp
from localrun.tui.keys import KEYS, of_section, shown
from localrun.tui.preferences import Pictures, Preferences, load


def _load(tmp_path: Path, text: str) -> Preferences:
    (tmp_path / "tui.toml").write_text(text, encoding="utf-8")
    return load(tmp_path / "tui.toml")


def test_theme_and_keys_are_taken(tmp_path: Path):
    found = _load(tmp_path, 'theme = "nord"\n[keys]\n"chat.new" = "ctrl+t"\n')
    assert found == Preferences("nord", {"chat.new": "ctrl+t"}, ())
    assert load(tmp_path / "none.toml") == Preferences()
    assert _load(tmp_path, '\ufefftheme = "nord"').theme == "nord", "editors on Windows leave a mark"
    assert _load(tmp_path, 'pictures = "blocks"').pictures is Pictures.BLOCKS


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("theme = 3", "theme must be a text"),
        ("colour = 'red'", "'colour' is unknown"),
        ("pictures = 'sixel'", "pictures is 'sixel', but must be one of auto, kitty, blocks, off"),
        ("pictures = 3", "pictures is 3"),
        ("pictures = ['kitty']", "must be one of"),
        ("keys = 3", "keys must be a table"),
        ('[keys]\n"chat.nothing" = "x"', "none of app.chat"),
        ('[keys]\n"chat.new" = 3\n"chat.copy" = "f9"', "must be a text such as ctrl"),
        ("not toml", "cannot be read"),
    ],
)
def test_what_is_wrong_is_said_and_the_rest_counts(tmp_path: Path, text: str, problem: str):
    found = _load(tmp_path, text)
    assert problem in found.problems[0]
    assert found.theme is None
    assert found.keys in ({}, {"chat.copy": "f9"})


def test_keys_read_as_people_write_them():
    assert shown("f3,ctrl+o") == "F3 ^o"
    assert shown("slash") == "/"
    assert ("^t", KEYS["chat.new"].what) in of_section("chat", {"chat.new": "ctrl+t"})


async def test_own_keys_work_and_stand_in_the_help_and_the_footer(desk: Any) -> None:
    desk.app = LocalrunApp(
        "http://127.0.0.1:1",
        connect=desk.daemon.connect,
        preferences=Preferences("nord", {"app.monitor": "ctrl+t", "app.help": "f9"}, ("a problem",)),
    )
    async with desk.open((100, 60)) as pilot:
        await desk.see(pilot, "a problem")
        assert desk.app.theme == "nord"
        await pilot.press("f2")
        assert desk.app.current_mode == "chat"
        await pilot.press("ctrl+t")
        await desk.until(pilot, lambda: desk.app.current_mode == "monitor")
        await desk.see(pilot, "F9 Help")
        await pilot.press("f9")
        await desk.see(pilot, "^t           monitor")


async def test_an_unknown_theme_is_said(desk: Any) -> None:
    desk.app = LocalrunApp("http://127.0.0.1:1", connect=desk.daemon.connect, preferences=Preferences("no-such"))
    async with desk.open((100, 30)) as pilot:
        await desk.see(pilot, "there is no theme 'no-such'")


# What a terminal, a desktop, tmux or screen keeps for itself, or cannot tell from another key (^h ^i ^j ^m).
KEPT_BY_OTHERS = {"ctrl+a", "ctrl+b", "ctrl+c", "ctrl+h", "ctrl+i", "ctrl+j", "ctrl+m"}


def test_every_function_key_has_a_letter_that_terminals_pass_on():
    for name, key in KEYS.items():
        keys = key.keys.split(",")
        if any(re.fullmatch(r"f\d+", each) for each in keys):
            letters = [each for each in keys if re.fullmatch(r"ctrl\+[a-z]", each)]
            assert letters, f"{name} has no second key"
            assert not set(letters) & KEPT_BY_OTHERS, name


def test_no_key_means_two_things_on_one_screen():
    """Dialogs have their keys to themselves; a screen shares them with the app."""
    for section in ("chat", "monitor", "logs"):
        keys = [each for name, key in KEYS.items() if name.startswith(("app.", f"{section}."))
                for each in key.keys.split(",")]  # fmt: skip
        assert len(keys) == len(set(keys)), section


async def test_the_help_has_every_key_of_the_table(desk: Any) -> None:
    async with desk.open((160, 120)) as pilot:
        await pilot.press("f10")
        for key in KEYS.values():
            await desk.see(pilot, f"{shown(key.keys).ljust(13)}{key.what}")


def test_every_key_of_the_table_is_bound_somewhere():
    bound = "".join(path.read_text() for path in Path(__file__).parents[2].glob("tui/**/*.py"))
    for name in KEYS:
        assert f'bind("{name}"' in bound, f"{name} does nothing"
