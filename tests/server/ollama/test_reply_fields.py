"""What /api/chat and /api/generate make of tools, thinking, formats, suffixes and templates, with fake engines:
whatever such an engine writes, what is constrained is well formed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.daemon import N_CTX, Daemon, running_daemon
from tests.server.openai.test_fim_routes import SPELT, write_model

HELLO = [{"role": "user", "content": "is it warm in Paris?"}]
# Every value is short, so that an answer that is made of random tokens ends.
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
}
THINKER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.thinking %}({{ m.thinking }}){% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if reasoning_effort is defined %}({{ reasoning_effort }}){% endif %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)
OPTIONS: dict[str, Any] = {"temperature": 0, "num_predict": 400}
FEW: dict[str, Any] = {"temperature": 0, "num_predict": 6}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Weather.", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "code.gguf")
    with running_daemon(LOCALRUN_MODELS=str(folder)) as running:
        for name, fields in (("thinker", {"template": THINKER}), ("brief", {"parameters": {"num_predict": 3}})):
            made = running.post("/api/create", {"model": name, "from": "tiny", "stream": False} | fields)
            assert made.json() == {"status": "success"}
        yield running


def whole(daemon: Daemon, path: str, **fields: Any) -> dict[str, Any]:
    answer = daemon.post(path, {"model": "tiny", "stream": False, "options": OPTIONS} | fields)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def streamed(daemon: Daemon, path: str, **fields: Any) -> list[dict[str, Any]]:
    answer = daemon.post(path, {"model": "tiny", "options": OPTIONS} | fields)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def refused(daemon: Daemon, path: str, **fields: Any) -> str:
    answer: httpx2.Response = daemon.post(path, {"model": "tiny", "stream": False} | fields)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"])


# --- tools -----------------------------------------------------------------------------------------------------------


def check_arguments(arguments: Any) -> None:
    assert set(arguments) == {"city", "warm"}
    assert arguments["city"] in ("Paris", "London")


def test_calls_have_their_arguments_as_objects(daemon: Daemon) -> None:
    fields: dict[str, Any] = {
        "messages": HELLO, "tools": [tool("look"), tool("guess")], "tool_choice": {"function": {"name": "guess"}},
    }  # fmt: skip
    message = whole(daemon, "/api/chat", **fields)["message"]
    (call,) = message["tool_calls"]
    assert (message["role"], message["content"]) == ("assistant", "")
    assert (call["function"]["name"], call["function"]["index"]) == ("guess", 0)
    assert call["id"]
    check_arguments(call["function"]["arguments"])
    *parts, last = streamed(daemon, "/api/chat", **fields)
    assert all(part["message"]["role"] == "assistant" for part in [*parts, last])
    (streamed_call,) = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert streamed_call["function"] == call["function"]
    assert (last["done"], last["done_reason"], "tool_calls" in last["message"]) == (True, "stop", False)


def test_several_calls_are_counted(daemon: Daemon) -> None:
    for seed in range(1, 40):
        fields: dict[str, Any] = {"options": {"seed": seed, "temperature": 1, "num_predict": 600}}
        message = whole(
            daemon, "/api/chat", messages=HELLO, tools=[tool("look")], tool_choice="required", **fields
        )["message"]  # fmt: skip
        calls = message.get("tool_calls", [])
        assert [call["function"]["index"] for call in calls] == list(range(len(calls)))
        if len(calls) > 1:
            return
    pytest.fail("no seed made two calls")


def test_tools_and_results_are_part_of_the_prompt(daemon: Daemon) -> None:
    def count(**fields: Any) -> int:
        return int(whole(daemon, "/api/chat", options=FEW, **({"messages": HELLO} | fields))["prompt_eval_count"])

    assert count(tools=[tool("look")]) > count() + len("look")
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"city": "Paris"}}}]}
    result = {"role": "tool", "tool_name": "look", "content": "22 degrees"}
    assert count(messages=[*HELLO, call, result]) > count() + len('{"city": "Paris"}') + len("22 degrees")


def test_a_call_that_its_limit_cut_off_is_not_there(daemon: Daemon) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "tools": [tool("look")], "tool_choice": "required"}
    n_whole = whole(daemon, "/api/chat", **fields)["eval_count"]
    assert n_whole > 20
    for path_answer in (
        whole(daemon, "/api/chat", options=OPTIONS | {"num_predict": 20}, **fields),
        streamed(daemon, "/api/chat", options=OPTIONS | {"num_predict": 20}, **fields)[-1],
    ):
        assert path_answer["done_reason"] == "length"
        assert "tool_calls" not in path_answer["message"]


# --- thinking --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("think", [True, None, "high"])
def test_thinking_comes_apart_from_the_content(daemon: Daemon, think: Any) -> None:
    fields = {"model": "thinker", "think": think, "options": FEW}
    message = whole(daemon, "/api/chat", messages=HELLO, **fields)["message"]
    assert message["content"] == ""
    assert message["thinking"]
    *parts, last = streamed(daemon, "/api/chat", messages=HELLO, **fields)
    assert "".join(part["message"].get("thinking", "") for part in parts) == message["thinking"]
    assert all(part["message"] == {"role": "assistant", "content": ""} | part["message"] for part in [*parts, last])
    generated = whole(daemon, "/api/generate", prompt=HELLO[0]["content"], **fields)
    assert (generated["response"], generated["thinking"]) == ("", message["thinking"])
    pieces = streamed(daemon, "/api/generate", prompt=HELLO[0]["content"], **fields)
    assert "".join(piece.get("thinking", "") for piece in pieces) == message["thinking"]


def test_no_thinking_where_none_is_wanted(daemon: Daemon) -> None:
    message = whole(daemon, "/api/chat", model="thinker", messages=HELLO, think=False, options=FEW)["message"]
    assert "thinking" not in message
    assert message["content"]


def test_a_level_of_thinking_reaches_the_template(daemon: Daemon) -> None:
    def prompt(think: Any) -> str:
        body = {"model": "thinker", "messages": HELLO, "think": think, "_debug_render_only": True}
        return str(whole(daemon, "/api/chat", **body)["_debug_info"]["rendered_template"])

    assert prompt("low").endswith("(low)<|im_start|>assistant\n<think>\n")
    assert prompt("max").endswith("(high)<|im_start|>assistant\n<think>\n")
    assert prompt(None).endswith("<think>\n")
    assert "</think>" in prompt(False)


def test_a_model_that_does_not_think_says_so(daemon: Daemon) -> None:
    assert "does not support thinking" in refused(daemon, "/api/chat", messages=HELLO, think=True)
    assert "does not support thinking" in refused(daemon, "/api/generate", prompt="x", think="low")
    assert whole(daemon, "/api/chat", messages=HELLO, think=False, options=FEW)["eval_count"]


def test_earlier_thinking_is_given_to_the_template(daemon: Daemon) -> None:
    said = [*HELLO, {"role": "assistant", "thinking": "hmmm", "content": "yes"}, *HELLO]
    shown = whole(daemon, "/api/chat", model="thinker", messages=said, _debug_render_only=True)
    assert "(hmmm)yes" in shown["_debug_info"]["rendered_template"]


# --- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_schema_holds_the_answer(daemon: Daemon, path: str) -> None:
    asked: dict[str, Any] = {"messages": HELLO} if path == "/api/chat" else {"prompt": "is it warm?"}
    answer = whole(daemon, path, format=SCHEMA, **asked)
    check_arguments(json.loads(answer["message"]["content"] if path == "/api/chat" else answer["response"]))
    assert answer["done_reason"] == "stop"
    for fields in ({"raw": True}, {}):
        if path == "/api/generate":
            check_arguments(json.loads(whole(daemon, path, format=SCHEMA, **asked, **fields)["response"]))


def test_json_begins_an_object(daemon: Daemon) -> None:
    for seed in range(1, 5):
        options = {"seed": seed, "temperature": 1, "num_predict": 60}
        text = whole(daemon, "/api/chat", messages=HELLO, format="json", options=options)["message"]["content"]
        assert text.lstrip().startswith("{")


def test_a_slip_of_a_keyword_is_named(daemon: Daemon) -> None:
    schema = SCHEMA | {"properties": {"city": {"minLenght": 1}}}
    for path in ("/api/chat", "/api/generate"):
        error = refused(daemon, path, messages=HELLO, prompt="x", format=schema)
        assert "'minLenght'" in error
        assert "format.properties.city" in error


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_a_suffix_fills_in_the_middle(daemon: Daemon) -> None:
    fields: dict[str, Any] = {"model": "code", "options": FEW}
    spelt = whole(daemon, "/api/generate", prompt=SPELT, raw=True, **fields)
    filled = whole(daemon, "/api/generate", prompt="def f(", suffix="return x", **fields)
    assert (filled["response"], filled["prompt_eval_count"]) == (spelt["response"], len(SPELT))
    assert "context" not in filled
    no_prefix = whole(daemon, "/api/generate", prompt="", suffix="return x", **fields)
    assert no_prefix["prompt_eval_count"] == len(SPELT) - len("def f(")
    assert "suffix" in refused(daemon, "/api/generate", prompt="x", suffix="y")


def test_a_suffix_of_a_long_file_keeps_what_is_next_to_the_gap(daemon: Daemon) -> None:
    body = {"model": "code", "prompt": "a" * N_CTX + "near", "suffix": "next" + "b" * N_CTX, "stream": False}
    answer = daemon.post("/api/generate", body | {"options": FEW})
    assert int(answer.headers["x-localrun-truncated"]) > N_CTX
    assert N_CTX // 2 < answer.json()["prompt_eval_count"] <= N_CTX - 6
    shown = daemon.post("/api/generate", body | {"_debug_render_only": True}).json()["_debug_info"]
    assert "near<|fim_suffix|>next" in shown["rendered_template"]
    assert daemon.post("/api/generate", body | {"truncate": False}).status_code == 400


def test_editors_see_that_a_model_fills_in(daemon: Daemon) -> None:
    assert ".Suffix" in daemon.post("/api/show", model="code").json()["template"]
    assert ".Suffix" not in daemon.post("/api/show", model="tiny").json()["template"]


def test_a_template_in_place_of_the_model_s(daemon: Daemon) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    answer = whole(daemon, "/api/generate", prompt="hello", system="sys", template=template, options=FEW)
    assert answer["prompt_eval_count"] == len("[sys][hello]")
    go = daemon.post("/api/generate", model="tiny", prompt="hello", template="{{ .Prompt }}", stream=False, options=FEW)
    own = daemon.post("/api/generate", model="tiny", prompt="hello", stream=False, options=FEW)
    assert "template (Go's are not run" in go.headers["x-localrun-ignored"]
    assert go.json()["prompt_eval_count"] == own.json()["prompt_eval_count"]


def test_the_prompt_alone(daemon: Daemon) -> None:
    for path in ("/api/chat", "/api/generate"):
        answer = whole(daemon, path, messages=HELLO, prompt=HELLO[0]["content"], _debug_render_only=True)
        assert answer["_debug_info"]["rendered_template"].endswith(
            "is it warm in Paris?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert answer["done"] is False


def test_the_prompt_begins_with_the_answers_that_it_continues(daemon: Daemon) -> None:
    first = whole(daemon, "/api/generate", prompt="one", options=FEW)
    body = {"prompt": "two", "context": first["context"], "_debug_render_only": True}
    shown = whole(daemon, "/api/generate", **body)["_debug_info"]["rendered_template"]
    assert shown.startswith(f"<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n{first['response']}")
    assert shown.endswith("<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")


def test_an_answer_that_was_begun_goes_on(daemon: Daemon) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Well, it"}]
    shown = whole(daemon, "/api/chat", messages=begun, _debug_render_only=True)["_debug_info"]["rendered_template"]
    assert shown.endswith("<|im_start|>assistant\nWell, it")


def test_images_are_refused_with_the_way_out(daemon: Daemon) -> None:
    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
    picture = [{"role": "user", "content": "what is it?", "images": [png]}]
    for error in (
        refused(daemon, "/api/chat", messages=picture),
        refused(daemon, "/api/generate", prompt="x", images=[png]),
    ):
        assert "'tiny' does not support images; send text, or pull a repository with a projector" in error


def test_a_long_agent_s_turn_keeps_its_question(daemon: Daemon) -> None:
    """The last result stays with the call and the question that it answers."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    turn = [{"role": "user", "content": "old " * 300}, {"role": "assistant", "content": "old"}]
    messages = [*turn, *turn, *HELLO, call, {"role": "tool", "tool_name": "look", "content": "22"}]
    shown = whole(daemon, "/api/chat", messages=messages, options=FEW, _debug_render_only=True)["_debug_info"]
    text = shown["rendered_template"]
    assert text.count("old old") < 2 * 300
    assert "is it warm in Paris?" in text
    assert "22" in text


# --- counts, loading, and who we are not -----------------------------------------------------------------------------


def test_counts_are_there_also_when_they_are_zero(daemon: Daemon) -> None:
    for fields in ({"prompt": "hello", "options": {"num_predict": 0}}, {"prompt": ""}, {"prompt": "", "keep_alive": 0}):
        answer = whole(daemon, "/api/generate", **fields)
        assert answer["eval_count"] == 0
        assert isinstance(answer["prompt_eval_cached_count"], int)
        assert answer["total_duration"] >= answer["load_duration"] >= 0


@pytest.mark.parametrize(
    ("keep_alive", "remains_s"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        (90, 90),
        ("90", 90),
        ("", None),
        (None, None),
        (-1, 1e9),
        ("-1s", 1e9),
        (2.5e3, 2500),
    ],
)
def test_spellings_of_keep_alive(daemon: Daemon, keep_alive: Any, remains_s: float | None) -> None:
    whole(daemon, "/api/chat", messages=[], keep_alive=0)
    asked_at_s = time.monotonic()
    whole(daemon, "/api/chat", messages=[], keep_alive=keep_alive)
    engines = daemon.http.get("/localrun/v1/snapshot").json()["engines"]
    (remaining_s,) = [engine["expires_in_s"] for engine in engines if engine["model"] == "tiny"]
    if remains_s == 1e9:
        assert remaining_s is None
    else:
        wanted_s = 300 if remains_s is None else remains_s
        assert wanted_s - (time.monotonic() - asked_at_s) <= remaining_s <= wanted_s
    whole(daemon, "/api/chat", messages=[], keep_alive=0)
    assert "tiny:latest" not in [row["name"] for row in daemon.http.get("/api/ps").json()["models"]]


def test_a_model_s_parameters_are_defaults(daemon: Daemon) -> None:
    ends = {"temperature": 0, "stop": ["no such text"]}
    for path in ("/api/chat", "/api/generate"):
        asked: dict[str, Any] = {"model": "brief", "messages": HELLO, "prompt": "x"}
        assert whole(daemon, path, options=ends, **asked)["eval_count"] <= 3
    assert whole(daemon, "/api/chat", options=ends | {"num_predict": 1}, **asked)["eval_count"] == 1


def test_services_of_others_are_not_here(daemon: Daemon) -> None:
    assert daemon.http.get("/api/status").json()["cloud"]["disabled"] is True
    assert daemon.post("/api/me", {}).status_code == 401
    assert daemon.http.post("/api/signout").status_code == 200
    search = daemon.post("/api/experimental/web_search", query="x")
    assert (search.status_code, search.headers["x-localrun-error"]) == (501, "not_supported")
