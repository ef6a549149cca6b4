"""Requests that name no model, or a hosted one, on every route that a server with one model has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Daemon, running_daemon
from tests.models.synthesize_embedding import synthesize_embedding
from tests.server.openai.test_fim_routes import write_model

MESSAGES = [{"role": "user", "content": "hi"}]
TEXT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/completion": {"prompt": "hi", "n_predict": 2},
    "/tokenize": {"content": "hi"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": MESSAGES},
    "/api/v0/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
}
# Base URLs as people set them.
SPELLINGS = (
    "/v1/chat/completions/", "//v1/chat/completions", "/v1//chat/completions", "/v1/v1/chat/completions",
    "/chat/completions/",
)  # fmt: skip
# Routes of OpenAI's, for base URLs that end before /v1.
SHORT = {path: path.removeprefix("/v1") for path in ("/v1/chat/completions", "/v1/responses", "/v1/embeddings")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "code.gguf")
    synthesize_embedding("tiny-bert", folder / "bert.gguf")
    synthesize_embedding("tiny-bert-reranker", folder / "ranker.gguf")
    return folder


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    with running_daemon(LOCALRUN_MODELS=str(folder)) as running:
        yield running


def answered(daemon: Daemon, path: str, **body: Any) -> Any:
    answer = daemon.post(path, body)
    assert answer.status_code == 200, (path, answer.text)
    return answer.json()


def unload(daemon: Daemon, model: str) -> None:
    assert daemon.post("/api/generate", model=model, keep_alive=0).status_code == 200


def test_the_only_model_answers_on_every_route(daemon: Daemon) -> None:
    for path, body in TEXT.items():
        assert answered(daemon, path, **body).get("model", "code") == "code"
        assert answered(daemon, path, model="", **body).get("model", "code") == "code"
    assert answered(daemon, "/infill", input_prefix="a", input_suffix="b")["model"] == "code"
    assert daemon.http.get("/tokenizer_info").status_code == 200


def test_vectors_and_ranks_are_of_models_that_make_them(daemon: Daemon) -> None:
    answered(daemon, "/v1/chat/completions", **TEXT["/v1/chat/completions"])
    assert answered(daemon, "/v1/embeddings", input="hi")["model"] == "bert"
    ranks = answered(daemon, "/v1/rerank", query="hi", documents=["a", "b"])
    assert ranks["model"] == "ranker"
    assert len(ranks["results"]) == 2


def test_the_one_that_answered_last_also_after_its_sleep(daemon: Daemon) -> None:
    for model in ("code", "tiny"):
        answered(daemon, "/v1/completions", model=model, prompt="hi", max_tokens=1)
    assert answered(daemon, "/v1/completions", prompt="hi", max_tokens=1)["model"] == "tiny"
    # Who fills in has to know how.
    assert answered(daemon, "/infill", input_prefix="a", input_suffix="b")["model"] == "code"
    assert answered(daemon, "/v1/completions", prompt="hi", max_tokens=1)["model"] == "code"
    for model in ("code", "tiny"):
        unload(daemon, model)
    assert answered(daemon, "/v1/completions", prompt="hi", max_tokens=1)["model"] == "code"


@pytest.mark.parametrize("path", SHORT)
def test_openai_s_routes_without_v1(daemon: Daemon, path: str) -> None:
    body = {"input": "hi"} if path == "/v1/embeddings" else TEXT[path]
    long, short = (answered(daemon, each, **body) for each in (path, SHORT[path]))
    assert short["model"] == long["model"]
    assert short["object"] == long["object"]
    wrong = daemon.post(SHORT[path], {"model": "none-such"} | body)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")


def test_hosted_names_and_those_that_are_merely_wrong(daemon: Daemon, folder: Path) -> None:
    body = TEXT["/v1/chat/completions"]
    assert daemon.post("/v1/chat/completions", {"model": "gpt-4o"} | body).status_code == 404
    with running_daemon(LOCALRUN_MODELS=str(folder), LOCALRUN_DEFAULT_MODEL="tiny") as own:
        for name in ("gpt-3.5-turbo", "claude-sonnet-5", "gemini-3-pro", "o3", ""):
            assert answered(own, "/v1/chat/completions", model=name, **body)["model"] == "tiny"
        assert answered(own, "/v1/embeddings", model="text-embedding-3-small", input="hi")["model"] == "bert"
        assert own.post("/v1/chat/completions", {"model": "lama"} | body).status_code == 404
        assert own.post("/api/copy", source="code", destination="gpt-4o").status_code == 200
        assert answered(own, "/v1/chat/completions", model="gpt-4o", **body)["model"] == "gpt-4o"


def test_several_and_none_loaded_says_which(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_model(tmp_path / f"{name}.gguf")
    with running_daemon(LOCALRUN_MODELS=str(tmp_path)) as daemon:
        refused = daemon.post("/v1/chat/completions", TEXT["/v1/chat/completions"])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        for word in ("'one'", "'two'", "default_model"):
            assert word in refused.json()["error"]["message"]
        assert answered(daemon, "/v1/completions", model="two", prompt="hi", max_tokens=1)["model"] == "two"
        unload(daemon, "two")
        assert answered(daemon, "/v1/completions", prompt="hi", max_tokens=1)["model"] == "two"


@pytest.mark.parametrize("path", SPELLINGS)
def test_a_base_url_may_end_in_a_slash_or_in_v1_twice(daemon: Daemon, path: str) -> None:
    assert answered(daemon, path, model="tiny", **TEXT["/v1/chat/completions"])["model"] == "tiny"
    assert daemon.http.get("/v1/models/").json() == daemon.http.get("/v1/models").json()
    assert daemon.http.get("/v1/api/tags").json() == daemon.http.get("/api/tags").json()


@pytest.mark.parametrize(
    ("path", "body", "answering"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, "prompt_tokens"),
        ("/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, "prompt_tokens"),
        ("/v1/responses", {"input": "hi", "instructions": "Be brief.", "max_output_tokens": 1}, "input_tokens"),
    ],
)
def test_a_prompt_is_counted_as_it_is_computed(daemon: Daemon, path: str, body: dict[str, Any], answering: str) -> None:
    counted = answered(daemon, f"{path}/input_tokens", model="tiny", **body)
    n_tokens = answered(daemon, path, model="tiny", **body)["usage"][answering]
    assert counted == {"object": "response.input_tokens", "input_tokens": n_tokens}
