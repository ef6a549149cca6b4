"""A model cannot drive the terminal that its words are shown on."""

from __future__ import annotations

from localrun.cli.visible import visible


def test_control_characters_become_pictures():
    assert visible("a\x1b]52;c;eA==\x07b\x7f\x9b1m\r") == "a␛]52;c;eA==␇b␡\ufffd1m␍"


def test_text_stays():
    text = "größe\n\tこんにちは 👋🏽"
    assert visible(text) == text
