"""What a server says of itself."""

from __future__ import annotations

import msgspec
import pytest

from localrun.bench.discover import base_url_of, holds_of, model_of
from localrun.errors import BadRequest, DaemonUnreachable
from localrun.snapshot import EngineRow
from tests.bench.conftest import FakeServer


def listing(*names: str) -> dict[str, object]:
    return {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}


def engine(model: str, kv_cells: int) -> object:
    row = EngineRow(model=model, pid=1, state="ready", slots=4, kv_cells=kv_cells, n_ctx=2048, backend="llama.cpp CPU")
    return msgspec.to_builtins(row)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8080/v1/", "http://127.0.0.1:8080"),
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("localhost:8080/v1", "http://localhost:8080"),
        ("http://box/api", "http://box/api"),
    ],
)
def test_an_address_is_taken_as_people_write_it(text: str, url: str) -> None:
    assert base_url_of(text) == url


@pytest.mark.parametrize("text", ["https://127.0.0.1", "ftp://box", "http://", ""])
def test_what_cannot_be_measured_is_said(text: str) -> None:
    with pytest.raises(BadRequest, match=r"http://127\.0\.0\.1:8080"):
        base_url_of(text)


@pytest.mark.parametrize(
    ("names", "model"),
    [(("qwen.gguf",), "qwen.gguf"), (("a", "tiny:latest", "b"), "tiny:latest"), (("a", "b"), None), ((), None)],
)
def test_the_only_model_or_the_built_in_one(server: FakeServer, names: tuple[str, ...], model: str | None) -> None:
    server.pages["/v1/models"] = listing(*names)
    assert model_of(server.url) == model


def test_a_server_that_lists_no_models_says_nothing(server: FakeServer) -> None:
    assert model_of(server.url) is None
    server.pages["/v1/models"] = ["not", "a", "listing"]
    assert model_of(server.url) is None


def test_a_daemon_says_how_much_a_model_holds(server: FakeServer) -> None:
    server.pages["/localrun/v1/snapshot"] = {"engines": [engine("a", 512), engine("b", 1024)]}
    assert holds_of(server.url, "b") == (4, 1024, 2048, "llama.cpp CPU")
    assert holds_of(server.url, "c") is None
    server.pages["/localrun/v1/snapshot"] = {"engines": [engine("/models/a.gguf", 512)]}
    assert holds_of(server.url, "a") == (4, 512, 2048, "llama.cpp CPU")


def test_another_server_holds_nothing_that_we_know(server: FakeServer) -> None:
    assert holds_of(server.url, "a") is None


def test_nobody_there() -> None:
    with pytest.raises(DaemonUnreachable):
        model_of("http://127.0.0.1:9")
