"""What a conversation remembers, and what the slash commands change."""

from __future__ import annotations

import pytest

from localrun.cli.answer import Stats
from localrun.cli.session import Session
from localrun.errors import BadRequest


def test_the_whole_conversation_is_sent():
    session = Session(model="tiny", system="Be brief.")
    session.remember("one", "first")
    assert session.messages("two") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two"},
    ]


def test_a_turn_without_an_answer_is_forgotten_and_clear_keeps_the_system_message():
    session = Session(model="tiny", system="S")
    session.remember("one", "")
    assert len(session.messages("two")) == 2
    session.remember("one", "stopped half")
    session.clear()
    assert session.messages("two") == [{"role": "system", "content": "S"}, {"role": "user", "content": "two"}]


def test_set():
    session = Session(model="tiny")
    assert "0.25" in session.set("parameter temperature 0.25")
    session.set("parameter stop ###")
    session.set("system You are a pirate.")
    session.set("verbose")
    assert session.options == {"temperature": 0.25, "stop": ["###"]}
    assert session.system == "You are a pirate."
    assert session.stats is Stats.VERBOSE


@pytest.mark.parametrize(
    "arguments", ["", "loud", "system", "parameter", "parameter seed", "parameter warmth 1", "parameter seed x"]
)
def test_what_cannot_be_set_changes_nothing(arguments):
    session = Session(model="tiny")
    with pytest.raises(BadRequest):
        session.set(arguments)
    assert session == Session(model="tiny")
