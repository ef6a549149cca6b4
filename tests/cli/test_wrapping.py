"""Answers in a terminal: words are whole, and what is on the screen is what the model said."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from rich.cells import cell_len

from localrun.cli.answer import Wrapping

TEXTS = {
    "prose": "A decorator is a function that takes another function. One of them optimizes code, and says so. " * 6,
    "lists": "1. First, do this:\n\n   - one thing\n   - another thing that is long, and goes on and on\n\n2. Then."
    * 3,
    "code": "```python\ndef f(a, b):\n    return [x for x in range(a) if x % 2 == 0 and x > b]  # of all\n```\n" * 4,
    "CJK": "昔々、あるところにおじいさんとおばあさんが住んでいました。山へ芝刈りに。한국어 문장도 있습니다, 아주 길게. "
    * 4,
    "emoji": "Ships 🚢 and cats 🐈 and 👍🏽 thumbs, rockets 🚀🚀🚀 and flags; " * 6,
    "long words": "See https://example.org/" + "a" * 200 + " and x" * 30,
}


def shown(text: str, n_columns: int, seed: int) -> str:
    """In pieces of any size, as tokens come."""
    chance, wrapping, at, written = random.Random(seed), Wrapping(), 0, []
    while at < len(text):
        size = chance.choice((1, 2, 3, 5, 8, 40))
        written.append(wrapping.feed(text[at : at + size], n_columns))
        at += size
    return "".join(written) + wrapping.end(n_columns)


@pytest.mark.parametrize("n_columns", [20, 40, 60, 80, 120])
@pytest.mark.parametrize("name", TEXTS)
def test_lines_fit_and_nothing_is_lost(name: str, n_columns: int) -> None:
    for seed in range(20):
        lines = shown(TEXTS[name], n_columns, seed).split("\n")
        assert max(map(cell_len, lines)) < n_columns, "the last column stays empty"
        assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", TEXTS[name])


def test_words_are_whole_and_line_breaks_and_indents_stay() -> None:
    assert shown("one two three four", 10, 1) == "one two\nthree\nfour"
    assert shown("a\n\n    b c\n", 40, 1) == "a\n\n    b c\n"
    assert shown("x " + "y" * 12, 8, 1) == "x\nyyyyyyy\nyyyyy"
    assert shown("日本語です", 6, 1) == "日本\n語で\nす"
    assert shown(TEXTS["prose"], 0, 1) == TEXTS["prose"].rstrip(" "), "nobody knows how wide it is"


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.parametrize("n_columns", [40, 60, 80, 120])
def test_in_tmux_beside_a_status_line_every_letter_is_on_the_screen(n_columns: int, tmp_path: Path) -> None:
    """Where a piece ended in the last column, the next one was written over its last letter."""
    text = "\n".join(TEXTS[name] for name in ("prose", "code", "CJK", "emoji"))
    program = tmp_path / "show.py"
    program.write_text(
        "import sys, random\n"
        "from pathlib import Path\n"
        "from localrun.cli.answer import StatusLine, writing_to\n"
        f"text, chance = Path({str(tmp_path / 'text')!r}).read_text(encoding='utf-8'), random.Random(3)\n"
        "with StatusLine(sys.stdout) as line:\n"
        "    write, end = writing_to(sys.stdout)\n"
        "    at = 0\n"
        "    while at < len(text):\n"
        "        size = chance.choice((1, 2, 3, 5))\n"
        "        write(text[at:at + size]); at += size\n"
        "        line.show(f'{at} tok/s')\n"
        "    end()\n"
        "print('\\nTHE END', flush=True)\n"
        "input()\n",
        encoding="utf-8",
    )
    (tmp_path / "text").write_text(text, encoding="utf-8")
    server = f"localrun-test-{uuid.uuid4().hex[:8]}"

    def tmux(*arguments: str) -> str:
        command = ["tmux", "-u", "-L", server, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    environment = [f"{name}={os.environ[name]}" for name in ("PATH", "PYTHONPATH") if name in os.environ]
    size = ["-x", str(n_columns), "-y", "30"]
    try:
        tmux(
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            *size,
            "env",
            *environment,
            "LC_ALL=C.UTF-8",
            sys.executable,
            str(program),
        )
        for _ in range(600):
            screen = tmux("capture-pane", "-p", "-S", "-2000")
            if "THE END" in screen:
                break
            time.sleep(0.1)
        on_screen = screen.partition("THE END")[0]
    finally:
        subprocess.run(["tmux", "-L", server, "kill-server"], capture_output=True, check=False)
    assert re.sub(r"\s", "", on_screen) == re.sub(r"\s", "", text)
