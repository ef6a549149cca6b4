"""Why a model file cannot be used is said before it is tried, wherever a person may look at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import Daemon, running_daemon
from tests.models.handmade import ENTRIES, STRING, U32, entry, file_bytes, text, u32

GPT2 = entry("tokenizer.ggml.model", STRING, text("gpt2"))
FILES = {
    "zebra": file_bytes(tuple(each.replace(b"llama", b"zebra") for each in ENTRIES)),
    "zork": file_bytes((*ENTRIES, GPT2, entry("tokenizer.ggml.pre", STRING, text("zork-v9")))),
    "headless": file_bytes((*ENTRIES, entry("llama.pooling_type", U32, u32(4)))),
    "known": file_bytes((*ENTRIES, GPT2, entry("tokenizer.ggml.pre", STRING, text("qwen2")))),
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("models")
    for name, content in FILES.items():
        (folder / f"{name}.gguf").write_bytes(content)
    with running_daemon(LOCALRUN_MODELS=str(folder)) as running:
        yield running


@pytest.mark.parametrize(
    ("name", "problem"), [("zebra", "the architecture 'zebra'"), ("zork", "the pre-tokenizer 'zork-v9'")]
)
def test_what_llama_cpp_does_not_know(daemon: Daemon, name: str, problem: str):
    tags = daemon.http.get("/api/tags").json()
    assert {"headless:latest", "known:latest"} <= {row["name"] for row in tags["models"]}
    (unusable,) = [row for row in tags["unusable"] if Path(row["path"]).stem == name]
    told = [
        unusable["problem"],
        daemon.post("/api/show", model=name).json()["error"],
        daemon.http.get("/localrun/v1/fit", params={"model": name}).text,
        daemon.post("/api/generate", model=name, prompt="hi").json()["error"],
        daemon.post("/api/create", model="new", **{"from": unusable["path"]}, stream=False).text,
    ]
    assert [each for each in told if problem not in each] == []


def test_a_reranker_without_its_head_ranks_nothing(daemon: Daemon):
    assert daemon.post("/api/show", model="headless").json()["capabilities"] == ["rerank"]
    answer = daemon.post("/v1/rerank", model="headless", query="a", documents=["b"])
    assert answer.status_code == 400
    assert "no ranking head (cls.output.weight or cls.weight)" in answer.json()["error"]["message"]
