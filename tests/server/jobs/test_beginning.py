"""What a model's manifest puts before a conversation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from localrun.models.manifest import Message
from localrun.models.store import Model
from localrun.server.jobs import beginning

HELLO = {"role": "user", "content": "hello"}
SYSTEM = {"role": "system", "content": "mine"}


def model(system: str = "", *messages: Message) -> Model:
    return cast(Model, SimpleNamespace(system=system, messages=messages))


def test_a_plain_model_adds_nothing() -> None:
    assert beginning.begun(model(), [HELLO]) == [HELLO]
    assert beginning.begun(model(), []) == []


def test_the_system_prompt_is_for_conversations_without_one() -> None:
    assert beginning.begun(model("theirs"), [HELLO]) == [{"role": "system", "content": "theirs"}, HELLO]
    assert beginning.begun(model("theirs"), [SYSTEM, HELLO]) == [SYSTEM, HELLO]


def test_first_messages_come_before_the_client_s() -> None:
    begun = beginning.begun(model("theirs", Message("user", "a"), Message("assistant", "b")), [HELLO])
    assert [message["content"] for message in begun] == ["theirs", "a", "b", "hello"]


def test_the_client_s_system_prompt_stays_the_first_message() -> None:
    begun = beginning.begun(model("theirs", Message("user", "a"), Message("assistant", "b")), [SYSTEM, HELLO])
    assert [message["content"] for message in begun] == ["mine", "a", "b", "hello"]
