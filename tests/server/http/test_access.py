"""Keys against a daemon: who gets in, what each may do, what it is told, and what is written of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import msgspec
import ollama
import openai
import pytest

from localrun.access import keys
from localrun.access.books import OwnBooks, UsageFile
from localrun.access.keys import OUTPUT_TOKENS, REQUESTS, TOKENS, Key, KeyFile, Limit
from localrun.config import Settings
from localrun.errors import InvalidKey
from localrun.models import builtin
from localrun.server.http.access import FAILURES, MAX_ADDRESSES, Access, Caller, Right, Throttle
from localrun.server.openapi.operations import OPERATIONS
from localrun.wire import Lane
from tests.daemon import Daemon, running_daemon

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        KeyFile(running.home / "data").create("first")
        until(lambda: running.http.get("/v1/models").status_code == 401)
        yield running


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def new_key(daemon: Daemon, name: str, **rules: Any) -> dict[str, str]:
    """The header of a key that the daemon knows."""
    text = KeyFile(daemon.home / "data").create(name, **rules).text
    headers = {"authorization": f"Bearer {text}"}
    until(lambda: daemon.http.get("/v1/models", headers=headers).status_code == 200)
    return headers


def local(daemon: Daemon) -> dict[str, str]:
    return {"authorization": f"Bearer {keys.local_key(daemon.home / 'state', daemon.port)}"}


def chat(daemon: Daemon, headers: dict[str, str], **changes: Any) -> httpx2.Response:
    return daemon.http.post("/v1/chat/completions", json=CHAT | changes, headers=headers)


def audited(daemon: Daemon) -> list[dict[str, str]]:
    path = daemon.home / "state" / "audit.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_without_keys_nobody_is_asked_for_one() -> None:
    with running_daemon() as daemon:
        assert chat(daemon, {}).status_code == 200
        assert chat(daemon, {"authorization": "Bearer sk-ollama"}).status_code == 200
        assert audited(daemon) == []


def test_what_is_open_to_all(daemon: Daemon) -> None:
    for path in ("/", "/health", "/v1/health"):
        assert daemon.http.get(path).status_code == 200
    for path in ("/v1/models", "/api/tags", "/metrics", "/localrun/v1/snapshot", "/docs", "/nothing"):
        assert daemon.http.get(path).status_code == 401


@pytest.mark.parametrize("header", ["x-api-key", "api-key", "Authorization", "basic"])
def test_the_headers_that_hold_a_key(daemon: Daemon, header: str) -> None:
    text = KeyFile(daemon.home / "data").create(f"header-{header}").text
    value = {
        "Authorization": f"bearer {text}",
        "basic": f"Basic {base64.b64encode(f'me:{text}'.encode()).decode()}",
    }.get(header, text)
    name = "Authorization" if header == "basic" else header
    until(lambda: daemon.http.get("/v1/models", headers={name: value}).status_code == 200)


def test_the_key_counts_where_another_header_has_something_else(daemon: Daemon) -> None:
    text = new_key(daemon, "beside")["authorization"].partition(" ")[2]
    headers = {"authorization": "Bearer sk-anything", "x-api-key": text}
    assert daemon.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "value", ["Basic \u00e4\u00e4", "Basic !!", "Basic bWU6bm90aGluZw==", "Bearer \u00e4", "Bearer", ""]
)
def test_headers_that_hold_none(daemon: Daemon, value: str) -> None:
    headers = {b"authorization": value.encode("latin-1")}
    assert daemon.http.get("/v1/models", headers=headers).status_code in (401, 429)


def test_each_family_says_it_in_its_own_words() -> None:
    with running_daemon() as daemon:
        new_key(daemon, "zed")
        until(lambda: daemon.http.get("/v1/models").status_code == 401)
        say_it_in_their_own_words(daemon, {"authorization": "Bearer wrong"})


def say_it_in_their_own_words(daemon: Daemon, wrong: dict[str, str]) -> None:
    refused = daemon.http.get("/v1/models", headers=wrong)
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert "error" in daemon.http.get("/api/tags", headers=wrong).json()
    assert isinstance(daemon.http.get("/api/tags", headers=wrong).json()["error"], str)
    said = daemon.http.post("/v1/messages", json={}, headers=wrong).json()
    assert (said["type"], said["error"]["type"]) == ("error", "authentication_error")
    for _ in range(FAILURES):
        refused = daemon.http.get("/v1/models", headers=wrong)
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 6
    assert audited(daemon)[-1]["result"] == "is told to wait"


def test_real_clients_know_what_happened(daemon: Daemon) -> None:
    limited = new_key(daemon, "limited", limits=(Limit(REQUESTS, 1, 3600.0),))
    text = limited["authorization"].partition(" ")[2]
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key=text, max_retries=0) as client:
        client.chat.completions.create(**CHAT)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**CHAT)
        assert refused.value.code == "rate_limit_exceeded"
        assert int(refused.value.response.headers["retry-after"]) > 3000
        assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        client.models.list()  # asks no model, and so takes nothing
    with anthropic.Anthropic(base_url=daemon.url, api_key=text, max_retries=0) as client:
        with pytest.raises(anthropic.RateLimitError) as limited_error:
            client.messages.create(**CHAT)
        assert limited_error.value.body["error"]["type"] == "rate_limit_error"
        assert limited_error.value.response.headers["anthropic-ratelimit-requests-remaining"] == "0"
    with ollama.Client(daemon.url, headers=limited) as of_ollama:
        with pytest.raises(ollama.ResponseError, match="1/h") as said:
            of_ollama.chat("tiny", CHAT["messages"])
        assert said.value.status_code == 429
    with (
        anthropic.Anthropic(base_url=daemon.url, api_key="wrong", max_retries=0) as client,
        pytest.raises((anthropic.AuthenticationError, anthropic.RateLimitError)),
    ):
        client.messages.create(**CHAT)


def test_a_clients_own_retry_works(daemon: Daemon) -> None:
    """One request in two seconds: the second is refused, and the SDK sends it again when it was told to."""
    text = new_key(daemon, "retries", limits=(Limit(REQUESTS, 1, 2.0),))["authorization"].partition(" ")[2]
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key=text, max_retries=5) as client:
        assert [client.chat.completions.create(**CHAT).choices[0].finish_reason for _ in range(3)] == ["length"] * 3


def test_tokens_are_taken_as_usage_says_and_those_of_one_prompt_once(daemon: Daemon) -> None:
    headers = new_key(daemon, "tokens", limits=(Limit(TOKENS, 100_000, 86400.0), Limit(OUTPUT_TOKENS, 50_000, 86400.0)))
    answer = chat(daemon, headers, n=3)
    used = answer.json()["usage"]
    assert used["completion_tokens"] == 12
    after = daemon.http.get("/v1/models", headers=headers)
    assert after.headers["x-ratelimit-limit-tokens"] in ("100000", "50000")
    own = daemon.http.get("/localrun/v1/usage", headers=headers).json()
    assert own["rows"] == [
        {"name": "tokens", "requests": 1, "prompt_tokens": used["prompt_tokens"],
         "cached_tokens": own["rows"][0]["cached_tokens"], "output_tokens": 12}
    ]  # fmt: skip
    by_model = daemon.http.get("/localrun/v1/usage?by=model&days=1", headers=headers).json()["rows"]
    assert [row["name"] for row in by_model] == ["tiny"]
    assert daemon.http.get("/localrun/v1/usage?by=x", headers=headers).status_code == 400


def test_a_prompt_that_is_refused_costs_no_tokens(daemon: Daemon) -> None:
    headers = new_key(daemon, "too-long", limits=(Limit(TOKENS, 100_000, 86400.0),))
    too_long = [{"role": "user", "content": "x" * 9000}]
    refused = chat(daemon, headers, messages=too_long)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    left = daemon.http.get("/v1/models", headers=headers).headers
    assert left["x-ratelimit-remaining-tokens"] == "100000"
    [row] = daemon.http.get("/localrun/v1/usage", headers=headers).json()["rows"]
    assert (row["requests"], row["prompt_tokens"]) == (1, 0)


def test_what_a_key_does_not_see(daemon: Daemon) -> None:
    mine, others = new_key(daemon, "mine"), new_key(daemon, "others")
    admin = new_key(daemon, "watcher", admin=True, read_only=True)
    request_id = chat(daemon, mine).headers["x-localrun-request"]
    path = f"/localrun/v1/requests/{request_id}"
    assert daemon.http.get(path, headers=mine).json()["key"] == "mine"
    assert daemon.http.get(path, headers=others).status_code == 404
    assert daemon.http.delete(path, headers=others).status_code == 404
    assert daemon.http.get(path, headers=admin).status_code == 200
    assert daemon.http.delete(path, headers=admin).status_code == 403
    assert daemon.http.delete(path, headers=mine).status_code == 409  # it has ended
    listed = daemon.http.get("/localrun/v1/requests", headers=others).json()["requests"]
    assert request_id not in [row["id"] for row in listed]
    snapshot = daemon.http.get("/localrun/v1/snapshot", headers=others).json()
    assert request_id not in [row["id"] for row in snapshot["requests"]]
    with daemon.http.stream("GET", "/localrun/v1/events", headers=others) as events:
        line = next(line for line in events.iter_lines() if line.startswith("data:"))
    assert request_id not in line
    names = [row["name"] for row in daemon.http.get("/localrun/v1/usage", headers=others).json()["rows"]]
    assert "mine" not in names
    assert "mine" in [row["name"] for row in daemon.http.get("/localrun/v1/usage", headers=admin).json()["rows"]]
    assert daemon.http.get("/localrun/v1/traffic", headers=others).status_code == 403
    for path in ("/metrics", "/localrun/v1/logs?follow=0"):
        assert daemon.http.get(path, headers=others).status_code == 403
        assert daemon.http.get(path, headers=admin).status_code == 200
    assert 'localrun_key_requests_total{key="mine"}' in daemon.http.get("/metrics", headers=local(daemon)).text


def test_models_that_a_key_may_not_use_are_not_there(daemon: Daemon) -> None:
    headers = new_key(daemon, "narrow", models=("qwen*",))
    assert chat(daemon, headers).json()["error"]["code"] == "model_not_found"
    assert daemon.http.get("/v1/models", headers=headers).json()["data"] == []
    assert daemon.http.get("/api/tags", headers=headers).json()["models"] == []
    assert daemon.http.get("/api/ps", headers=headers).json()["models"] == []
    assert daemon.http.get("/v1/models/tiny", headers=headers).status_code == 404
    assert daemon.http.post("/api/show", json={"model": "tiny"}, headers=headers).status_code == 404
    assert daemon.http.get("/localrun/v1/fit?model=tiny", headers=headers).status_code == 404
    assert daemon.http.request("DELETE", "/api/delete", json={"model": "tiny"}, headers=headers).status_code == 404
    copied = daemon.http.post("/api/copy", json={"source": "tiny", "destination": "qwen"}, headers=headers)
    assert copied.status_code == 404


def test_files_of_this_machine_are_for_admins(daemon: Daemon, small_model: Path) -> None:
    path = str(small_model)
    headers, admin = new_key(daemon, "pathless"), new_key(daemon, "pathful", admin=True)
    assert chat(daemon, headers, model=path).status_code == 404
    assert chat(daemon, headers, draft=path).status_code == 404
    assert chat(daemon, headers, lora=[{"id": path}]).status_code == 404
    made = daemon.http.post("/api/create", json={"model": "new", "from": path, "stream": False}, headers=headers)
    assert made.status_code == 404
    assert chat(daemon, admin, model=path).status_code == 200


def test_routes_that_need_no_name_take_a_model_that_the_key_may_use() -> None:
    with running_daemon() as daemon:
        narrow, admin = new_key(daemon, "narrow", models=("tiny",)), new_key(daemon, "admin", admin=True)
        copied = daemon.http.post("/api/copy", json={"source": "tiny", "destination": "secret"}, headers=admin)
        assert copied.status_code == 200
        assert chat(daemon, admin, model="secret").status_code == 200
        bodies: list[tuple[str, Any]] = [
            ("/completion", {"prompt": "a", "n_predict": 1}), ("/tokenize", {"content": "a"}),
            ("/detokenize", {"tokens": [1]}), ("/apply-template", {"messages": CHAT["messages"]}),
            ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ]  # fmt: skip
        for path, body in bodies:
            answer = daemon.http.post(path, json=body, headers=narrow)
            assert answer.status_code == (400 if path == "/infill" else 200)
            assert "secret" not in answer.text
        assert "secret" not in daemon.http.get("/tokenizer_info", headers=narrow).text
        unloaded = daemon.http.post("/api/generate", json={"model": "secret", "keep_alive": 0}, headers=admin)
        assert unloaded.status_code == 200
        assert chat(daemon, narrow).status_code == 200
        for path, body in bodies[:4]:
            assert daemon.http.post(path, json=body, headers=narrow).status_code == 200


def test_a_draft_model_that_the_key_may_not_use_is_not_there(daemon: Daemon) -> None:
    headers = new_key(daemon, "drafts", models=("tiny",))
    admin = new_key(daemon, "drafts-admin", admin=True)
    body = {"source": "tiny", "destination": "hidden"}
    assert daemon.http.post("/api/copy", json=body, headers=admin).status_code == 200
    refused = []
    for name in ("hidden", "absent", "/etc/passwd"):
        answer = chat(daemon, headers, draft=name)
        refused.append((answer.status_code, answer.text.replace(name, "it")))
        of_studio = daemon.http.post("/api/v0/chat/completions", json=CHAT | {"draft_model": name}, headers=headers)
        assert of_studio.status_code == 404
        assert daemon.http.get(f"/localrun/v1/fit?model=tiny&draft={name}", headers=headers).status_code == 404
    assert len(set(refused)) == 1
    assert refused[0][0] == 404


@pytest.mark.parametrize(
    ("name", "is_file"),
    [
        *((name, True) for name in ("/m/x.gguf", "x.gguf", "m/x.gguf", "~/x.gguf", "C:\\x.gguf", "tiny+/m/x.gguf")),
        *((name, False) for name in ("tiny", "tiny+style", "owner/repo:x.gguf", "hf.co/owner/repo:Q4_0")),
    ],
)
def test_names_that_are_files_of_this_machine(name: str, is_file: bool) -> None:
    key = Key(id="a", name="a", salt=b"", hash=b"", check=b"", created_at_s=0.0)
    assert Caller(key).may_use_model(name) is not is_file
    assert Caller(msgspec.structs.replace(key, admin=True)).may_use_model(name)


@pytest.mark.parametrize(
    ("pattern", "name", "is_allowed"),
    [
        ("qwen3*", "Qwen3:0.6b+qwen3-style=0.5", True),
        ("qwen3*", "Qwen3:0.6b+style=0.5", False),
        ("qwen3*", "qwen3+qwen3-terse=-1+style", False),
        ("qwen3*", "qwen3+owner/style:file.gguf", False),
        ("owner/*", "owner/repo+owner/style:file.gguf", True),
        ("qwen3*", "qwen3+style=much", True),  # is a wrong name, and said to be one
        ("tiny", "qwen3+style=much", False),
        ("/m/*", "/m/a+b.gguf", True),
    ],
)
def test_patterns_are_for_all_that_a_name_asks_for(pattern: str, name: str, is_allowed: bool) -> None:
    key = Key(id="a", name="a", salt=b"", hash=b"", check=b"", created_at_s=0.0, models=(pattern,), admin=True)
    assert Caller(key).may_use_model(name) is is_allowed


def test_a_digest_is_no_way_around_a_pattern(daemon: Daemon) -> None:
    admin, narrow = local(daemon), new_key(daemon, "sender", models=("fox*",))
    content = builtin.model_path().read_bytes()
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    octets = {"content-type": "application/octet-stream"}

    def send(body: bytes) -> int:
        return daemon.http.post(f"/api/blobs/{digest}", content=body, headers=narrow | octets).status_code

    def create(named: str) -> bool:
        body = {"model": "fox", "files": {"m.gguf": named}}
        return '"success"' in daemon.http.post("/api/create", json=body, headers=narrow).text

    daemon.http.post(f"/api/blobs/{digest}", content=content, headers=admin | octets).raise_for_status()
    daemon.http.post("/api/create", json={"model": "secret", "files": {"m.gguf": digest}}, headers=admin)
    assert daemon.http.head(f"/api/blobs/{digest}", headers=admin).status_code == 200
    assert daemon.http.head(f"/api/blobs/{digest}", headers=narrow).status_code == 404
    assert not any(map(create, (digest, digest.replace(":", "-"), f"@{digest}", digest.upper())))
    assert send(b"another") == 400
    assert not create(digest)
    assert send(content) == 201
    assert daemon.http.head(f"/api/blobs/{digest}", headers=narrow).status_code == 200
    assert create(digest)


def test_only_admins_collect_what_others_may_be_sending(daemon: Daemon) -> None:
    headers = new_key(daemon, "tidy")
    for early in ("min_age_s", "partial_min_age_s"):
        refused = daemon.http.post("/localrun/v1/gc", json={early: 0}, headers=headers)
        assert (refused.status_code, "for admins" in refused.text) == (403, True)
    assert daemon.http.post("/localrun/v1/gc", json={}, headers=headers).status_code == 200
    assert daemon.http.post("/localrun/v1/gc", json={"min_age_s": 0}, headers=local(daemon)).status_code == 200


def test_every_operation_is_for_those_who_have_its_right(daemon: Daemon) -> None:
    """Read-only keys change nothing, whatever routes there are; they may cancel what they asked themselves."""
    reader, user = new_key(daemon, "reader", read_only=True), new_key(daemon, "user")
    looker = new_key(daemon, "looker", admin=True, read_only=True)
    assert chat(daemon, reader).status_code == 200
    refused = {Right.CHANGE: [reader, looker], Right.ADMIN: [reader, user], Right.ADMIN_CHANGE: [reader, user, looker]}
    assert set(refused) < {one.right for one in OPERATIONS}
    assert {one.right for one in OPERATIONS if one.method == "DELETE"} == {*refused, Right.CANCEL} - {Right.ADMIN}
    for operation in OPERATIONS:
        path = re.sub(r"{\w+}", "x", operation.path)
        for headers in refused.get(operation.right, ()):
            answer = daemon.http.request(operation.method, path, json={}, headers=headers)
            assert (answer.status_code, answer.headers["x-localrun-error"]) == (403, "forbidden"), path
            assert ("read-only" in answer.text) == (headers is looker or operation.right is Right.CHANGE), path
    body = {"model": "tiny", "messages": [], "keep_alive": 0}
    assert daemon.http.post("/api/chat", json=body, headers=reader).status_code == 403


def test_a_read_only_key_unloads_nothing_with_what_it_asks(daemon: Daemon) -> None:
    reader, admin = new_key(daemon, "asks-only", read_only=True), new_key(daemon, "looks", admin=True)

    def engines() -> list[int]:
        snapshot = daemon.http.get("/localrun/v1/snapshot", headers=admin).json()
        return [row["pid"] for row in snapshot["engines"]]

    asked: list[tuple[str, Any]] = [
        ("/v1/chat/completions", CHAT | {"keep_alive": 0}), ("/api/v0/chat/completions", CHAT | {"ttl": 0}),
        ("/api/chat", {"model": "tiny", "messages": CHAT["messages"], "keep_alive": "0s", "stream": False}),
        ("/tokenize", {"model": "tiny", "content": "a", "keep_alive": 0}),
    ]  # fmt: skip
    assert chat(daemon, admin).status_code == 200
    before = engines()
    for path, body in asked:
        assert daemon.http.post(path, json=body, headers=reader).status_code == 200
        assert chat(daemon, reader).status_code == 200
        assert engines() == before, path


def test_only_admins_end_it_for_all(daemon: Daemon) -> None:
    headers = new_key(daemon, "plain")
    assert daemon.http.post("/localrun/v1/shutdown", json={}, headers=headers).status_code == 403
    assert daemon.http.delete("/localrun/v1/cache", headers=headers).status_code == 403


def test_acts_and_failures_are_written_down(daemon: Daemon) -> None:
    headers = new_key(daemon, "doer")
    body = {"source": "tiny", "destination": "tiny-too"}
    assert daemon.http.post("/api/copy", json=body, headers=headers).status_code == 200
    assert daemon.http.request("DELETE", "/api/delete", json={"model": "tiny-too"}, headers=headers).status_code == 200
    daemon.http.get("/v1/models", headers={"x-api-key": "nonsense"})
    said = [(entry["who"], entry["what"], entry["result"]) for entry in audited(daemon)]
    daemon.http.delete("/v1/responses/x", headers=headers)
    daemon.http.post("/v1/files", headers=headers)
    said = [(entry["who"], entry["what"], entry["result"]) for entry in audited(daemon)]
    assert ("doer", "POST /api/copy", "200") in said
    assert ("doer", "DELETE /v1/responses/x", "404") in said
    assert any(who == "doer" and what == "POST /v1/files" for who, what, _ in said)
    assert ("doer", "DELETE /api/delete", "200") in said
    assert {entry["from"] for entry in audited(daemon)} == {"127.0.0.1"}
    assert any(what == "GET /v1/models" and result in ("no key", "unknown key") for _, what, result in said)
    assert "nonsense" not in json.dumps(audited(daemon))


def test_a_lane_that_is_too_good_is_lowered(daemon: Daemon) -> None:
    headers = new_key(daemon, "slow", lane=Lane.BATCH)
    request_id = chat(daemon, headers, lane="interactive").headers["x-localrun-request"]
    assert daemon.http.get(f"/localrun/v1/requests/{request_id}", headers=headers).json()["lane"] == "batch"


def test_as_many_at_once_as_a_key_may() -> None:
    with running_daemon(LOCALRUN_FAKE_STEP_MS="50") as daemon:
        headers = new_key(daemon, "one", n_concurrent=1)
        body = CHAT | {"stream": True, "max_tokens": 500, "ignore_eos": True}
        with daemon.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            lines = answer.iter_lines()  # closed, it would hang up
            next(lines)
            refused = chat(daemon, headers)
            assert refused.status_code == 429
            assert "1 requests running" in refused.json()["error"]["message"]
        until(lambda: chat(daemon, headers).status_code == 200)


def test_the_cache_of_one_key_is_nothing_to_another() -> None:
    words = "the same long beginning of a prompt, which both of them send " * 6
    body = {"messages": [{"role": "user", "content": words}]}

    def cached(headers: dict[str, str]) -> int:
        n_tokens: int = chat(daemon, headers, **body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return n_tokens

    # Steps that take no time cost less than copying what is cached, and on a busy machine are repeated for that.
    with running_daemon(LOCALRUN_FAKE_STEP_MS="5") as daemon:
        first, second = new_key(daemon, "cache-1"), new_key(daemon, "cache-2")
        assert cached(first) == 0
        assert cached(first) > 100
        assert cached(second) == 0
        assert cached(local(daemon)) == 0
        assert cached(second) > 100


def test_responses_of_one_key_are_nothing_to_another(daemon: Daemon) -> None:
    mine, others = new_key(daemon, "resp-1"), new_key(daemon, "resp-2")
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 4}
    first = daemon.http.post("/v1/responses", json=body, headers=mine).json()
    path = f"/v1/responses/{first['id']}"
    for method in ("GET", "DELETE"):
        assert daemon.http.request(method, path, headers=others).status_code == 404
    assert daemon.http.get(f"{path}/input_items", headers=others).status_code == 404
    follow = body | {"previous_response_id": first["id"]}
    assert daemon.http.post("/v1/responses", json=follow, headers=others).status_code == 404
    assert daemon.http.post("/v1/responses", json=follow, headers=mine).status_code == 200


def test_a_change_of_the_file_counts_without_a_restart(daemon: Daemon) -> None:
    file = KeyFile(daemon.home / "data")
    headers = new_key(daemon, "changing")
    new = file.rotate("changing").text
    until(lambda: daemon.http.get("/v1/models", headers=headers).status_code != 200)
    headers = {"x-api-key": new}
    assert daemon.http.get("/v1/models", headers=headers).status_code == 200
    file.revoke("changing")
    until(lambda: daemon.http.get("/v1/models", headers=headers).status_code != 200)
    expiring = new_key(daemon, "expiring", expires_at_s=time.time() + 3)
    until(lambda: daemon.http.get("/v1/models", headers=expiring).status_code != 200)


def test_other_rules_of_a_key_count_from_the_next_request_on() -> None:
    # A daemon of its own: at others, wrong keys may have been tried so often that more are told to wait.
    with running_daemon() as daemon:
        headers = new_key(daemon, "ruled", limits=(Limit(REQUESTS, 1, 3600.0),))
        file = KeyFile(daemon.home / "data")

        def change(**rules: Any) -> None:
            file.change("ruled", lambda key: msgspec.structs.replace(key, **rules))

        assert [chat(daemon, headers).status_code for _ in range(2)] == [200, 429]
        change(limits=())
        assert chat(daemon, headers).status_code == 200
        change(lane=Lane.BATCH, models=("tiny",))
        request_id = chat(daemon, headers, lane="interactive").headers["x-localrun-request"]
        assert daemon.http.get(f"/localrun/v1/requests/{request_id}", headers=headers).json()["lane"] == "batch"
        change(models=("qwen*",), read_only=True)
        assert chat(daemon, headers).status_code == 404
        assert daemon.http.post("/api/pull", json={"model": "tiny"}, headers=headers).status_code == 403
        change(models=(), expires_at_s=time.time() - 1)
        assert chat(daemon, headers).status_code == 401
        change(expires_at_s=None, limits=(Limit(REQUESTS, 100, 3600.0),))
        assert chat(daemon, headers).headers["x-ratelimit-limit-requests"] == "100"


def test_who_watches_is_cut_off_when_the_key_is_revoked(daemon: Daemon) -> None:
    headers = new_key(daemon, "watching", admin=True)
    for path in ("/localrun/v1/events", "/localrun/v1/logs", "/localrun/v1/traffic"):
        KeyFile(daemon.home / "data").rotate("watching")
        headers = {"x-api-key": KeyFile(daemon.home / "data").rotate("watching").text}
        with daemon.http.stream("GET", path, headers=headers) as watched:
            assert watched.status_code == 200
            KeyFile(daemon.home / "data").rotate("watching")
            for _ in watched.iter_bytes():
                pass


def test_a_picture_is_not_looked_at_before_the_quota_is_asked(daemon: Daemon) -> None:
    headers = new_key(daemon, "pictures", limits=(Limit(REQUESTS, 1, 3600.0),))
    assert chat(daemon, headers).status_code == 200
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    refused = chat(daemon, headers, messages=[{"role": "user", "content": [picture]}])
    assert refused.status_code == 429


def test_a_damaged_file_lets_in_who_was_in_and_nobody_else(daemon: Daemon) -> None:
    headers = new_key(daemon, "before-damage")
    path = daemon.home / "data" / keys.FILE_NAME
    content = path.read_bytes()
    path.write_bytes(b"{")
    try:
        until(lambda: "keys.json cannot be read" in (daemon.http.get("/health") and daemon.log) or not chat(daemon, {}))
        assert daemon.http.get("/v1/models", headers=headers).status_code == 200
        assert daemon.http.get("/v1/models").status_code in (401, 429)
    finally:
        path.write_bytes(content)


def test_loopback_without_a_key_where_the_settings_say_so() -> None:
    with running_daemon("--loopback-needs-key", "off") as daemon:
        headers = new_key(daemon, "zed", limits=(Limit(REQUESTS, 5, 3600.0),))
        assert chat(daemon, {}).status_code == 200
        assert "x-ratelimit-limit-requests" not in chat(daemon, {}).headers
        assert chat(daemon, headers).headers["x-ratelimit-remaining-requests"] == "4"
        assert chat(daemon, {"x-api-key": "dummy"}).status_code == 200


def test_the_local_key_is_gone_with_its_daemon() -> None:
    with running_daemon() as daemon:
        KeyFile(daemon.home / "data").create("zed")
        path = keys.local_key_path(daemon.home / "state", daemon.port)
        until(lambda: daemon.http.get("/v1/models").status_code == 401)
        assert daemon.http.get("/v1/models", headers=local(daemon)).status_code == 200
        assert daemon.stop() == 0
        assert not path.exists()


@pytest.mark.parametrize(("client", "scheme"), [("192.0.2.1", "http"), ("127.0.0.1", "https")])
async def test_the_local_key_opens_nothing_from_elsewhere(tmp_path: Path, client: str, scheme: str) -> None:
    books = OwnBooks(tmp_path)
    books.keys.create("zed")
    access = Access(Settings(), books, state=tmp_path)
    access.make_local_key(1)
    headers = [(b"x-api-key", keys.local_key(tmp_path, 1).encode())]
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": headers}
    assert await access.admit(scope | {"scheme": "http", "client": ("127.0.0.1", 5)}, Right.USE) is not None
    with pytest.raises(InvalidKey):
        await access.admit(scope | {"scheme": scheme, "client": (client, 5)}, Right.USE)
    access.close()


def test_ten_thousand_wrong_keys_do_not_slow_a_right_one(daemon: Daemon) -> None:
    """Nor do they fill the disk or the memory. Most of them name a key that there is."""
    headers = new_key(daemon, "right")
    fresh = KeyFile(daemon.home / "data").create("fresh").text
    known = next(key.id for key in KeyFile(daemon.home / "data").read() if key.name == "right")
    n_before = len(audited(daemon))
    codes: list[int] = []

    def attack(start: int) -> None:
        with httpx2.Client(base_url=daemon.url, timeout=60, trust_env=False) as client:
            for number in range(start, start + 5000):
                wrong = f"{keys.PREFIX}{known}_{number:043d}"
                codes.append(client.get("/v1/models", headers={"x-api-key": wrong}).status_code)

    attackers = [threading.Thread(target=attack, args=(start,)) for start in (0, 5000)]
    for attacker in attackers:
        attacker.start()
    n_right = 0
    while any(attacker.is_alive() for attacker in attackers):
        assert chat(daemon, headers).status_code == 200
        n_right += 1
        if n_right == 2:  # one that was never seen before
            assert daemon.http.get("/v1/models", headers={"x-api-key": fresh}).status_code == 200
    assert len(codes) == 10_000
    assert set(codes) <= {401, 429}
    assert codes.count(429) > 9_000
    # As many right ones as a busy machine lets through beside two attackers, and none waited for a hash.
    assert n_right > 20
    assert len(audited(daemon)) - n_before < 200


def test_what_was_counted_outlives_a_kill() -> None:
    """Of 40 answers whose end was seen, in three lives of a daemon, each counts once; one that ran is taken from the
    requests, and its tokens are not."""
    import tempfile

    limits = (Limit(REQUESTS, 1000, 86400.0 * 365), Limit(TOKENS, 1_000_000, 86400.0 * 365))
    with tempfile.TemporaryDirectory() as folder:
        home = {"LOCALRUN_HOME": folder, "LOCALRUN_FAKE_STEP_MS": "5"}
        text = KeyFile(Path(folder) / "data").create("zed", limits=limits).text
        headers = {"x-api-key": text}
        n_seen, n_prompt, n_output, n_cut = 0, 0, 0, 0
        for life in range(3):
            with running_daemon(**home) as daemon:
                for _ in range(12 + life):
                    used = chat(daemon, headers).json()["usage"]
                    n_seen, n_prompt = n_seen + 1, n_prompt + used["prompt_tokens"]
                    n_output += used["completion_tokens"]
                stream = CHAT | {"stream": True, "max_tokens": 1500, "ignore_eos": True}
                with daemon.http.stream("POST", "/v1/chat/completions", json=stream, headers=headers) as answer:
                    lines = answer.iter_lines()
                    next(lines)
                    n_cut += 1
                    daemon.stop(signal.SIGKILL)
        with running_daemon(**home) as daemon:
            left = daemon.http.get("/v1/models", headers=headers).headers
            assert int(left["x-ratelimit-remaining-requests"]) == 1000 - n_seen - n_cut
            # Meanwhile it got 1,000,000 / 365 days of tokens back: some thousandths of one a second.
            missing = 1_000_000 - int(left["x-ratelimit-remaining-tokens"])
            assert 0 <= n_prompt + n_output - missing <= 30
        [total] = UsageFile(Path(folder) / "data").totals("key")
        assert (total.requests, total.prompt_tokens, total.output_tokens) == (n_seen, n_prompt, n_output)


def test_kills_among_many_requests_count_none_twice_and_lose_none(tmp_path: Path) -> None:
    """Whatever is killed in the middle of, a request's count, its tokens and the levels of its key agree."""
    limits = (Limit(REQUESTS, 100_000, 86400.0 * 365), Limit(TOKENS, 10_000_000, 86400.0 * 365))
    text = KeyFile(tmp_path / "data").create("zed", limits=limits).text
    headers = {"x-api-key": text}
    sent, seen = [0] * 4, [0] * 4
    used: dict[str, int] = {}
    for _ in range(3):
        with running_daemon(LOCALRUN_HOME=str(tmp_path)) as daemon:
            used = chat(daemon, headers).json()["usage"]
            sent[0], seen[0] = sent[0] + 1, seen[0] + 1
            enough = sum(seen) + 40

            def ask(thread: int, url: str = daemon.url) -> None:
                with httpx2.Client(base_url=url, timeout=60, trust_env=False) as client:
                    while True:
                        sent[thread] += 1
                        try:
                            answer = client.post("/v1/chat/completions", json=CHAT, headers=headers)
                        except httpx2.TransportError:
                            return
                        seen[thread] += answer.status_code == 200

            threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(4)]
            for thread in threads:
                thread.start()
            until(lambda: sum(seen) >= enough)  # noqa: B023
            daemon.stop(signal.SIGKILL)
            for thread in threads:
                thread.join()
    with running_daemon(LOCALRUN_HOME=str(tmp_path)) as daemon:
        left = daemon.http.get("/v1/models", headers=headers).headers
    [total] = UsageFile(tmp_path / "data").totals("key")
    assert sum(seen) <= total.requests <= sum(sent)
    assert total.prompt_tokens == total.requests * used["prompt_tokens"]
    assert total.output_tokens == total.requests * used["completion_tokens"]
    n_taken = 100_000 - int(left["x-ratelimit-remaining-requests"])
    assert total.requests <= n_taken <= sum(sent)
    missing = 10_000_000 - int(left["x-ratelimit-remaining-tokens"])
    # Meanwhile it got a third of a token back each second.
    assert 0 <= total.prompt_tokens + total.output_tokens - missing <= 200


def test_the_throttle_forgets_and_is_bounded() -> None:
    throttle = Throttle()
    for _ in range(FAILURES):
        assert throttle.fail("a", 0.0) == (None, False)
    wait_s, is_first = throttle.fail("a", 0.0)
    assert (wait_s, is_first) == (6.0, True)
    assert throttle.fail("a", 1.0) == (5.0, False)
    assert throttle.fail("b", 1.0) == (None, False)
    assert throttle.fail("a", 6.0) == (None, False)
    assert throttle.fail("a", 6.0) == (6.0, False)
    for number in range(MAX_ADDRESSES + 5):
        throttle.fail(str(number), 7.0)
    assert throttle.fail("a", 7.0) == (None, False)
    assert len(throttle._left) == MAX_ADDRESSES
