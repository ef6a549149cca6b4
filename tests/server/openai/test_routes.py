"""/v1 on a daemon with fake engines: every route, its errors, and what happens in mid-stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import msgspec
import pytest

from tests.daemon import N_CTX, Daemon, running_daemon
from tests.server.openai import shapes

HELLO = [{"role": "user", "content": "hello"}]
N_HELLO = len("<user\nhello>\n<assistant\n")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        yield running


def chat(daemon: Daemon, **fields: Any) -> httpx2.Response:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "temperature": 0} | fields
    return daemon.post("/v1/chat/completions", body)


def complete(daemon: Daemon, **fields: Any) -> httpx2.Response:
    return daemon.post(
        "/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 6, "temperature": 0} | fields
    )


def events(answer: httpx2.Response) -> list[dict[str, Any]]:
    """A stream's chunks, checked against the strict shapes."""
    assert answer.headers["content-type"] == "text/event-stream"
    *data, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(item.removeprefix("data: ")) for item in data]
    is_chat = chunks[0]["object"] == "chat.completion.chunk"
    msgspec.convert(chunks, list[shapes.ChatChunk] if is_chat else list[shapes.Completion])
    return chunks


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


# --- models ----------------------------------------------------------------------------------------------------------


def test_models(daemon: Daemon) -> None:
    listed = daemon.http.get("/v1/models").json()
    assert listed["object"] == "list"
    msgspec.convert(listed, shapes.Models)
    row = listed["data"][0]
    assert (row["id"], row["object"], row["owned_by"]) == ("tiny", "model", "localrun")
    assert isinstance(row["created"], int)
    assert row["meta"]["n_ctx_train"] == 4096
    assert daemon.http.get("/v1/models/tiny").json() == row
    assert daemon.http.get("/v1/models/localrun/tiny").json()["id"] == "localrun/tiny"
    missing = daemon.http.get("/v1/models/gpt-4")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_all_answers_have_the_fields_of_openai_s_and_no_other(daemon: Daemon) -> None:
    for fields in ({}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"max_completion_tokens": 3}):
        msgspec.json.decode(chat(daemon, **fields).content, type=shapes.Chat)
        events(chat(daemon, stream=True, stream_options={"include_usage": True}, **fields))
    for fields in ({}, {"n": 2}, {"logprobs": 2}, {"echo": True}, {"best_of": 2}):
        msgspec.json.decode(complete(daemon, **fields).content, type=shapes.Completion)
    events(complete(daemon, stream=True, logprobs=1, stream_options={"include_usage": True}))
    msgspec.json.decode(complete(daemon, n=0).content, type=shapes.Error)


# --- chat ------------------------------------------------------------------------------------------------------------


def test_a_whole_chat(daemon: Daemon) -> None:
    answer = chat(daemon, ignore_eos=True)
    assert answer.headers["x-localrun-request"].startswith("req_")
    content = answer.json()
    assert (content["object"], content["model"]) == ("chat.completion", "tiny")
    choice = content["choices"][0]
    assert (choice["index"], choice["message"]["role"], choice["finish_reason"]) == (0, "assistant", "length")
    assert content["usage"] == {
        "prompt_tokens": N_HELLO,
        "completion_tokens": 6,
        "total_tokens": N_HELLO + 6,
        "prompt_tokens_details": content["usage"]["prompt_tokens_details"],
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    again = chat(daemon, ignore_eos=True).json()
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": N_HELLO - 1}
    assert again["choices"] == content["choices"]
    assert (again["timings"]["cache_n"], again["timings"]["prompt_n"], again["timings"]["predicted_n"]) == (
        N_HELLO - 1,
        1,
        6,
    )


def test_a_streamed_chat(daemon: Daemon) -> None:
    answer = chat(daemon, stream=True, ignore_eos=True)
    assert answer.headers["x-localrun-request"].startswith("req_")
    chunks = events(answer)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert text_of(chunks) == chat(daemon, ignore_eos=True).json()["choices"][0]["message"]["content"]
    assert not any("usage" in chunk for chunk in chunks)
    assert chunks[-1]["timings"]["predicted_n"] == 6


def test_usage_in_a_stream_comes_last_and_alone(daemon: Daemon) -> None:
    chunks = events(chat(daemon, stream=True, stream_options={"include_usage": True}))
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == N_HELLO
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_several_choices_run_together_and_differ(daemon: Daemon) -> None:
    fields = {"n": 3, "seed": 5, "temperature": 1, "ignore_eos": True}
    content = chat(daemon, **fields).json()
    texts = [choice["message"]["content"] for choice in content["choices"]]
    assert [choice["index"] for choice in content["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert content["usage"]["prompt_tokens"] == N_HELLO
    assert content["usage"]["completion_tokens"] == 18
    assert "timings" not in content
    answer = chat(daemon, **fields, stream=True)
    assert len(answer.headers["x-localrun-request"].split(", ")) == 3
    chunks = events(answer)
    assert [text_of(chunks, index) for index in range(3)] == texts
    roles = [choice["index"] for chunk in chunks for choice in chunk["choices"] if "role" in choice.get("delta", {})]
    assert sorted(roles) == [0, 1, 2]
    alone = chat(daemon, seed=6, temperature=1, ignore_eos=True).json()
    assert alone["choices"][0]["message"]["content"] == texts[1], "choice k has the seed plus k"


def test_a_seed_repeats_and_another_does_not(daemon: Daemon) -> None:
    def text(seed: int) -> str:
        answer = chat(daemon, seed=seed, temperature=1, max_tokens=20, ignore_eos=True)
        return str(answer.json()["choices"][0]["message"]["content"])

    assert text(1) == text(1) != text(2)


def test_logprobs_of_a_chat(daemon: Daemon) -> None:
    content = chat(daemon, logprobs=True, top_logprobs=3, ignore_eos=True).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 6
    assert len(content[0]["top_logprobs"]) == 3
    chunks = events(chat(daemon, logprobs=True, stream=True, ignore_eos=True))
    entries = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in content]
    assert entries[0]["top_logprobs"] == []
    assert chat(daemon).json()["choices"][0]["logprobs"] is None


def test_stop_and_ignore_eos(daemon: Daemon) -> None:
    text = chat(daemon, max_tokens=60, ignore_eos=True).json()["choices"][0]["message"]["content"]
    for stop in (text[8:11], [*(f"{number}:" for number in range(63)), text[8:11]]):
        choice = chat(daemon, max_tokens=60, ignore_eos=True, stop=stop).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text[: text.index(text[8:11])], "stop")


OBJECT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize(
    "shape",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}},
        {"json_schema": OBJECT},
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_of_a_shape(daemon: Daemon, shape: dict[str, Any], stream: bool) -> None:
    answer = chat(daemon, max_tokens=200, stream=stream, **shape)
    text = text_of(events(answer)) if stream else answer.json()["choices"][0]["message"]["content"]
    parsed = json.loads(text)
    assert isinstance(parsed, dict)
    if "json_object" not in str(shape):
        assert isinstance(parsed["n"], int)


def test_a_grammar_of_llama_cpp(daemon: Daemon) -> None:
    choice = chat(daemon, max_tokens=20, grammar='root ::= "left" | "right"').json()["choices"][0]
    assert (choice["message"]["content"] in ("left", "right"), choice["finish_reason"]) == (True, "stop")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"grammar": 'root ::= ( "a"'}, "grammar"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"not": {}, "type": "null"}, "strict": True},
                }
            },
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_shape_that_cannot_be_is_refused(daemon: Daemon, fields: dict[str, Any], param: str) -> None:
    answer = chat(daemon, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert param.partition(".")[0] in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_only_compiling_shows_to_be_beyond_enforcing_is_said_in_the_header(daemon: Daemon, stream: bool) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "string", "pattern": "^$b"}}, "required": ["n"]}
    shape = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = chat(daemon, stream=stream, response_format=shape)
    assert answer.status_code == 200, answer.text
    assert "properties.n.pattern" in answer.headers["x-localrun-ignored"]
    shape["json_schema"]["strict"] = True  # type: ignore[index]
    refused = chat(daemon, stream=stream, response_format=shape)
    assert (refused.status_code, "properties.n" in refused.text) == (400, True)


def test_eight_at_once_answer_as_each_alone(daemon: Daemon) -> None:
    def ask(name: str) -> str:
        messages = [{"role": "user", "content": f"my name is {name}"}]
        answer = chat(daemon, messages=messages, max_tokens=40, ignore_eos=True)
        return str(answer.json()["choices"][0]["message"]["content"])

    names = ["Ada", "Bo", "Cy", "Dee", "Ed", "Flo", "Gus", "Hal"]
    alone = [ask(name) for name in names]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, names))
    assert together == alone
    assert len(set(alone)) == 8


# --- completions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["hello", ["hello"], list(b"hello"), [list(b"hello")]])
def test_a_prompt_in_every_form(daemon: Daemon, prompt: Any) -> None:
    content = complete(daemon, prompt=prompt, ignore_eos=True).json()
    assert content["object"] == "text_completion"
    assert content["usage"]["prompt_tokens"] == len("hello")
    assert content["choices"][0]["text"] == complete(daemon, ignore_eos=True).json()["choices"][0]["text"]


def test_several_prompts_with_several_answers(daemon: Daemon) -> None:
    fields = {"prompt": ["one", "three"], "n": 2, "seed": 3, "temperature": 1, "ignore_eos": True}
    content = complete(daemon, **fields).json()
    assert [choice["index"] for choice in content["choices"]] == [0, 1, 2, 3]
    assert content["usage"]["prompt_tokens"] == len("one") + len("three")
    assert content["usage"]["completion_tokens"] == 24
    chunks = events(complete(daemon, **fields, stream=True))
    assert [text_of(chunks, index) for index in range(4)] == [choice["text"] for choice in content["choices"]]


def test_a_control_token_in_a_prompt_is_the_token(daemon: Daemon) -> None:
    assert complete(daemon, prompt="<|im_start|>x").json()["usage"]["prompt_tokens"] == 2


def test_echo(daemon: Daemon) -> None:
    plain = complete(daemon).json()["choices"][0]["text"]
    assert complete(daemon, echo=True).json()["choices"][0]["text"] == "hello" + plain
    assert text_of(events(complete(daemon, echo=True, stream=True))) == "hello" + plain


def test_the_best_of_several(daemon: Daemon) -> None:
    fields = {"seed": 3, "temperature": 1, "ignore_eos": True, "prompt": ["one", "two"]}
    content = complete(daemon, **fields, best_of=3, n=2).json()
    assert [choice["index"] for choice in content["choices"]] == [0, 1, 2, 3]
    assert content["usage"]["completion_tokens"] == 36, "what was generated counts, sent or not"
    assert content["usage"]["prompt_tokens"] == len("onetwo")
    candidates = [choice["text"] for choice in complete(daemon, **fields, n=3).json()["choices"]]
    assert {choice["text"] for choice in content["choices"]} <= set(candidates)
    assert all(choice["logprobs"] is None for choice in content["choices"])
    with_logprobs = complete(daemon, **fields, best_of=3, logprobs=1).json()["choices"][0]["logprobs"]
    assert len(with_logprobs["tokens"]) == 6


@pytest.mark.parametrize("fields", [{"json_schema": {"enum": ["yes", "no"]}}, {"grammar": 'root ::= "yes" | "no"'}])
def test_a_completion_of_a_shape(daemon: Daemon, fields: dict[str, Any]) -> None:
    content = complete(daemon, max_tokens=20, **fields).json()["choices"][0]
    assert content["text"].strip('"') in ("yes", "no")
    assert content["finish_reason"] == "stop"


def test_filling_in_needs_a_model_that_can(daemon: Daemon) -> None:
    answer = complete(daemon, suffix="}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
    answer = daemon.post("/v1/fim/completions", {"model": "tiny", "prompt": "def f(", "suffix": "return x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


def test_fields_of_other_servers_that_have_no_effect_are_said(daemon: Daemon) -> None:
    asked = {"min_tokens": 3, "stop_token_ids": [5], "bad_words": [], "include_stop_str_in_output": False}
    assert complete(daemon, **asked).headers["x-localrun-ignored"] == "min_tokens; stop_token_ids"
    assert "x-localrun-ignored" not in complete(daemon, min_tokens=0, stop_token_ids=None).headers


def test_logprobs_of_a_completion(daemon: Daemon) -> None:
    logprobs = complete(daemon, logprobs=2, ignore_eos=True).json()["choices"][0]["logprobs"]
    assert {name: len(values) for name, values in logprobs.items()} == {
        "tokens": 6, "token_logprobs": 6, "top_logprobs": 6, "text_offset": 6,
    }  # fmt: skip
    assert complete(daemon, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"][0] == {}
    assert len(complete(daemon, logprobs=True).json()["choices"][0]["logprobs"]["top_logprobs"][0]) == 1
    assert complete(daemon, logprobs=False).json()["choices"][0]["logprobs"] is None


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_longer_than_the_context_names_both_numbers(daemon: Daemon, stream: bool, n: int) -> None:
    messages = [{"role": "user", "content": "x" * 5000}]
    for answer in (
        chat(daemon, messages=messages, stream=stream, n=n),
        complete(daemon, prompt="x" * 5000, stream=stream, n=n),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "50" in error["message"]
        assert str(N_CTX) in error["message"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] in ("messages", "prompt")
        assert answer.headers["x-localrun-error"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "content", "status", "code"),
    [
        ("/v1/chat/completions", b"", 400, "bad_request"),
        ("/v1/chat/completions", b"{", 400, "bad_request"),
        ("/v1/chat/completions", b'{"model": "tiny"}', 400, "bad_request"),
        ("/v1/chat/completions", b'{"model": "tiny", "messages": []}', 400, "bad_request"),
        ("/v1/chat/completions", b'{"model": "gpt-4", "messages": [{"role": "user"}]}', 404, "model_not_found"),
        ("/v1/completions", b'{"model": "tiny"}', 400, "bad_request"),
        ("/v1/completions", b'{"model": "tiny", "prompt": ""}', 400, "bad_request"),
        ("/v1/completions", b'{"model": "../x", "prompt": "x"}', 400, "bad_request"),
        ("/v1/completions", b'{"model": "tiny", "prompt": [258]}', 400, "bad_request"),
        ("/v1/audio/speech", b"{}", 404, "not_found"),
    ],
)
def test_bad_requests(daemon: Daemon, path: str, content: bytes, status: int, code: str) -> None:
    answer = daemon.http.post(path, content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-localrun-error"] == code


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 10**9}, "n"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": "x"}, "top_p"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias[...]"),
        ({"stream": 1}, "stream"),
    ],
)
def test_bad_fields_are_named(daemon: Daemon, fields: dict[str, Any], param: str) -> None:
    for answer in (chat(daemon, **fields), complete(daemon, **fields)):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert param.partition("[")[0] in answer.json()["error"]["message"]


def test_a_large_max_tokens_is_cut_to_the_context(daemon: Daemon) -> None:
    content = complete(daemon, max_tokens=2**31 - 1, ignore_eos=True).json()
    assert content["usage"]["total_tokens"] <= N_CTX
    assert content["choices"][0]["finish_reason"] == "length"
