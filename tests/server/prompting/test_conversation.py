"""Conversations fitted to what templates take."""

from __future__ import annotations

import sys
from types import FrameType, SimpleNamespace
from typing import Any, cast

from localrun.models.storage.manifest import Message
from localrun.models.storage.model import Model
from localrun.server.prompting import conversation as messages
from localrun.server.prompting.profile import profile_of

OBJECTS = "{{ message.tool_calls }}{{ tool_call.arguments | tojson }}"
HARMONY = OBJECTS + "<|channel|><|message|>"
TEXTS = "{{ message.tool_calls }}{{ '...' + tool_call.arguments }}"


def call(call_id: str, name: str = "f", **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def fitted(conversation: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    profile = profile_of(template)
    return messages.fitted(messages.spelled_out(conversation, profile), profile)


def test_arguments_are_objects_or_text_as_the_template_uses_them():
    conversation = [{"role": "assistant", "content": None, "tool_calls": [call("a", city="Paris")]}]
    assert fitted(conversation, OBJECTS)[0]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert fitted(conversation, TEXTS)[0]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
    assert fitted(conversation, TEXTS)[0]["content"] == ""


def test_the_other_way_is_there_for_a_template_that_fails():
    conversation = fitted([{"role": "assistant", "content": "", "tool_calls": [call("a", x=1)]}], OBJECTS)
    other = messages.with_other_arguments(conversation)
    assert other is not None
    assert other[0]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
    assert messages.with_other_arguments(other) == conversation
    assert messages.with_other_arguments([{"role": "user", "content": "x"}]) is None


def test_results_find_their_calls_by_id_else_by_name_else_in_order():
    conversation = [
        {"role": "assistant", "content": "", "tool_calls": [call("a", "f"), call("b", "g"), call("c", "h")]},
        {"role": "tool", "content": "2", "tool_call_id": "b"},
        {"role": "tool", "content": "3", "name": "h"},
        {"role": "tool", "content": "1"},
    ]
    results = messages.with_names(conversation)[1:]
    assert [(result["tool_call_id"], result["name"]) for result in results] == [("b", "g"), ("c", "h"), ("a", "f")]


def test_parts_become_one_text_and_text_becomes_parts_where_the_template_walks_through_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert fitted([{"role": "user", "content": parts}], "{{ message.content }}")[0]["content"] == "a\nb"
    walks = "{% for part in message['content'] %}{{ part.text }}{% endfor %}"
    assert fitted([{"role": "user", "content": "a"}], walks)[0]["content"] == [{"type": "text", "text": "a"}]


def test_thinking_has_the_names_that_templates_know():
    made = fitted([{"role": "assistant", "content": "b", "thinking": "a"}], "{{ message.content }}")[0]
    assert (made["thinking"], made["reasoning_content"]) == ("a", "a")
    assert "thinking" not in fitted([{"role": "assistant", "content": "b", "thinking": ""}], "")[0]


def test_mistral_gets_ids_of_nine_characters_that_agree():
    template = OBJECTS + "{% if tool_call.id is not defined or tool_call.id|length != 9 %}"
    conversation = [
        {"role": "assistant", "content": "", "tool_calls": [call("call_0123456789")]},
        {"role": "tool", "content": "x", "tool_call_id": "call_0123456789"},
    ]
    called, result = fitted(conversation, template)
    made = called["tool_calls"][0]["id"]
    assert len(made) == 9
    assert made.isalnum()
    assert result["tool_call_id"] == made
    kept = fitted([{"role": "assistant", "content": "", "tool_calls": [call("abcdefghi")]}], template)
    assert kept[0]["tool_calls"][0]["id"] == "abcdefghi"


def test_kimi_gets_ids_that_name_and_count_the_calls():
    template = OBJECTS + "<|tool_call_begin|>"
    conversation = [
        {"role": "assistant", "content": "", "tool_calls": [call("x", "f"), call("y", "g")]},
        {"role": "tool", "content": "1", "tool_call_id": "y"},
    ]
    called, result = fitted(conversation, template)
    assert [made["id"] for made in called["tool_calls"]] == ["functions.f:0", "functions.g:1"]
    assert result["tool_call_id"] == "functions.g:1"


def test_gpt_oss_gets_one_call_in_a_message_with_its_result_behind():
    conversation = [
        {"role": "assistant", "content": "I look.", "thinking": "Hm.", "tool_calls": [call("a"), call("b")]},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "2", "tool_call_id": "b"},
    ]
    made = fitted(conversation, HARMONY)
    assert [(message["role"], message["content"], len(message.get("tool_calls", ()))) for message in made] == [
        ("assistant", "I look.", 0),
        ("assistant", "", 1),
        ("tool", "1", 0),
        ("assistant", "", 1),
        ("tool", "2", 0),
    ]
    assert made[1]["thinking"] == "Hm."


def test_a_template_that_shows_the_first_call_alone_gets_one_in_a_message():
    made = fitted([{"role": "assistant", "content": "", "tool_calls": [call("a"), call("b")]}], OBJECTS)
    assert [len(message["tool_calls"]) for message in made] == [2]
    template = OBJECTS + "{{ message['tool_calls'][0] }}"
    made = fitted([{"role": "assistant", "content": "", "tool_calls": [call("a"), call("b")]}], template)
    assert [[each["id"] for each in message["tool_calls"]] for message in made] == [["a"], ["b"]]


def test_thinking_is_a_part_of_the_content_where_the_template_looks_for_it_there():
    (made,) = fitted(
        [{"role": "assistant", "content": "Yes.", "thinking": "Hm."}], "{% if block['type'] == 'thinking' %}"
    )
    assert made["content"] == [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}]


def test_a_template_that_shows_either_content_or_calls_gets_them_apart():
    template = OBJECTS + "{% if message['role'] == 'assistant' and message['content'] is none %}"
    made = fitted([{"role": "assistant", "content": "I look.", "tool_calls": [call("a")]}], template)
    assert [(message["content"], bool(message.get("tool_calls"))) for message in made] == [
        ("I look.", False),
        (None, True),
    ]


def test_system_texts_go_to_the_next_user_message():
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    assert messages.without_system([system, user, system]) == [
        {"role": "user", "content": "s\n\nu"},
        {"role": "user", "content": "s"},
    ]


def test_roles_alternate_and_a_user_speaks_first():
    assistant, user = {"role": "assistant", "content": "a"}, {"role": "user", "content": "u"}
    made = messages.alternating([assistant, user, user, assistant])
    assert [message["role"] for message in made] == ["user", "assistant", "user", "assistant"]
    assert made[2]["content"] == "u\n\nu"
    calls, result = {**assistant, "tool_calls": [call("a")]}, {"role": "tool", "content": "1", "tool_call_id": "a"}
    made = messages.alternating([user, calls, result, user, user])
    assert made == [user, calls, result, {"role": "assistant", "content": "."}, {"role": "user", "content": "u\n\nu"}]


def test_nothing_that_was_passed_in_is_changed():
    conversation = [
        {"role": "assistant", "content": "", "tool_calls": [call("a", x=1)]},
        {"role": "tool", "content": "r"},
    ]
    copy = [dict(message) for message in conversation]
    fitted(conversation, TEXTS + "<|tool_call_begin|><|channel|><|message|>")
    list(messages.milder(conversation))
    assert conversation == copy
    assert conversation[0]["tool_calls"] == [call("a", x=1)]


HELLO = {"role": "user", "content": "hello"}
SYSTEM = {"role": "system", "content": "mine"}


def model(system: str = "", *first: Message) -> Model:
    return cast(Model, SimpleNamespace(system=system, messages=first))


def test_a_plain_model_adds_nothing() -> None:
    assert messages.begun(model(), [HELLO]) == [HELLO]
    assert messages.begun(model(), []) == []


def test_the_system_prompt_is_for_conversations_without_one() -> None:
    assert messages.begun(model("theirs"), [HELLO]) == [{"role": "system", "content": "theirs"}, HELLO]
    assert messages.begun(model("theirs"), [SYSTEM, HELLO]) == [SYSTEM, HELLO]


def test_first_messages_come_before_the_client_s() -> None:
    begun = messages.begun(model("theirs", Message("user", "a"), Message("assistant", "b")), [HELLO])
    assert [message["content"] for message in begun] == ["theirs", "a", "b", "hello"]


def test_the_client_s_system_prompt_stays_the_first_message() -> None:
    begun = messages.begun(model("theirs", Message("user", "a"), Message("assistant", "b")), [SYSTEM, HELLO])
    assert [message["content"] for message in begun] == ["mine", "a", "b", "hello"]


# --- conversations of many messages: what they cost is counted in what is read, not in seconds -----------------------


def test_a_result_finds_its_call_however_many_wait() -> None:
    """By its id, else by its name, else the first; calls and results in thousands took seconds."""
    n = 3_000
    calls = [{"id": f"c{at}", "function": {"name": "ab"[at % 2], "arguments": {}}} for at in range(n)]
    results = [
        {"role": "tool", "tool_call_id": f"c{n - 1}", "content": ""},
        {"role": "tool", "name": "b", "content": ""},
        {"role": "tool", "content": ""},
        {"role": "tool", "content": ""},
        *({"role": "tool", "tool_call_id": "z", "name": "a", "content": ""} for _ in range(n)),
    ]
    looks = 0

    def count(frame: FrameType, event: str, given: object) -> Any:
        nonlocal looks
        looks += event == "line"
        return count if frame.f_code.co_filename == messages.__file__ else None

    sys.settrace(count)
    try:
        made = messages.with_names([{"role": "assistant", "content": "", "tool_calls": calls}, *results])
    finally:
        sys.settrace(None)
    found = [(message["tool_call_id"], message["name"]) for message in made[1:6]]
    assert found == [(f"c{n - 1}", "b"), ("c1", "b"), ("c0", "a"), ("c2", "a"), ("z", "a")]
    assert looks < 60 * 2 * n, "lines that were run, linear in calls and results"


def test_neighbours_of_one_role_are_put_together_once() -> None:
    said = [("user", f"{at}") for at in range(2_000)] + [("assistant", ""), ("assistant", "x"), ("user", "y")]
    made = messages.alternating([{"role": role, "content": text} for role, text in said])
    assert [message["role"] for message in made] == ["user", "assistant", "user"]
    assert made[0]["content"] == "\n\n".join(str(at) for at in range(2_000))
    assert (made[1]["content"], made[2]["content"]) == ("x", "y")
