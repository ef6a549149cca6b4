"""The body of /v1/chat/completions: what it asks for, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.server import structured
from localrun.server.http.exchange import decode_body
from localrun.server.openai.chat import ChatBody
from localrun.server.prompting.ask import MAX_MESSAGES, check_goes_on

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> ChatBody:
    return decode_body(json.dumps({"model": "m", "messages": [USER], **fields}).encode(), ChatBody)


def refused(**fields: Any) -> BadRequest:
    body = chat(**fields)
    try:
        body.check_supported()
        body.ask()
    except BadRequest as error:
        return error
    pytest.fail("it was not refused")


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat().max_output is None
    assert chat(max_tokens=5).max_output == 5
    assert chat(max_tokens=5, max_completion_tokens=9).max_output == 9


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []}, {"tools": None, "tool_choice": "none"}, {"tool_choice": "auto"}, {"functions": []},
        {"response_format": {"type": "text"}}, {"response_format": None}, {"modalities": ["text"]}, {"user": "me"},
        {"logprobs": False, "top_logprobs": 0}, {"store": True}, {"metadata": {}}, {"grammar": ""},
        {"add_generation_prompt": True}, {"continue_final_message": False},
    ],
)  # fmt: skip
def test_empty_values_ask_for_nothing(fields: dict[str, Any]) -> None:
    body = chat(**fields)
    body.check_supported()
    ask = body.ask()
    assert (ask.tools, ask.response_grammar, ask.think, ask.continue_last) == ((), None, None, False)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "grammar": "root ::= [a]"}, "grammar"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "modalities"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER | {"prefix": True}]}, "messages[0].prefix"),
        ({"messages": [{"role": "assistant", "content": "x", "prefix": True}, USER]}, "messages[0].prefix"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        (
            {"messages": [USER, {"role": "assistant", "prefix": True}], "tools": [TOOL], "tool_choice": "required"},
            "tool_choice",
        ),
        ({"chat_template_kwargs": {"eot_token": "<|im_end|>"}}, "chat_template_kwargs.eot_token"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    error = refused(**fields)
    assert error.field == field
    assert field.partition("[")[0] in error.message


def test_tools_and_how_they_are_to_be_used() -> None:
    ask = chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).ask()
    assert [tool.name for tool in ask.tools] == ["look_up"]
    assert (ask.tool_choice, ask.parallel_calls) == ("required", False)
    ask = chat(tools=[TOOL]).ask()
    assert (ask.tool_choice, ask.parallel_calls) == ("auto", True)


def test_functions_are_the_older_tools() -> None:
    body = chat(functions=[{"name": "f", "description": "d"}], function_call={"name": "f"})
    ask = body.ask()
    assert body.uses_functions
    assert [(tool.name, tool.description) for tool in ask.tools] == [("f", "d")]
    assert (ask.tool_choice, ask.parallel_calls) == (("function", "f"), False)
    assert chat(functions=[{"name": "f"}], function_call="none").ask().tool_choice == "none"


def test_the_shape_of_the_answer() -> None:
    assert chat(response_format={"type": "json_object"}).ask().response_grammar == structured.json_object()


@pytest.mark.parametrize(
    ("effort", "think"),
    [("none", False), ("minimal", "minimal"), ("medium", "medium"), ("max", "max")],
)
def test_reasoning_effort(effort: str, think: object) -> None:
    assert chat(reasoning_effort=effort).ask().think == think


@pytest.mark.parametrize("how", [{"continue_final_message": True, "add_generation_prompt": False}, {}])
def test_a_prefix_of_the_answer(how: dict[str, Any]) -> None:
    started = {"role": "assistant", "content": "It was"} | ({} if how else {"prefix": True})
    ask = chat(messages=[USER, started], **how).ask()
    assert ask.continue_last
    assert ask.messages[-1] == {"role": "assistant", "content": "It was"}


def test_what_goes_to_the_template() -> None:
    ask = chat(chat_template_kwargs={"enable_thinking": False}, documents=[{"title": "t", "text": "x"}]).ask()
    assert ask.template_variables == {"enable_thinking": False}
    assert ask.documents == [{"title": "t", "text": "x"}]


@pytest.mark.parametrize(("tools", "field"), [
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"functions": [TOOL["function"]], "function_call": {"name": TOOL["function"]["name"]}}, "function_call"),
])  # fmt: skip
def test_a_call_cannot_go_on_from_a_prefix_in_the_words_of_the_other_apis(tools: dict[str, Any], field: str) -> None:
    messages = [USER, {"role": "assistant", "content": "x", "prefix": True}]
    with pytest.raises(BadRequest) as elsewhere:
        check_goes_on("required")
    assert refused(messages=messages, **tools).message == elsewhere.value.message.replace("tool_choice", field)


def test_more_messages_than_a_context_could_hold_are_refused_by_number() -> None:
    assert len(chat(messages=[USER] * MAX_MESSAGES).ask().messages) == MAX_MESSAGES
    with pytest.raises(BadRequest, match=f"{MAX_MESSAGES}") as wrong:
        chat(messages=[USER] * (MAX_MESSAGES + 1))
    assert wrong.value.field == "messages"
