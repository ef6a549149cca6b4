"""The cases: each operation of the table that takes JSON, each field of its body, and what stands in no table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec

from localrun.server.http.operation import JSON
from localrun.server.openapi.operations import OPERATIONS
from tests.stall.values import Make, anything, grown, smallest

HI = [{"role": "user", "content": "hi"}]
# Bodies that are answered; a field that is required and not here has the smallest value of its type.
_USUAL: dict[str, Any] = {
    "model": "tiny", "messages": HI, "prompt": "hi", "input": "hi", "query": "hi", "documents": ["hi"], "tokens": [104],
    "content": "hi", "input_prefix": "hi", "max_tokens": 2, "n_predict": 2, "num_predict": 2, "max_output_tokens": 2,
    "stream": False, "store": False, "source": "tiny", "destination": "copy-of-tiny", "from": "tiny",
}  # fmt: skip
# Another name of `/completion`, for the streams of other clients, whose time is not to count for a case.
OF_OTHERS = "/completions"
# They take from the network, or what other cases need.
LEFT_OUT = {"/api/pull", "/api/push", "/api/delete", "/models/unload", "/localrun/v1/gc", OF_OTHERS}


class Case(NamedTuple):
    """One request: `operation` as the daemon's own clock names it; `make` its body."""

    operation: str
    label: str
    make: Callable[[], dict[str, Any]]

    def __str__(self) -> str:
        return f"{self.operation}, {self.label}"


def cases(n_bytes: int) -> Iterator[Case]:
    """All of about that length."""
    for operation in OPERATIONS:
        if operation.body in (None, bytes) or operation.body_content_type != JSON or operation.path in LEFT_OUT:
            continue
        name = f"{operation.method} {operation.path}"
        fields = {field.encode_name: field for field in msgspec.inspect.type_info(operation.body).fields}
        usual = {key: value for key, value in _USUAL.items() if key in fields}
        usual |= {key: smallest(f.type) for key, f in fields.items() if f.required and key not in usual}
        for key, field in fields.items():
            for label, make in grown(field.type, n_bytes):
                yield Case(name, f"{key}: {label}", _with(usual, key, make))
        for label, make in anything(n_bytes):
            yield Case(name, f"an unknown field: {label}", _with(usual, "of_tomorrow", make))
        if "messages" in fields:
            for label, make in conversations(n_bytes):
                yield Case(name, f"messages: {label}", _with(usual, "messages", make))
        if operation.path == "/v1/responses":
            for label, make in conversations(n_bytes):
                yield Case(name, f"input: {label}", _with(usual, "input", make))


def _with(usual: dict[str, Any], key: str, make: Make) -> Callable[[], dict[str, Any]]:
    return lambda: usual | {key: make()}


def conversations(n_bytes: int) -> Iterator[tuple[str, Make]]:
    """Messages, many of them, and such as belong to nothing."""
    for role in ("system", "developer", "user", "assistant", "nobody"):
        yield f"many of {role}", partial(_many_of, role, n_bytes // 140)
    calls = [{"id": f"c{at}", "type": "function", "function": {"name": "a", "arguments": "{}"}} for at in range(100)]
    asks = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "z", "name": "b", "content": "x"}
    yield "results of no call", lambda: [*HI, asks, *[result] * (n_bytes // 75)]
    yield "calls without results", lambda: [*HI, *[asks] * (n_bytes // 8_000)]
    yield "parts", lambda: [{"role": "user", "content": [{"type": "text", "text": ""}] * (n_bytes // 30)}]
    unknown = {"type": "of_tomorrow", "x": {"y": [[], []]}}
    yield "unknown parts", lambda: [{"role": "user", "content": [unknown] * (n_bytes // 45)}]
    yield "junk beside a message", lambda: [HI[0] | {"junk": [[]] * (n_bytes // 4)}]
    yield "junk beside each", lambda: [HI[0] | {"junk": {"a": [[]]}}] * (n_bytes // 65)
    yield "unknown items", lambda: [{"type": "of_tomorrow", "id": "x", "junk": [1]}] * (n_bytes // 50)


def _many_of(role: str, n: int) -> list[dict[str, Any]]:
    return [*({"role": role, "content": f"{at:08}" + "s" * 90} for at in range(n)), *HI]
