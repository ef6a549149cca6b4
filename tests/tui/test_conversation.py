"""What is sent to the model of what was said."""

from __future__ import annotations

from localrun.tui.conversation import Conversation


def test_messages_of_finished_and_running_turns() -> None:
    conversation = Conversation("tiny")
    conversation.ask("hello").answer = "hi"
    conversation.ask("and you?")
    assert conversation.messages() == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "and you?"},
    ]


def test_an_unanswered_question_is_forgotten_but_a_stopped_answer_is_not() -> None:
    conversation = Conversation("tiny")
    conversation.ask("one").answer = "half an ans"
    assert conversation.drop_unanswered() is None
    conversation.ask("two")
    dropped = conversation.drop_unanswered()
    assert dropped is not None
    assert dropped.question == "two"
    assert len(conversation.messages()) == 2


def test_last_answer_skips_turns_without_one() -> None:
    conversation = Conversation("tiny")
    assert conversation.last_answer() is None
    conversation.ask("one").answer = "first"
    conversation.ask("two")
    assert conversation.last_answer() == "first"
