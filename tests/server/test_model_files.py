"""Why a model file cannot be used is said before it is tried, wherever a person may look at it."""

from __future__ import annotations

import os
import sys
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


@pytest.mark.skipif(sys.platform != "linux", reason="file names that are not UTF-8")
def test_a_folder_whose_name_is_not_utf8_is_told_of_and_in_nobody_s_way(tmp_path: Path):
    folder = tmp_path / os.fsdecode(b"sch\xf6n")
    folder.mkdir()
    (folder / "old.gguf").write_bytes(FILES["known"])
    (tmp_path / "new.gguf").write_bytes(FILES["known"])
    with running_daemon(LOCALRUN_MODEL_DIRS=str(tmp_path)) as running:
        tags = running.http.get("/api/tags").json()
        assert {row["name"] for row in tags["models"]} == {"tiny:latest", "new:latest"}
        (unusable,) = tags["unusable"]
        assert unusable["path"].endswith("/sch\N{REPLACEMENT CHARACTER}n/old.gguf")
        for said in (unusable["problem"], running.post("/api/generate", model="old", prompt="hi").json()["error"]):
            assert "not UTF-8; rename" in said


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
