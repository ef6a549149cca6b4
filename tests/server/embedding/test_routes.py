"""The embedding and reranking routes over HTTP, on fake engines: a byte is a token, two more stand around a text."""

from __future__ import annotations

import array
import base64
import concurrent.futures
import json
import math
import socket
import time
from typing import Any

import pytest

from tests.daemon import Daemon, running_daemon
from tests.says import says


def norm(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


def openai(daemon: Daemon, **body: Any) -> Any:
    answer = daemon.post("/v1/embeddings", {"model": "bert", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def error(daemon: Daemon, path: str, status: int, **body: Any) -> Any:
    answer = daemon.post(path, {"model": "bert", **body})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def test_openai_s_shape(daemon: Daemon) -> None:
    answer = openai(daemon, input=["one", "three"], user="somebody")
    assert (answer["object"], answer["model"]) == ("list", "bert")
    assert answer["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
    assert [(row["object"], row["index"]) for row in answer["data"]] == [("embedding", 0), ("embedding", 1)]
    assert all(norm(row["embedding"]) == pytest.approx(1, abs=1e-6) for row in answer["data"])


def test_every_form_of_openai_s_input(daemon: Daemon) -> None:
    ids = [256, *b"one", 257]
    forms = ("one", ["one"], ids, [ids], ["one", ids], [ids, "one"])
    # What stands around a text is put there where the input begins or ends with text.
    forms += ([256, "one", 257], ["one", 257], [256, "o", *b"ne", 257], [[256, *b"on", "e"], "one"])
    vectors = [row["embedding"] for form in forms for row in openai(daemon, input=form)["data"]]
    assert len(vectors) == 13
    assert all(vector == pytest.approx(vectors[0], abs=1e-6) for vector in vectors)
    both = openai(daemon, input=[ids, [*b"x"]])
    assert both["data"][0]["embedding"] == pytest.approx(vectors[0], abs=1e-6)
    assert both["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        [],
        ["a", ""],
        [[]],
        [1, [5]],
        [["a", "b"]],
        [1, {"prompt_string": "a"}],
        [1, "a", 999],
        [-1],
        None,
        {"text": "a"},
    ],
)
def test_openai_s_input_is_checked(daemon: Daemon, wrong: object) -> None:
    assert str(error(daemon, "/v1/embeddings", 400, input=wrong)["param"]).startswith("input")


def test_the_number_of_inputs_is_bounded(daemon: Daemon) -> None:
    assert "2048" in error(daemon, "/v1/embeddings", 400, input=["x"] * 2049)["message"]
    assert "2048" in error(daemon, "/api/embed", 400, input=["x"] * 2049)
    assert len(openai(daemon, input=["x"] * 2048)["data"]) == 2048


def test_base64_is_the_same_numbers(daemon: Daemon) -> None:
    floats = openai(daemon, input="text", encoding_format="float")["data"][0]["embedding"]
    packed = openai(daemon, input="text", encoding_format="base64")["data"][0]["embedding"]
    assert array.array("f", base64.b64decode(packed)).tolist() == pytest.approx(floats, abs=1e-7)
    assert "encoding_format" in error(daemon, "/v1/embeddings", 400, input="text", encoding_format="int8")["param"]


def test_the_encoding_is_read_in_any_case(daemon: Daemon) -> None:
    listed = openai(daemon, input="a")["data"]
    assert openai(daemon, input="a", encoding_format="")["data"] == listed
    assert openai(daemon, input="a", encoding_format="Float")["data"] == listed
    assert isinstance(openai(daemon, input="a", encoding_format="BASE64")["data"][0]["embedding"], str)
    assert error(daemon, "/v1/embeddings", 400, input="a", encoding_format="int8")["param"] == "encoding_format"


def test_llama_server_s_own_route(daemon: Daemon) -> None:
    rows = daemon.post("/embedding", model="bert", content=["a", "b"]).json()
    vectors = [row["embedding"] for row in openai(daemon, input=["a", "b"])["data"]]
    assert rows == [{"index": 0, "embedding": [vectors[0]]}, {"index": 1, "embedding": [vectors[1]]}]


def test_dimensions_are_the_first_ones_normalised_again(daemon: Daemon) -> None:
    whole = openai(daemon, input="text")["data"][0]["embedding"]
    cut = openai(daemon, input="text", dimensions=3)["data"][0]["embedding"]
    assert cut == pytest.approx([value / norm(whole[:3]) for value in whole[:3]], abs=1e-6)
    for path in ("/v1/embeddings", "/api/embed"):
        assert "have 8 numbers" in str(error(daemon, path, 400, input="text", dimensions=9))
    assert error(daemon, "/v1/embeddings", 400, input="text", dimensions=0)["param"] == "dimensions"


def test_too_long_is_an_error_for_openai_unless_it_may_be_cut(daemon: Daemon) -> None:
    refused = error(daemon, "/v1/embeddings", 400, input=["short", "x" * 200])
    assert refused["code"] == "context_length_exceeded"
    assert says(refused["message"], "input[1]", 202, 128)
    answer = daemon.post("/v1/embeddings", model="bert", input=["short", "x" * 200], truncate=True)
    assert answer.headers["x-localrun-truncated"] == "74"
    assert answer.json()["usage"]["prompt_tokens"] == 7 + 128


def test_too_long_is_cut_for_ollama_unless_it_may_not(daemon: Daemon) -> None:
    answer = daemon.post("/api/embed", model="bert", input="x" * 200)
    assert answer.headers["x-localrun-truncated"] == "74"
    assert answer.json()["prompt_eval_count"] == 128
    same = daemon.post("/api/embed", model="bert", input="x" * 126)
    assert "x-localrun-truncated" not in same.headers
    assert same.json()["embeddings"] == answer.json()["embeddings"]
    assert "reads 128" in error(daemon, "/api/embed", 400, input="x" * 200, truncate=False)
    assert daemon.post("/api/embeddings", model="bert", prompt="x" * 200).status_code == 200


def test_ollama_s_shapes(daemon: Daemon) -> None:
    answer = daemon.post("/api/embed", model="bert", input=["a", "b"], options={"num_ctx": 64}, keep_alive="5m").json()
    assert set(answer) == {"model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"}
    assert len(answer["embeddings"]) == 2
    legacy = daemon.post("/api/embeddings", model="bert", prompt="a").json()
    assert legacy == {"embedding": pytest.approx(answer["embeddings"][0], abs=1e-6)}


def test_ollama_loads_the_model_when_there_is_nothing_to_embed(daemon: Daemon) -> None:
    for nothing in ({}, {"input": ""}, {"input": []}, {"input": None}):
        assert daemon.post("/api/embed", {"model": "bert", **nothing}).json()["embeddings"] == []
    assert daemon.post("/api/embeddings", model="bert").json() == {"embedding": []}
    assert "bert:latest" in {row["name"] for row in daemon.http.get("/api/ps").json()["models"]}


@pytest.mark.parametrize("model", ["bert", "ranker", "chat"])
def test_every_model_says_its_tokens(daemon: Daemon, model: str) -> None:
    text = list(b"two w\xc3\xb6rds")
    assert daemon.post("/tokenize", model=model, content="two wörds").json()["tokens"] == text
    assert daemon.post("/detokenize", model=model, tokens=text).json()["content"] == "two wörds"
    pieces = daemon.post("/tokenize", model=model, content="ab", with_pieces=True).json()["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 98, "piece": "b"}]


def test_what_a_model_puts_around_a_text_are_tokens_where_they_are_asked_for(daemon: Daemon) -> None:
    told = daemon.post("/tokenize", model="bert", content="ab", add_special=True).json()["tokens"]
    assert told == [256, 97, 98, 257]
    vector = daemon.post("/v1/embeddings", model="bert", input=told).json()["data"]
    assert vector == daemon.post("/v1/embeddings", model="bert", input="ab").json()["data"]


def test_reranking_in_tei_s_form(daemon: Daemon) -> None:
    asked: dict[str, Any] = {"model": "ranker", "query": "q"}
    ranked = daemon.post("/v1/rerank", asked | {"documents": ["x", "yy", "z"]}).json()["results"]
    scored = daemon.post("/rerank", asked | {"texts": ["x", "yy", "z"]}).json()
    assert scored == [{"index": row["index"], "score": row["relevance_score"]} for row in ranked]
    best = daemon.post("/rerank", asked | {"texts": ["x", "yy", "z"], "top_n": 1, "return_text": True}).json()
    assert best == [scored[0] | {"text": ["x", "yy", "z"][scored[0]["index"]]}]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/reranking", "/rerank", "/reranking", "/v2/rerank"])
def test_reranking_s_shape(daemon: Daemon, path: str) -> None:
    documents = ["first", {"text": "second"}, "third"]
    answer = daemon.post(path, model="ranker", query="q", documents=documents, return_documents=True).json()
    scores = [row["relevance_score"] for row in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert {row["index"]: row["document"]["text"] for row in answer["results"]} == {
        0: "first", 1: "second", 2: "third",
    }  # fmt: skip
    assert answer["usage"]["total_tokens"] == 5 + 6 + 5 + 3 * 4
    asked = {"model": "ranker", "query": "q", "documents": documents}
    assert len(daemon.post(path, asked | {"top_n": 0}).json()["results"]) == 3
    best = daemon.post(path, asked | {"top_n": 1}).json()
    assert best["results"] == [{key: answer["results"][0][key] for key in ("index", "relevance_score")}]


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("query", {"documents": ["a"]}),
        ("query", {"query": "", "documents": ["a"]}),
        ("documents", {"query": "q"}),
        ("documents", {"query": "q", "documents": []}),
        ("documents", {"query": "q", "documents": ["a"] * 2049}),
        ("documents[1]", {"query": "q", "documents": ["a", 5]}),
        ("top_n", {"query": "q", "documents": ["a"], "top_n": -1}),
    ],
)
def test_reranking_checks_its_body(daemon: Daemon, field: str, body: dict[str, Any]) -> None:
    answer = daemon.post("/v1/rerank", {"model": "ranker", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)


def test_documents_are_cut_unless_they_may_not_be(daemon: Daemon) -> None:
    answer = daemon.post("/v1/rerank", model="ranker", query="q", documents=["x" * 300, "y"])
    assert int(answer.headers["x-localrun-truncated"]) > 0
    refused = error(daemon, "/v1/rerank", 400, model="ranker", query="q", documents=["x" * 300, "y"], truncate=False)
    assert "documents[0] is too large" in refused["message"]
    refused = error(daemon, "/v1/rerank", 400, model="ranker", query="q" * 300, documents=["x"])
    assert "query is too large" in refused["message"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/embeddings", {"model": "ranker", "input": "x"}, "does not support embeddings"),
        ("/v1/rerank", {"model": "bert", "query": "q", "documents": ["x"]}, "does not support reranking"),
        ("/v1/rerank", {"model": "chat", "query": "q", "documents": ["x"]}, "does not support reranking"),
        ("/api/chat", {"model": "bert", "messages": [{"role": "user", "content": "x"}]}, "does not support chat"),
        ("/api/generate", {"model": "ranker", "prompt": "x"}, "does not support chat or generate"),
        ("/v1/completions", {"model": "bert", "prompt": "x"}, "does not support chat or generate"),
    ],
)
def test_a_model_of_another_kind_says_what_it_is_for(
    daemon: Daemon, path: str, body: dict[str, Any], says: str
) -> None:
    answer = daemon.post(path, body)
    assert answer.status_code == 400
    assert says in answer.text
    assert body["model"] in answer.text


def n_engines(daemon: Daemon, model: str) -> int:
    return [row["model"] for row in daemon.http.get("/localrun/v1/snapshot").json()["engines"]].count(model)


def test_a_chat_model_embeds_beside_its_chats(daemon: Daemon) -> None:
    assert daemon.post("/api/generate", model="chat", prompt="x", stream=False, options={"num_predict": 3}).is_success
    assert norm(openai(daemon, model="chat", input="x")["data"][0]["embedding"]) == pytest.approx(1, abs=1e-6)
    assert n_engines(daemon, "chat") == 2
    (row,) = (row for row in daemon.http.get("/api/ps").json()["models"] if row["name"] == "chat:latest")
    engines = daemon.http.get("/localrun/v1/snapshot").json()["engines"]
    assert row["size"] == sum(engine["size_bytes"] for engine in engines if engine["model"] == "chat")


def test_unloading_ends_both_engines_of_a_model(daemon: Daemon) -> None:
    assert daemon.post("/api/generate", model="chat").is_success
    assert daemon.post("/api/embed", model="chat", input="x").is_success
    assert n_engines(daemon, "chat") == 2
    assert daemon.post("/api/generate", model="chat", keep_alive=0).json()["done_reason"] == "unload"
    assert n_engines(daemon, "chat") == 0
    assert daemon.post("/api/embed", model="chat", input="x", keep_alive=0).is_success
    wait_until(lambda: n_engines(daemon, "chat") == 0)


def test_an_unknown_model_is_not_found(daemon: Daemon) -> None:
    assert error(daemon, "/v1/embeddings", 404, model="nowhere", input="x")["code"] == "model_not_found"


def test_lanes_and_deadlines_are_understood(daemon: Daemon) -> None:
    assert "lane" in error(daemon, "/v1/embeddings", 400, input="x", lane="fast")["param"]
    answer = daemon.http.post(
        "/v1/embeddings", json={"model": "bert", "input": "x"}, headers={"X-Localrun-Lane": "batch"}
    )
    assert answer.is_success
    rows = daemon.http.get("/localrun/v1/requests").json()["requests"]
    assert {row["lane"] for row in rows if row["id"] == answer.headers["x-localrun-request"]} == {"batch"}


@pytest.fixture
def slow_daemon(embedding_models: Any) -> Any:
    with running_daemon(LOCALRUN_MODELS=str(embedding_models), LOCALRUN_FAKE_STEP_MS="20") as running:
        yield running


def active(daemon: Daemon) -> list[dict[str, Any]]:
    rows = daemon.http.get("/localrun/v1/requests").json()["requests"]
    return [row for row in rows if row["state"] not in ("done", "failed", "cancelled")]


def wait_until(condition: Any) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen within 30 seconds")


def test_a_client_that_leaves_takes_its_request_along(slow_daemon: Daemon) -> None:
    body = json.dumps({"model": "bert", "input": ["x" * 120] * 2000}).encode()
    with socket.create_connection(("127.0.0.1", slow_daemon.port)) as client:
        head = "POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: any(row["state"] == "prefill" for row in active(slow_daemon)))
    wait_until(lambda: not active(slow_daemon))
    assert openai(slow_daemon, input="x")["data"], "and the engine goes on"


def test_a_cancelled_request_is_answered_as_that_and_others_go_on(slow_daemon: Daemon) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        large = pool.submit(slow_daemon.post, "/v1/embeddings", {"model": "bert", "input": ["x" * 120] * 2000})
        wait_until(lambda: any(row["state"] == "prefill" for row in active(slow_daemon)))
        assert openai(slow_daemon, input="a query")["data"], "one text does not wait for two thousand"
        (row,) = active(slow_daemon)
        assert slow_daemon.http.delete(f"/localrun/v1/requests/{row['id']}").is_success
        assert large.result(timeout=60).status_code == 499
