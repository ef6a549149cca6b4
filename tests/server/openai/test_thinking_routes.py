"""Thinking over HTTP, with fake engines and a template that opens it: all that such an engine writes is thinking."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.daemon import Daemon, running_daemon
from tests.models.handmade import ENTRIES, STRING, entry, file_bytes, text
from tests.server.openai import shapes
from tests.server.openai.responses.shapes import Event, Response

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n"
    "{% endif %}{% endif %}"
)
OFF_BY_ITSELF = TEMPLATE.replace(
    "enable_thinking is defined and enable_thinking is false", "not (enable_thinking is defined and enable_thinking)"
)
LIMITS: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "thinker.gguf").write_bytes(
        file_bytes((*ENTRIES, entry("tokenizer.chat_template", STRING, text(TEMPLATE))))
    )
    (folder / "hybrid.gguf").write_bytes(
        file_bytes((*ENTRIES, entry("tokenizer.chat_template", STRING, text(OFF_BY_ITSELF))))
    )
    with running_daemon(LOCALRUN_MODELS=str(folder)) as running:
        yield running


def chat(daemon: Daemon, **fields: Any) -> dict[str, Any]:
    body = {"model": "thinker", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12} | LIMITS
    answer = daemon.post("/v1/chat/completions", body | fields)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        msgspec.json.decode(answer.content, type=shapes.Chat)
        parsed: dict[str, Any] = answer.json()
        return parsed
    chunks = [json.loads(item.removeprefix("data: ")) for item in answer.text.split("\n\n")[:-2]]
    msgspec.convert(chunks, list[shapes.ChatChunk])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    return {name: "".join(delta.get(name, "") for delta in deltas) for name in ("content", "reasoning_content")}


def respond(daemon: Daemon, **fields: Any) -> Any:
    body = {"model": "thinker", "input": "hello", "max_output_tokens": 12} | LIMITS
    return daemon.post("/v1/responses", body | fields)


def test_thinking_stands_beside_the_content(daemon: Daemon) -> None:
    answer = chat(daemon)
    message = answer["choices"][0]["message"]
    assert message["content"] == ""
    assert len(message["reasoning_content"]) >= 10
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 10
    assert message["reasoning"] == message["reasoning_content"]
    assert chat(daemon, stream=True) == {"content": "", "reasoning_content": message["reasoning_content"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}}, {"reasoning": {"enabled": False}},
        {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}, {"think": False},
        {"thinking": {"type": "disabled"}}, {"reasoning_budget": 0}, {"thinking_budget": 0},
        {"reasoning_budget_tokens": 0}, {"thinking_budget_tokens": 0}, {"thinking_token_budget": 0},
        {"reasoning": {"max_tokens": 0}},
    ],
)  # fmt: skip
def test_thinking_turned_off(daemon: Daemon, fields: dict[str, Any]) -> None:
    answer = chat(daemon, **fields)
    message = answer["choices"][0]["message"]
    assert message["content"]
    assert not {"reasoning_content", "reasoning"} & set(message)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    if {"reasoning_effort", "reasoning", "thinking_token_budget"} & set(fields):
        response = respond(daemon, **fields).json()
        assert [item["type"] for item in response["output"]] == ["message"]


def test_a_budget_that_nothing_holds_a_model_to_is_named(daemon: Daemon) -> None:
    body = {"model": "thinker", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12} | LIMITS
    names = ("reasoning_budget", "thinking_budget", "reasoning_budget_tokens", "thinking_budget_tokens")
    for field in (*names, "thinking_token_budget", "reasoning.max_tokens", "thinking.budget_tokens"):
        outer, _, inner = field.partition(".")
        two, none, no_limit = ({outer: {inner: tokens} if inner else tokens} for tokens in (2, 0, -1))
        answer = daemon.post("/v1/chat/completions", body | two)
        assert answer.headers["x-localrun-ignored"].startswith(f"{field}: ")
        assert answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 10
        for without in (no_limit, none, two | {"model": "tiny"}):
            answer = daemon.post("/v1/chat/completions", body | without)
            assert "x-localrun-ignored" not in answer.headers
        if field in ("thinking_token_budget", "reasoning.max_tokens"):
            assert respond(daemon, **two).headers["x-localrun-ignored"].startswith(f"{field}: ")
    fields = {"thinking": {"type": "enabled", "budget_tokens": 2}}
    assert (
        daemon.post("/v1/messages", body | fields).headers["x-localrun-ignored"].startswith("thinking.budget_tokens: ")
    )


def test_a_model_that_can_think_does_unless_it_is_told_not_to(daemon: Daemon) -> None:
    """As with Ollama and llama-server, whatever its template does for those who say nothing."""
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 12}),
    ):
        usage = daemon.post(path, {"model": "hybrid"} | LIMITS | body).json()["usage"]
        details = usage.get("completion_tokens_details") or usage["output_tokens_details"]
        assert details["reasoning_tokens"] >= 10
    asked: dict[str, Any] = {"model": "hybrid", "messages": [{"role": "user", "content": "hello"}]}
    assert daemon.post("/apply-template", asked).json()["prompt"].endswith("[assistant]<think>\n")
    without = daemon.post("/apply-template", asked | {"reasoning_effort": "none"}).json()["prompt"]
    assert without.endswith("<think>\n\n</think>\n\n")
    assert "reasoning" not in chat(daemon, model="hybrid", reasoning_effort="none")["choices"][0]["message"]


def test_an_effort_is_accepted(daemon: Daemon) -> None:
    assert chat(daemon, reasoning_effort="low")["choices"][0]["message"]["reasoning_content"]


def test_thinking_of_an_earlier_turn_goes_back_to_the_template(daemon: Daemon) -> None:
    def n_prompt(**extra: str) -> int:
        said = {"role": "assistant", "content": "yes"} | extra
        messages = [{"role": "user", "content": "a"}, said, {"role": "user", "content": "b"}]
        return int(chat(daemon, messages=messages)["usage"]["prompt_tokens"])

    assert n_prompt(reasoning_content="because") >= n_prompt() + len("because")


@pytest.mark.parametrize(
    ("reasoning", "place", "kind"),
    [({}, "content", "reasoning_text"), ({"summary": "auto"}, "summary", "summary_text")],
)
def test_reasoning_items(daemon: Daemon, reasoning: dict[str, str], place: str, kind: str) -> None:
    answer = respond(daemon, reasoning=reasoning)
    msgspec.json.decode(answer.content, type=Response)
    (item,) = answer.json()["output"]
    ((part),) = item[place]
    assert (item["type"], part["type"]) == ("reasoning", kind)
    assert answer.json()["usage"]["output_tokens_details"]["reasoning_tokens"] >= 10
    blocks = respond(daemon, reasoning=reasoning, stream=True).text.split("\n\n")[:-1]
    events = [json.loads(block.partition("data: ")[2]) for block in blocks]
    msgspec.convert(events, list[Event])
    assert "".join(event["delta"] for event in events if "delta" in event) == part["text"]
    assert any(event["type"].startswith("response.reasoning_summary") for event in events) == bool(reasoning)


def test_reasoning_items_can_be_sent_back(daemon: Daemon) -> None:
    first = respond(daemon).json()
    whole = [{"role": "user", "content": "hello"}, *first["output"], {"role": "user", "content": "b"}]
    again = respond(daemon, input=whole)
    after = respond(daemon, previous_response_id=first["id"], input="b")
    assert again.status_code == after.status_code == 200
    assert again.json()["usage"]["input_tokens"] == after.json()["usage"]["input_tokens"]
