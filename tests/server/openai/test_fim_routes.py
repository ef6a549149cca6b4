"""Filling in the middle by all three routes, with a model whose file names FIM tokens and fake engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from tests.daemon import N_CTX, Daemon, running_daemon
from tests.models.handmade import ENTRIES, STRING, array, file_bytes, text, u32
from tests.server.openai import shapes

FIM_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
# The fake engine has no such tokens: to it they are the text that spells them.
SPELT = "<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>"
LIMITS: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def write_model(path: Path) -> None:
    tokens = ("a", "<s>", *FIM_TOKENS)
    vocabulary = (
        array("tokenizer.ggml.tokens", STRING, len(tokens), b"".join(map(text, tokens))),
        array("tokenizer.ggml.token_type", 5, len(tokens), u32(1) + u32(3) * (len(tokens) - 1)),
    )
    path.write_bytes(file_bytes((*ENTRIES[:-2], *vocabulary)))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "code.gguf")
    with running_daemon(LOCALRUN_MODELS=str(folder)) as running:
        yield running


def post(daemon: Daemon, path: str, **fields: Any) -> httpx2.Response:
    return daemon.post(path, {"model": "code"} | LIMITS | fields)


@pytest.fixture(scope="module")
def expected(daemon: Daemon) -> str:
    """What stands in the middle."""
    answer = post(daemon, "/v1/completions", prompt=SPELT, max_tokens=12)
    return str(answer.json()["choices"][0]["text"])


def test_a_suffix_of_a_completion(daemon: Daemon, expected: str) -> None:
    answer = post(daemon, "/v1/completions", prompt="def f(", suffix="return x", max_tokens=12)
    assert answer.json()["choices"][0]["text"] == expected
    assert answer.json()["usage"]["prompt_tokens"] == len(SPELT)


def test_mistral_s_route(daemon: Daemon, expected: str) -> None:
    fields = {"prompt": "def f(", "suffix": "return x", "max_tokens": 12}
    answer = post(daemon, "/v1/fim/completions", **fields)
    msgspec.json.decode(answer.content, type=shapes.Chat)
    assert answer.json()["choices"][0]["message"]["content"] == expected
    *data, done, _ = post(daemon, "/v1/fim/completions", stream=True, **fields).text.split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(item.removeprefix("data: ")) for item in data]
    msgspec.convert(chunks, list[shapes.ChatChunk])
    assert all(len(chunk["choices"]) == 1 for chunk in chunks), "editors read the first choice of every chunk"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected


def test_mistral_s_seed(daemon: Daemon) -> None:
    def text_of(seed: int) -> str:
        fields = {"prompt": "x", "random_seed": seed, "temperature": 1, "max_tokens": 12}
        answer = post(daemon, "/v1/fim/completions", **fields)
        return str(answer.json()["choices"][0]["message"]["content"])

    assert text_of(1) == text_of(1) != text_of(2)


@pytest.mark.parametrize("before", [{"input_prefix": "def f("}, {"input_prefix": "def ", "prompt": "f("}])
def test_llama_server_s_route(daemon: Daemon, expected: str, before: dict[str, str]) -> None:
    fields = before | {"input_suffix": "return x", "n_predict": 12}
    whole = post(daemon, "/infill", **fields).json()
    assert (whole["content"], whole["stop"], whole["stop_type"]) == (expected, True, "limit")
    assert (whole["tokens_predicted"], whole["tokens_evaluated"]) == (12, len(SPELT))
    *data, rest = post(daemon, "/infill", stream=True, **fields).text.split("\n\n")
    assert rest == ""
    chunks = [json.loads(item.removeprefix("data: ")) for item in data]
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert "".join(chunk["content"] for chunk in chunks) == expected


def test_only_the_fields_that_are_asked_for(daemon: Daemon) -> None:
    answer = post(
        daemon, "/infill", input_prefix="x", n_predict=3, response_fields=["content", "timings/predicted_n", "no/such"]
    )
    assert answer.json().keys() == {"content", "timings/predicted_n"}
    assert answer.json()["timings/predicted_n"] == 3


def test_other_files_and_stop_strings(daemon: Daemon) -> None:
    extra = [{"filename": "a.py", "text": "import os"}]
    answer = post(daemon, "/infill", input_prefix="x", input_extra=extra, n_predict=40).json()
    plain = post(daemon, "/infill", input_prefix="x", n_predict=40).json()
    assert answer["tokens_evaluated"] > plain["tokens_evaluated"] + len("import os")
    stopped = post(daemon, "/infill", input_prefix="x", n_predict=40, stop=[plain["content"][5:8]]).json()
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", plain["content"][5:8])


def test_warming_the_cache_up(daemon: Daemon) -> None:
    prefix = "warm " * 20
    warmed = post(daemon, "/infill", input_prefix=prefix, n_predict=0).json()
    assert (warmed["content"], warmed["tokens_predicted"]) == ("", 0)
    assert post(daemon, "/infill", input_prefix=prefix, n_predict=1).json()["tokens_cached"] >= len(prefix)


def test_the_loaded_model_when_none_is_named(daemon: Daemon) -> None:
    body = {"input_prefix": "x", "n_predict": 1}
    post(daemon, "/infill", **body)
    assert daemon.post("/infill", body).json()["model"] == "code"
    post(daemon, "/v1/completions", prompt="x", max_tokens=1, keep_alive=0)
    assert daemon.post("/infill", body).json()["model"] == "code"


def test_a_model_that_cannot(daemon: Daemon) -> None:
    answer = post(daemon, "/infill", model="tiny", input_prefix="x")
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "model")


def test_a_prompt_that_is_too_long(daemon: Daemon) -> None:
    answer = post(daemon, "/infill", input_prefix="x" * 5000)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["field"]) == (400, 400, "input_prefix")
    assert error["type"] == "exceed_context_size_error"
    assert answer.headers["x-localrun-error"] == "context_length_exceeded"
    assert str(N_CTX) in error["message"]
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (5000 + len("".join(FIM_TOKENS)), N_CTX)


def test_an_infill_tells_what_a_completion_tells(daemon: Daemon) -> None:
    answer = post(daemon, "/infill", input_prefix="def f(", input_suffix="return x", n_predict=12, n_probs=2).json()
    other = post(daemon, "/completion", prompt=SPELT, n_predict=12, n_probs=2).json()
    assert answer.keys() == other.keys()
    for name in ("content", "prompt", "tokens_cached", "tokens_evaluated", "stop_type", "generation_settings"):
        assert answer[name] == other[name], name
    assert len(answer["completion_probabilities"]) == 12
