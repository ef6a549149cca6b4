"""A real daemon against its own document: pages, the example of every route, streams, and every refusal."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any
from urllib.parse import urljoin

import httpx2
import jsonschema
import pytest

from localrun.server.http.operation import NDJSON, Operation
from localrun.server.openapi.operations import OPERATIONS, document
from localrun.server.openapi.refusals import REFUSALS
from tests.daemon import Daemon

# The examples name models that a reader is to replace.
STAND_INS = {"a-reranker": "ranker", "a-model-with-fim-tokens": "code"}
# They end the daemon, never end, or reach for the network; a test of their own has them.
ELSEWHERE = {"/localrun/v1/shutdown", "/localrun/v1/events", "/localrun/v1/traffic", "/api/pull", "/api/push"}


def closed(schema: Any) -> Any:
    """The same, but objects have no fields that it does not name: a field that is answered is described."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    is_object = schema.get("type") == "object" and "properties" in schema
    return {"additionalProperties": False} | inner if is_object else inner


@cache
def components() -> Any:
    return closed(document()["components"])


def check(value: Any, schema: dict[str, Any]) -> None:
    whole = {"components": components()} | closed(schema)
    wrong = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(whole).iter_errors(value))
    assert wrong is None, f"{wrong.json_path}: {wrong.message}"


def example(operation: Operation, **changes: Any) -> dict[str, Any]:
    body = dict(operation.example or {}) | changes
    return body | {"model": STAND_INS.get(body.get("model", ""), body.get("model", ""))} if "model" in body else body


def content(operation: Operation) -> dict[str, Any]:
    described = document()["paths"][operation.path][operation.method.lower()]
    found: dict[str, Any] = described["responses"][str(operation.status)].get("content", {})
    return found


def items(answer: httpx2.Response) -> list[Any]:
    """The lines of NDJSON, or the data of the events."""
    if answer.headers["content-type"].startswith(NDJSON):
        return [json.loads(line) for line in answer.text.splitlines()]
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.example], ids=lambda one: one.id)
def test_the_example_of_a_route_works_and_its_answer_has_the_shape_that_is_told(
    shared_daemon: Daemon, operation: Operation
):
    if operation.path in ELSEWHERE:
        pytest.skip("reaches for the network")
    body = example(operation, **({"stream": False} if operation.stream else {}))
    if "input_file_id" in body:
        form = {"files": {"file": ("lines.jsonl", b"\n")}, "data": {"purpose": "batch"}}
        body["input_file_id"] = shared_daemon.http.post("/v1/files", **form).json()["id"]
    answer = shared_daemon.http.request(operation.method, operation.path, json=body)
    assert answer.status_code == operation.status, answer.text
    for kind, described in content(operation).items():
        if answer.headers["content-type"].startswith(kind):
            check(answer.json(), described["schema"])
            break
    else:
        assert answer.content == b""


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.stream and one.serves], ids=lambda one: one.id)
def test_every_piece_of_a_stream_has_the_shape_that_is_told(shared_daemon: Daemon, operation: Operation):
    limits = {"/api/chat": {"logprobs": True, "top_logprobs": 2}, "/v1/chat/completions": {
        "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}}  # fmt: skip
    body = example(operation, stream=True) | limits.get(operation.path, {})
    answer = shared_daemon.post(operation.path, body)
    assert answer.status_code == 200, answer.text
    assert operation.stream is not None
    described = content(operation)[operation.stream.content_type]["x-item-schema"]
    pieces = items(answer)
    assert pieces, "a quick answer may be a single piece"
    for piece in pieces:
        assert "error" not in piece or piece["error"] is None
        check(piece, described)


@pytest.mark.parametrize(
    "operation", [one for one in OPERATIONS if one.method == "GET" and "{" not in one.path], ids=lambda one: one.id
)
def test_what_can_be_read_has_the_shape_that_is_told(shared_daemon: Daemon, operation: Operation):
    if operation.path in ELSEWHERE:
        pytest.skip("never ends")
    needed = {"/localrun/v1/fit": "?model=tiny", "/localrun/v1/logs": "?follow=0", "/tokenizer_info": "?model=tiny"}
    answer = shared_daemon.http.get(operation.path + needed.get(operation.path, ""))
    assert answer.status_code == 200, answer.text
    if operation.stream is not None:
        for piece in items(answer):
            check(piece, content(operation)[operation.stream.content_type]["x-item-schema"])
        return
    assert answer.headers["content-type"].startswith(operation.answer_content_type)
    if operation.answer_content_type == "application/json":
        check(answer.json(), content(operation)["application/json"]["schema"])


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda one: one.what[:40])
def test_what_is_refused_is_an_error_that_names_it(shared_daemon: Daemon, refusal: Any):
    answer = shared_daemon.post(refusal.path, dict(refusal.body))
    assert answer.status_code in (400, 501), answer.text
    error = answer.json()["error"]
    named = refusal.named
    if isinstance(error, dict) and "param" in error:
        assert str(error["param"]).startswith(named)
    elif named != "model":
        assert named in (error if isinstance(error, str) else error["message"])
    check(answer.json(), {"$ref": f"#/components/schemas/{_error_shape(refusal.path)}"})


def _error_shape(path: str) -> str:
    described = document()["paths"][path]["post"]["responses"]["413"]
    return str(described["content"]["application/json"]["schema"]["$ref"]).rpartition("/")[2]


def test_another_method_is_told_those_that_there_are(shared_daemon: Daemon):
    paths = document()["paths"]
    # Where another route's name has this one's place, its methods are there as well.
    beside = {f"/v1/responses/{name}": paths["/v1/responses/{id}"] for name in ("input_tokens", "compact")}
    for path, item in paths.items():
        item = item | beside.get(path, {})
        answer = shared_daemon.http.request("PATCH", path.replace("{", "").replace("}", ""))
        described = {method.upper() for method in item}
        assert answer.status_code == 405, path
        assert set(answer.headers["allow"].split(", ")) == described | ({"HEAD"} if "GET" in described else set())


def test_the_pages_are_served_with_the_address_that_was_asked(shared_daemon: Daemon):
    page = shared_daemon.http.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert f"curl http://127.0.0.1:{shared_daemon.port}/api/tags" in page.text
    assert "{base-url}" not in page.text
    for path in ("/docs", "/docs/"):
        links = re.findall(r'href="([^"#]*)"', shared_daemon.http.get(path).text)
        assert {urljoin(f"/llm{path}", link) for link in links} > {"/llm/openapi.json", "/llm/docs/editors"}
    editors = shared_daemon.http.get("/docs/editors")
    assert editors.status_code == 200
    assert '<h2 id="zed">Zed</h2>' in editors.text
    assert shared_daemon.http.get("/docs/emacs").status_code == 404
    assert shared_daemon.http.get("/openapi.json").json() == json.loads(json.dumps(document()))
