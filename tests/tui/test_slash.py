from __future__ import annotations

import re
from typing import Any

import pytest

from localrun.server.openapi.operations import document
from localrun.tui.screens.chat_commands import _ACTIONS
from localrun.tui.slash import COMMANDS, Slash, option, parse, suggestions, unescaped, value_of


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/new", Slash("new", "")),
        ("/SET temperature 0.2", Slash("set", "temperature 0.2")),
        ("/system  Be brief.\nVery.", Slash("system", "Be brief.\nVery.")),
        ("what is /new?", None),
        ("//new is a command", None),
        ("/etc/hosts is a file", Slash("etc/hosts", "is a file")),
        ("/tools/export story.md", Slash("tools/export", "story.md")),
        ("/* a comment */", None),
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


KNOWN: dict[str, Any] = document()["components"]["schemas"]["Options"]["properties"]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.2", 0.2),
        ("top_k", "-1", -1),
        ("seed", "7", 7),
        ("use_mmap", "TRUE", True),
        ("speculation", "Off", "off"),
        ("speculation", "false", False),
        ("stop", "3", "3"),
    ],
)
def test_an_option_has_the_kind_that_the_daemon_takes(name: str, text: str, value: object):
    assert option(name, text, KNOWN) == value
    assert type(option(name, text, KNOWN)) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("temperature", "9x", "temperature is '9x', but must be a number at least 0 and at most 100"),
        ("temperature", "true", "must be a number"),
        ("temperature", "nan", "must be a number"),
        ("typical_p", "0", "must be a number above 0 and at most 1"),
        ("top_k", "1e300", "at least -1 and at most 2147483647"),
        ("use_mmap", "1", "must be true or false"),
        ("speculation", "fast", "must be on, off, true or false"),
        ("temprature", "1", "temprature is no parameter; did you mean 'temperature'?"),
    ],
)
def test_an_option_that_the_daemon_would_refuse(name: str, text: str, why: str):
    with pytest.raises(ValueError, match=re.escape(why)):
        option(name, text, KNOWN)
