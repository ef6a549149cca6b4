"""The document against the app: what is served is described, and what is described is served."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Match

from localrun.config import Settings
from localrun.server import app
from localrun.server.http import fields
from localrun.server.http.limits import _EXPOSED_HEADERS, MAX_TEXT_BYTES
from localrun.server.http.operation import JSON, Operation
from localrun.server.openapi.document import INNER, notes
from localrun.server.openapi.operations import OPERATIONS, document, find
from localrun.server.runtime import Runtime


def bodies(operation: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas of its body, where it has one with a schema."""
    content = operation.get("requestBody", {}).get("content", {})
    return [one["schema"] for one in content.values() if "schema" in one]


def test_it_is_valid():
    assert list(OpenAPIV31SpecValidator(document()).iter_errors()) == []


def test_a_request_is_routed_to_the_operation_whose_rights_were_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path))
    monkeypatch.setattr(app, "Limits", lambda routed, *_: routed)
    settings = Settings(port=0)
    routed: Any = app.build(settings, Runtime(settings))
    described = {(method.upper(), path) for path, item in document()["paths"].items() for method in item}
    assert described == {(one.method, one.path) for one in OPERATIONS}
    assert len(routed.routes) == len(OPERATIONS)
    for operation in OPERATIONS:
        path = re.sub(r"{\w+}", "a/b" if operation.has_slashes else "a", operation.path)
        for method in (operation.method, "HEAD") if operation.method == "GET" else (operation.method,):
            scope = {"type": "http", "method": method, "path": path}
            answering = next(route for route in routed.routes if route.matches(scope)[0] is Match.FULL)
            assert answering.path == operation.pattern
            assert find(method, path) is operation
    assert find("GET", "/v1/nothing") is None


def test_a_route_that_nobody_gave_a_right_does_not_start():
    with pytest.raises(TypeError, match="summary"):
        Operation("GET", "/v1/open", OPERATIONS[0].handler, "Who may is forgotten")  # type: ignore[call-arg, arg-type]


def test_limits_come_from_the_structs():
    body = document()["components"]["schemas"]["OpenAIChatBody"]["properties"]
    assert body["top_logprobs"]["anyOf"][0] == {"type": "integer", "minimum": 0, "maximum": fields.MAX_TOP_LOGPROBS}
    assert document()["components"]["schemas"]["MessagesBody"]["required"] == ["messages", "max_tokens"]


def test_the_limit_of_each_body_is_in_it():
    paths = document()["paths"]
    with_json = [one for one in OPERATIONS if one.body not in (None, bytes) and one.body_content_type == JSON]
    assert [one for one in OPERATIONS if one.is_text and one not in with_json] == []
    for operation in with_json:
        said = paths[operation.path][operation.method.lower()]["requestBody"]["description"]
        most = MAX_TEXT_BYTES if operation.is_text else Settings().max_body_bytes
        assert str(most) in said
        names = {field.encode_name for field in msgspec.inspect.type_info(operation.body).fields}
        # What may have pictures, sound, or other requests in it.
        assert not operation.is_text or not names & {"messages", "images", "requests"}


def test_structs_of_one_name_are_told_apart():
    schemas = document()["components"]["schemas"]
    assert {"OllamaChatBody", "OpenAIChatBody"} <= set(schemas)
    assert not any("." in name for name in schemas)


def test_every_field_of_every_body_has_a_note_and_no_note_is_left_over():
    described = [content for path in document()["paths"].values() for item in path.values() for content in bodies(item)]
    names = {schema["$ref"].rpartition("/")[2] for schema in described} | INNER
    missing, used = [], set()
    for name in names:
        for field in document()["components"]["schemas"][name]["properties"]:
            key = f"{name}.{field}" if f"{name}.{field}" in notes() else field
            used.add(key)
            if key not in notes():
                missing.append(f"{name}.{field}")
    assert missing == []
    assert set(notes()) - used == set()


@pytest.mark.parametrize(
    "path", ["/api/chat", "/v1/chat/completions", "/api/v0/chat/completions", "/v1/messages", "/infill", "/rerank"]
)
def test_errors_have_the_shape_of_their_family(path: str):
    answer = document()["paths"][path]["post"]["responses"]["429"]
    shape = answer["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    wanted = {
        "/api/chat": "Ollama",
        "/v1/chat/completions": "OpenAI",
        "/api/v0/chat/completions": "OpenAI",
        "/v1/messages": "Anthropic",
        "/infill": "Llama",
        "/rerank": "Native",
    }
    assert shape == wanted[path] + "Error"
    assert "queue_full" in answer["description"]
    assert "Retry-After" in answer["headers"]


def test_the_headers_that_pages_may_read_are_described():
    said = document()["paths"]["/api/chat"]["post"]["responses"]["200"]["headers"]
    words = " ".join([*said, *(header["description"] for header in said.values())]).lower()
    errors_own = {"x-localrun-error", "retry-after"}
    for name in set(_EXPOSED_HEADERS.decode().split(", ")) - errors_own:
        family, *_ = re.split(r"(?<=ratelimit)-", name)
        assert family in words, name


def test_keys_may_be_sent_in_both_ways_or_not_at_all():
    shown = document()
    schemes = shown["components"]["securitySchemes"]
    assert [set(way) for way in shown["security"]] == [*({name} for name in schemes), set()]
    assert {(one["type"], one.get("scheme") or one["name"]) for one in schemes.values()} == {
        ("http", "bearer"), ("apiKey", "x-api-key"),
    }  # fmt: skip


def test_a_process_that_knows_the_types_ends_well():
    """Freeing them is left to msgspec, which crashes in a part of all processes with some."""
    program = "from localrun.server.openapi.operations import document; document()"
    for _ in range(10):
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
