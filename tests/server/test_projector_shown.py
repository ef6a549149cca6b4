"""What every API says of a model with a projector: a daemon with fake engines."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localrun.models import builtin
from localrun.models.gguf.reader import read_header
from localrun.models.memory import projector_memory
from tests.daemon import Daemon, running_daemon
from tests.projector_file import write_projector
from tests.says import says


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        folder = _folder(running)
        folder.mkdir(parents=True, exist_ok=True)
        width = read_header(builtin.model_path()).n_embd
        for name in ("fox", "owl", "wolf"):
            shutil.copy(builtin.model_path(), folder / f"{name}.gguf")
        write_projector(folder / "mmproj-fox.gguf", width=width)
        write_projector(folder / "mmproj-wolf.gguf", "ultravox", width + 1)
        yield running


def _folder(daemon: Daemon) -> Path:
    return daemon.home / "data" / "models"


def _show(daemon: Daemon, model: str) -> Any:
    return daemon.post("/api/show", model=model).json()


def test_capabilities(daemon: Daemon) -> None:
    tags = {row["name"].removesuffix(":latest"): row for row in daemon.http.get("/api/tags").json()["models"]}
    assert {name: "vision" in row["capabilities"] for name, row in tags.items()} == {
        "tiny": False, "fox": True, "owl": False, "wolf": False,
    }  # fmt: skip
    assert (tags["fox"]["details"]["families"], tags["owl"]["details"]["families"]) == (["llama", "clip"], ["llama"])
    assert tags["fox"]["size"] - tags["owl"]["size"] == (_folder(daemon) / "mmproj-fox.gguf").stat().st_size
    listed = {row["id"]: row["meta"]["capabilities"] for row in daemon.http.get("/v1/models").json()["data"]}
    assert listed == {name: row["capabilities"] for name, row in tags.items()}


def test_show(daemon: Daemon) -> None:
    fox, owl, wolf = (_show(daemon, name) for name in ("fox", "owl", "wolf"))
    assert fox["projector_info"]["clip.projector_type"] == "gemma3"
    assert fox["projector_info"]["general.architecture"] == "clip"
    about = fox["localrun"]["projector"]
    path = _folder(daemon) / "mmproj-fox.gguf"
    assert about == {
        "path": str(path), "size": path.stat().st_size, "takes": ["vision"], "types": ["gemma3"], "quantization": "F32",
    }  # fmt: skip
    assert f"\nFROM {path}\n" in fox["modelfile"]
    assert "projector_info" not in owl
    assert (owl["localrun"]["projector"], owl["localrun"]["no_projector"]) == (None, "")
    assert wolf["localrun"]["projector"] is None
    for seeing, blind in zip(fox["localrun"]["memory"], owl["localrun"]["memory"], strict=True):
        assert seeing["total"] - blind["total"] == seeing["projector"] > blind["projector"] == 0
    assert says(wolf["localrun"]["no_projector"], "mmproj-wolf.gguf", "another model")


def test_fit(daemon: Daemon) -> None:
    def fit(model: str) -> Any:
        return daemon.http.get(f"/localrun/v1/fit?model={model}").json()

    fox, owl = fit("fox"), fit("owl")
    needed = projector_memory(read_header(_folder(daemon) / "mmproj-fox.gguf", kind="projector"))
    assert fox["projector"] == {
        "name": "mmproj-fox.gguf", "device": fox["devices"][0]["name"], "weights_bytes": needed.weights_bytes,
        "compute_bytes": needed.compute_bytes, "total_bytes": needed.total_bytes,
    }  # fmt: skip
    assert owl["projector"] is None
    assert fox["total_bytes"] - owl["total_bytes"] == needed.total_bytes
    assert fox["devices"][0]["other_bytes"] - owl["devices"][0]["other_bytes"] == needed.total_bytes


def test_create_and_copy_and_remove(daemon: Daemon) -> None:
    folder = _folder(daemon)
    lines = f"FROM {folder / 'owl.gguf'}\nPROJECTOR ./mmproj-fox.gguf\n"
    made = {"model": "seeing-owl", "modelfile": lines, "modelfile_folder": str(folder), "stream": False}
    assert daemon.post("/api/create", made).json() == {"status": "success"}
    assert "vision" in _show(daemon, "seeing-owl")["capabilities"]
    again = {"model": "again", "modelfile": _show(daemon, "seeing-owl")["modelfile"], "stream": False}
    assert daemon.post("/api/create", again).json() == {"status": "success"}
    assert "vision" in _show(daemon, "again")["capabilities"]
    without = {"model": "without", "modelfile": "FROM seeing-owl\nPROJECTOR none", "stream": False}
    assert daemon.post("/api/create", without).json() == {"status": "success"}
    assert "vision" not in _show(daemon, "without")["capabilities"]
    wrong = made | {"model": "wrong", "modelfile": f"FROM {folder / 'owl.gguf'}\nFROM ./mmproj-wolf.gguf"}
    refused = daemon.post("/api/create", wrong)
    assert refused.status_code == 422
    assert says(refused.json()["error"], "mmproj-wolf.gguf", "another model")
    assert daemon.post("/api/copy", source="seeing-owl", destination="copy").status_code == 200
    assert "vision" in _show(daemon, "copy")["capabilities"]
    for name in ("seeing-owl", "again", "without", "copy"):
        assert daemon.http.request("DELETE", "/api/delete", json={"model": name}).status_code == 200
    assert (folder / "mmproj-fox.gguf").exists()


def test_a_setting_takes_them_away() -> None:
    with running_daemon(LOCALRUN_PROJECTORS="off") as running:
        folder = _folder(running)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(builtin.model_path(), folder / "fox.gguf")
        write_projector(folder / "mmproj-fox.gguf", width=read_header(builtin.model_path()).n_embd)
        shown = _show(running, "fox")
        assert "vision" not in shown["capabilities"]
        assert "setting projectors is off" in shown["localrun"]["no_projector"]
