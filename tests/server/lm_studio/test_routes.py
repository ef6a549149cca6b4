"""LM Studio's routes: OpenAI's answers with what it adds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.daemon import N_CTX, Daemon, running_daemon

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hi"}],
    "temperature": 0,
    "ignore_eos": True,
}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Hi", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        yield running


def ask(daemon: Daemon, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = daemon.post(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-localrun-request"].startswith(answer.headers["x-request-id"])
    return dict(answer.json())


@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", CHAT), ("completions", TEXT)], ids=["chat", "completions"]
)
def test_an_answer_is_openais_with_more(daemon: Daemon, path: str, body: dict[str, Any]) -> None:
    answer = ask(daemon, f"/api/v0/{path}", body | {"max_tokens": 5})
    plain = ask(daemon, f"/v1/{path}", body | {"max_tokens": 5})
    assert answer["choices"] == plain["choices"]
    assert answer["stats"]["stop_reason"] == "maxPredictedTokensReached"
    assert answer["stats"]["tokens_per_second"] > 0
    assert answer["stats"]["generation_time"] >= 0
    assert answer["model_info"]["context_length"] == N_CTX
    assert answer["model_info"]["format"] == "gguf"
    assert answer["runtime"]["supported_formats"] == ["gguf"]
    response = daemon.post(f"/api/v0/{path}", body | {"max_tokens": 5, "stream": True})
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert [("stats" in chunk, "model_info" in chunk) for chunk in chunks[:-1]] == [(False, False)] * (len(chunks) - 1)
    assert chunks[-1]["stats"]["stop_reason"] == "maxPredictedTokensReached"


def test_its_own_fields(daemon: Daemon) -> None:
    whole = ask(daemon, "/api/v0/completions", TEXT | {"max_tokens": -1, "ttl": 600})
    assert whole["stats"]["stop_reason"] == "contextLengthReached"
    text = whole["choices"][0]["text"]
    stopped = ask(daemon, "/api/v0/completions", TEXT | {"max_tokens": -1, "stop": text[5:8]})
    assert stopped["stats"]["stop_reason"] == "stopStringFound"
    several = ask(daemon, "/api/v0/completions", TEXT | {"max_tokens": 2, "n": 2})
    assert "stats" not in several
    assert several["model_info"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": -2}, "max_tokens"),
        ({"ttl": -1}, "ttl"),
        ({"draft_model": 5}, "draft_model"),
        ({"draft_model": "absent"}, "draft_model"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(daemon: Daemon, fields: dict[str, Any], named: str) -> None:
    answer = daemon.post("/api/v0/completions", TEXT | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)
    assert answer.headers["x-request-id"]


def test_models_and_which_are_loaded() -> None:
    with running_daemon() as daemon:
        (row,) = daemon.http.get("/api/v0/models").json()["data"]
        assert (row["id"], row["type"], row["state"]) == ("tiny", "llm", "not-loaded")
        openais = daemon.http.get("/v1/models").json()["data"][0]
        assert {"loaded_context_length", "max_model_len", "context_length", "n_ctx"}.isdisjoint(
            row | openais | openais["meta"]
        )
        daemon.post("/api/v0/completions", TEXT | {"max_tokens": 1})
        row = daemon.http.get("/api/v0/models/tiny").json()
        assert (row["state"], row["loaded_context_length"]) == ("loaded", N_CTX)
        assert row["max_context_length"] >= N_CTX
        openais = daemon.http.get("/v1/models/tiny").json()
        assert daemon.http.get("/v1/models").json()["data"] == [openais]
        assert (openais["meta"]["n_ctx"], openais["max_model_len"], openais["context_length"]) == (N_CTX,) * 3
        missing = daemon.http.get("/api/v0/models/none/such")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


def test_vectors_are_openais(daemon: Daemon) -> None:
    body = {"model": "tiny", "input": ["A fox", "A hare"]}
    assert ask(daemon, "/api/v0/embeddings", body)["data"] == ask(daemon, "/v1/embeddings", body)["data"]
