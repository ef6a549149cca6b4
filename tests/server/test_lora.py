"""`model+adapter`, `lora`, and the lists of adapters, in every API: a daemon with fake engines."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localrun.access.keys import KeyFile
from localrun.models import builtin
from tests.daemon import Daemon, running_daemon
from tests.lora_file import write_lora, write_vector

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        models = running.home / "data" / "models"
        models.mkdir(parents=True, exist_ok=True)
        tiny = builtin.model_path()
        write_lora(tiny, models / "style.gguf")
        write_vector(tiny, models / "happy.gguf")
        write_lora(tiny, models / "other.gguf", architecture="gemma")
        yield running


def create(daemon: Daemon, **body: Any) -> Any:
    return daemon.post("/api/create", {"stream": False} | body)


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/api/chat", {"messages": HELLO, "stream": False, "options": {"num_predict": 2}}),
    ("/api/generate", {"prompt": "hello", "stream": False, "options": {"num_predict": 2}}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
    ("/v1/messages/count_tokens", {"messages": HELLO}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[path for path, _ in REQUESTS])
def test_every_api_takes_adapters_in_the_model_s_name(path: str, body: dict[str, Any], daemon: Daemon) -> None:
    answer = daemon.post(path, body | {"model": "tiny+style=0.5+happy"})
    assert answer.status_code == 200, answer.text
    if "model" in answer.json():
        assert answer.json()["model"] == "tiny+style=0.5+happy"
    for name, status, said in (
        ("tiny+nothing", 404, "adapter 'nothing' not found"),
        ("nothing+style", 404, "model 'nothing' not found"),
        ("tiny+other", 400, "'other' cannot be used with 'tiny': it is for gemma, and the model is llama"),
        ("style", 400, "ask for MODEL+style"),
        ("tiny+style=1000", 400, "the scale 1000; the limit is 100"),
        ("tiny+style+style", 400, "twice"),
    ):
        refused = daemon.post(path, body | {"model": name})
        assert (refused.status_code, said in refused.text) == (status, True), refused.text
        error = refused.json()["error"]
        if path.startswith("/v1/messages"):
            assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
        elif path.startswith("/v1/"):
            assert error["param"] == "model"
    assert [row["name"] for row in daemon.http.get("/api/ps").json()["models"]] == ["tiny:latest"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_the_field_lora(path: str, daemon: Daemon) -> None:
    body = dict(REQUESTS)[path] | {"model": "tiny"}
    listed = {row["name"]: row for row in daemon.http.get("/lora-adapters").json()}
    for entry in (
        {"id": listed["style"]["id"], "scale": 0.5}, {"id": "style"}, {"id": listed["happy"]["digest"], "scale": -1},
        {"id": listed["style"]["path"], "scale": 0},
    ):  # fmt: skip
        answer = daemon.post(path, body | {"lora": [entry]})
        assert answer.status_code == 200, answer.text
    assert daemon.post(path, body | {"lora": []}).status_code == 200
    for entries, status, field in (
        ([{"id": 99}], 404, "lora[0]"),
        ([{"id": "style"}, {"id": "nothing"}], 404, "lora[1]"),
        ([{"id": "other"}], 400, "lora[0]"),
        ([{"id": "style", "scale": 101}], 400, "lora[0].scale"),
        ([{"id": "style", "scale": "x"}], 400, "lora[0].scale"),
        ([{"scale": 1}], 400, "lora[0].id"),
        ([{"id": -1}], 400, "lora[0].id"),
        ([{"id": "style"}] * 9, 400, "lora"),
        ([{"id": "style"}] * 2, 400, "lora[1]"),
    ):
        refused = daemon.post(path, body | {"lora": entries})
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, field), refused.text


def test_infill_takes_the_field_too(daemon: Daemon) -> None:
    refused = daemon.post("/infill", {"model": "tiny", "input_prefix": "a", "lora": [{"id": "nothing"}]})
    assert (refused.status_code, refused.json()["error"]["field"]) == (404, "lora[0]")


def test_embeddings_have_no_adapters(daemon: Daemon) -> None:
    for path in ("/v1/embeddings", "/api/embed"):
        refused = daemon.post(path, {"model": "tiny+style", "input": "hello"})
        assert refused.status_code == 400
        assert "adapters are for requests that generate text" in refused.text


def test_a_model_with_adapters_is_loaded_and_unloaded_as_the_model(daemon: Daemon) -> None:
    assert daemon.post("/api/generate", model="tiny+style").json()["done_reason"] == "load"
    assert daemon.post("/api/generate", model="tiny+style", keep_alive=0).json()["done_reason"] == "unload"
    assert daemon.http.get("/api/ps").json()["models"] == []
    assert daemon.post("/api/generate", model="tiny+nothing").status_code == 404


def test_lists(daemon: Daemon) -> None:
    models = daemon.http.get("/v1/models").json()["data"]
    assert [(row["id"], row.get("parent")) for row in models if "small" not in row["id"]] == [
        ("tiny", None), ("tiny+happy", "tiny"), ("tiny+style", "tiny"),
    ]  # fmt: skip
    assert daemon.http.get("/v1/models/tiny+style=0.5").json()["parent"] == "tiny"
    assert daemon.http.get("/v1/models/tiny+other").status_code == 400
    assert daemon.http.get("/v1/models/tiny+nothing").status_code == 404
    tags = daemon.http.get("/api/tags").json()
    assert [row["name"] for row in tags["models"]] == ["tiny:latest"]
    assert [(row["name"], row["kind"], row["architecture"], row["rank"]) for row in tags["adapters"]] == [
        ("happy", "control vector", "llama", 0), ("other", "adapter", "gemma", 4), ("style", "adapter", "llama", 4),
    ]  # fmt: skip
    assert tags["unusable"] == []
    rows = daemon.http.get("/lora-adapters").json()
    assert [row["id"] for row in rows] == [0, 1, 2]
    by_name = {row["name"]: row for row in rows}
    style = daemon.home / "data" / "models" / "style.gguf"
    assert by_name["style"]["digest"] == f"sha256:{hashlib.sha256(style.read_bytes()).hexdigest()}"
    assert (by_name["style"]["path"], by_name["style"]["scale"]) == (str(style), 0.0)
    fitting = daemon.http.get("/lora-adapters?model=tiny").json()
    assert fitting == [row for row in rows if row["name"] != "other"]
    assert daemon.http.get("/lora-adapters?model=nothing").status_code == 404
    refused = daemon.post("/lora-adapters", [{"id": 0, "scale": 1.0}])
    assert refused.status_code == 501
    assert "model+adapter=0.5" in refused.json()["error"]["message"]


def test_an_adapter_is_shown_copied_and_removed(daemon: Daemon, tmp_path: Path) -> None:
    shown = daemon.post("/api/show", model="style", verbose=True).json()
    assert (shown["localrun"]["kind"], shown["localrun"]["rank"], shown["localrun"]["alpha"]) == ("adapter", 4, 256.0)
    assert shown["capabilities"] == []
    assert len(shown["tensors"]) == shown["localrun"]["tensors"] > 0
    vector = daemon.post("/api/show", model="happy").json()["localrun"]
    assert (vector["kind"], vector["architecture"]) == ("control vector", "llama")
    both = daemon.post("/api/show", model="tiny+style").json()
    assert (both["localrun"]["name"], both["localrun"]["adapters"]) == ("tiny", [shown["localrun"]["path"]])

    assert daemon.post("/api/copy", source="style", destination="twin:v1").status_code == 200
    assert daemon.post("/api/pull", model="tiny+twin:v1", stream=False).json() == {"status": "success"}
    assert daemon.post("/api/pull", model="style", stream=False).json() == {"status": "success"}
    assert daemon.post("/api/pull", model="tiny+nothing", stream=False).status_code == 404

    # Of a Modelfile without FROM, of a file as FROM, and of an upload.
    lora = write_lora(builtin.model_path(), tmp_path / "mine.gguf", seed=3)
    folder = {"modelfile_folder": str(tmp_path)}
    for body in (
        {"modelfile": "ADAPTER ./mine.gguf\nLICENSE MIT", **folder},
        {"modelfile": "FROM ./mine.gguf", **folder},
        {"modelfile": daemon.post("/api/show", model="style").json()["modelfile"]},
        {"from": "style"},
    ):
        assert create(daemon, model="mine", **body).json() == {"status": "success"}, body
        assert daemon.post("/api/show", model="mine").json()["localrun"]["kind"] == "adapter"
        assert daemon.post("/api/chat", model="tiny+mine", messages=HELLO, stream=False).status_code == 200
    digest = f"sha256:{hashlib.sha256(lora.read_bytes()).hexdigest()}"
    assert daemon.http.post(f"/api/blobs/{digest}", content=lora.read_bytes()).status_code == 201
    assert create(daemon, model="mine", adapters={"x.gguf": digest}).json() == {"status": "success"}
    assert create(daemon, model="yours", files={"x.gguf": digest}).json() == {"status": "success"}
    assert create(daemon, model="tuned", modelfile="FROM tiny\nADAPTER yours").json() == {"status": "success"}

    def removed(name: str) -> Any:
        return daemon.http.request("DELETE", "/api/delete", json={"model": name})

    assert removed("yours").json()["kept"][0]["reason"] in ("'mine' uses it", "'tuned' uses it")
    assert [kept["reason"] for kept in removed("mine").json()["kept"]] == ["'tuned' uses it"]
    assert removed("tuned").json()["freed_bytes"] == lora.stat().st_size
    assert removed("tiny+style").status_code == 400
    assert removed("twin:v1").status_code == 200
    assert removed("twin:v1").status_code == 404


def test_adapters_that_cannot_be_created(daemon: Daemon, tmp_path: Path) -> None:
    for body, status, said in (
        ({"from": "tiny", "adapters": {"a": "sha256:" + "0" * 64}}, 404, "is not there"),
        ({"modelfile": "FROM tiny\nADAPTER other"}, 422, "it is for gemma, and the model is llama"),
        ({"modelfile": "FROM tiny\nADAPTER nothing"}, 404, "adapter 'nothing' not found"),
        ({"modelfile": "FROM style\nSYSTEM Hi"}, 400, "system: this is an adapter without a model"),
        ({"modelfile": "FROM tiny+style"}, 400, "neither"),
        ({"modelfile": "ADAPTER tiny"}, 400, "'tiny' is no adapter but a model"),
        ({}, 400, "from: give either from"),
    ):
        refused = create(daemon, model="refused", **body)
        assert (refused.status_code, said in refused.text) == (status, True), refused.text
    assert daemon.post("/api/show", model="refused").status_code == 404


def test_fit_counts_the_adapters(daemon: Daemon) -> None:
    def fit(name: str) -> int:
        answer = daemon.http.get("/localrun/v1/fit", params={"model": name})
        assert answer.status_code == 200, answer.text
        total: int = answer.json()["total_bytes"]
        return total

    style = daemon.home / "data" / "models" / "style.gguf"
    assert fit("tiny+style") - fit("tiny") == style.stat().st_size


def test_a_path_with_a_plus_sign_is_a_path(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "a+style.gguf"
    shutil.copyfile(builtin.model_path(), path)
    for name in (str(path), f"{path}+style=0.5"):
        answer = daemon.post("/v1/chat/completions", model=name, messages=HELLO, max_tokens=2)
        assert answer.status_code == 200, answer.text


def test_a_key_sees_the_adapters_that_it_may_use_and_not_where_they_lie() -> None:
    with running_daemon() as daemon:
        models = daemon.home / "data" / "models"
        models.mkdir(parents=True)
        for name in ("house-style", "secret"):
            write_lora(builtin.model_path(), models / f"{name}.gguf")
        all_rows = {row["name"]: row["id"] for row in daemon.http.get("/lora-adapters").json()}
        text = KeyFile(daemon.home / "data").create("narrow", models=("tiny", "house*")).text
        headers = {"x-api-key": text}
        found = daemon.http.get("/lora-adapters", headers=headers)
        assert [(row["name"], row["id"]) for row in found.json()] == [("house-style", all_rows["house-style"])]
        assert str(daemon.home) not in found.text
        for model in ("qwen", str(builtin.model_path())):
            assert daemon.http.get("/lora-adapters", params={"model": model}, headers=headers).status_code == 404
