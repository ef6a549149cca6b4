from __future__ import annotations

import pytest

from localrun.tui.screens.chat_commands import _ACTIONS
from localrun.tui.slash import COMMANDS, Slash, parse, suggestions, unescaped, value_of


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/new", Slash("new", "")),
        ("/SET temperature 0.2", Slash("set", "temperature 0.2")),
        ("/system  Be brief.\nVery.", Slash("system", "Be brief.\nVery.")),
        ("what is /new?", None),
        ("//new is a command", None),
        ("/etc/hosts is a file", None),
        ("/", None),
        ("", None),
    ],
)
def test_parse(text: str, command: Slash | None):
    assert parse(text) == command


def test_a_question_may_begin_with_a_slash():
    assert unescaped("//new is what?") == "/new is what?"
    assert unescaped("new") == "new"


def test_suggestions_are_for_what_is_being_typed():
    assert suggestions("/e") == ["edit", "export", "editor"]
    assert suggestions("/edit now") == []
    assert suggestions("hello") == []
    assert suggestions("/") == list(COMMANDS)


def test_every_command_does_something():
    assert _ACTIONS.keys() == COMMANDS.keys()


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("0.5", 0.5), ("TRUE", True), ("false", False), ("a b", "a b")])
def test_values(text: str, value: object):
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)
