from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun.attachments import Attachment, Kind
from localrun.tui.conversation import Conversation
from localrun.tui.history import History
from localrun.tui.media import examined, extra_of


@pytest.fixture
def history() -> Iterator[History]:
    found = History(Path(":memory:"))
    yield found
    found.close()


def _conversation(history: History, model: str = "tiny") -> Conversation:
    clock = itertools.count(100.0)
    return Conversation(history, model, lambda: next(clock))


def _said(conversation: Conversation) -> list[str]:
    return [message.content for message in conversation.messages]


def test_what_is_sent_is_the_system_prompt_the_branch_and_the_question(history: History):
    conversation = _conversation(history)
    conversation.configure(system="Be brief.")
    fox = examined(Attachment("fox.png", Kind.PICTURE, b"hi"))
    conversation.keep([fox])
    conversation.asked("one", extra_of([fox.medium]))
    conversation.answered("first", {"thinking": "hm", "caption": "3 tokens"})
    conversation.asked("two")
    assert conversation.to_send() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one", "images": ["aGk="]},
        {"role": "assistant", "content": "first", "thinking": "hm"},
        {"role": "user", "content": "two"},
    ]


def test_nothing_is_stored_before_the_first_question(history: History):
    conversation = _conversation(history)
    conversation.configure(system="Be brief.", parameters={"temperature": 0.5})
    assert history.chats() == []
    conversation.asked("one")
    (chat,) = history.chats()
    assert (chat.title, chat.system, chat.parameters) == ("one", "Be brief.", {"temperature": 0.5})
    assert conversation.title == "one"


def test_a_question_without_an_answer_stays_and_is_no_version_of_the_next_one(history: History):
    conversation = _conversation(history)
    lost = conversation.asked("one")
    assert conversation.asked("one") is lost
    other = conversation.asked("something else")
    conversation.answered("to it", {})
    conversation.asked("more")
    assert [message["content"] for message in conversation.to_send()] == ["something else", "to it", "more"]
    assert (conversation.versions(lost), conversation.versions(other)) == ((1, 1), (1, 1))
    again = Conversation(history, "", lambda: 0.0, history.chats()[0])
    assert _said(again) == ["one", "something else", "to it", "more"]
    assert [again.is_unanswered(message) for message in again.messages] == [True, False, False, True]


def test_an_edit_that_is_given_up_leaves_the_chat_as_it_was(history: History):
    conversation = _conversation(history)
    question = conversation.asked("one")
    conversation.answered("to one", {})
    conversation.edit(conversation.asked("two"))
    conversation.edit(question)
    assert (_said(conversation), conversation.is_edited) == ([], True)
    conversation.give_up_edit()
    assert (_said(conversation), conversation.is_edited) == (["one", "to one", "two"], False)


def test_an_edited_question_is_another_version_and_both_can_be_shown(history: History):
    conversation = _conversation(history)
    question = conversation.asked("one")
    conversation.answered("to one", {})
    conversation.back_to(question)
    assert conversation.last_answer() is None
    edited = conversation.asked("one, but better")
    conversation.answered("to better", {})
    assert conversation.versions(edited) == (2, 2)
    assert not conversation.show_version(edited, 1)
    assert conversation.show_version(edited, -1)
    assert _said(conversation) == ["one", "to one"]
    assert _said(Conversation(history, "", lambda: 0.0, history.chats()[0])) == ["one", "to one"]


def test_a_chat_that_another_window_deleted_goes_on_in_memory(history: History):
    conversation = _conversation(history)
    conversation.asked("one")
    assert conversation.chat_id is not None
    history.delete(conversation.chat_id)
    conversation.answered("first", {})
    assert "deleted" in conversation.trouble
    conversation.asked("two")
    assert _said(conversation) == ["one", "first", "two"]
    assert conversation.title == ""
    assert history.chats() == []


def test_a_history_that_refuses_is_no_end(history: History, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(history, "add", refuse)
    conversation = _conversation(history)
    conversation.asked("one")
    conversation.answered("first", {})
    assert conversation.trouble == "database or disk is full"
    assert conversation.last_answer() == "first"
    assert conversation.versions(conversation.messages[0]) == (1, 1)
    assert not conversation.show_version(conversation.messages[0], 1)
