"""The help explains the words of the monitor, as the documentation does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from localrun.tui.screens.help import WORDS
from localrun.tui.widgets.tables import RequestTable

GLOSSARY = Path(__file__).parents[3] / "localrun" / "docs" / "README.md"


def test_the_help_and_the_documentation_explain_words_alike():
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE))
    pairs = {word: meaning for words, meaning in rows.items() for word in words.split(", ")}
    assert {word for word in WORDS if word not in pairs} == {"target"}
    for word in ("slot", "KV cell", "prefix", "step", "lane", "engine"):
        assert WORDS[word] == pairs[word]


async def test_the_monitors_help_has_its_words(desk: Any):
    async with desk.open((100, 140)) as pilot:
        await pilot.press("f2")
        await desk.until(pilot, lambda: desk.app.screen.query(RequestTable))
        await pilot.press("question_mark")
        await desk.see(pilot, "Words of the monitor")
        await desk.see(pilot, "TTFT")
