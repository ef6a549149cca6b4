"""Adapters by name through a daemon with a real engine: which one takes effect, and that one engine serves them all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localrun.models import builtin
from tests.daemon import Daemon
from tests.lora_file import write_lora, write_vector


@pytest.fixture(scope="module")
def adapted(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    """With `style`, a LoRA, and `happy`, a control vector, for the built-in model, of which `tuned` has `style`."""
    folder = tmp_path_factory.mktemp("adapters")
    for path in (write_lora(builtin.model_path(), folder / "style.gguf", seed=1),
                 write_vector(builtin.model_path(), folder / "happy.gguf", strength=8.0)):  # fmt: skip
        create(daemon, path.stem, f"FROM {path}")
    create(daemon, "tuned", "FROM tiny\nADAPTER style")
    return daemon


def create(daemon: Daemon, name: str, modelfile: str) -> None:
    answer = daemon.post("/api/create", model=name, modelfile=modelfile, stream=False)
    assert answer.json() == {"status": "success"}, answer.text


def answer(daemon: Daemon, model: str, **more: Any) -> str:
    body = {"model": model, "prompt": "Tell me a story about", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    said = daemon.post("/v1/completions", body | more)
    assert said.status_code == 200, said.text
    text: str = said.json()["choices"][0]["text"]
    return text


NAMES = ("tiny", "tiny+style", "tiny+happy", "tiny+style+happy", "tiny+style=-1")


def test_each_set_says_its_own(adapted: Daemon) -> None:
    said = {name: answer(adapted, name) for name in NAMES}
    assert len(set(said.values())) == len(NAMES)
    # What is cached of one set is not taken for another's, whatever way it is asked for.
    assert {name: answer(adapted, name) for name in reversed(NAMES)} == said
    assert answer(adapted, "tiny+style=0+happy") == said["tiny+happy"]
    assert answer(adapted, "tiny", lora=[{"id": "style"}, {"id": "happy", "scale": 1.0}]) == said["tiny+style+happy"]
    assert answer(adapted, "tiny+style", lora=[{"id": "style", "scale": -1}]) == said["tiny+style=-1"]
    assert [row["name"] for row in adapted.http.get("/api/ps").json()["models"]] == ["tiny"]
    assert answer(adapted, "tuned") == said["tiny+style"]
    assert answer(adapted, "tuned", lora=[{"id": "style", "scale": 0}]) == said["tiny"]
    assert {row["name"] for row in adapted.http.get("/api/ps").json()["models"]} == {"tiny", "tuned"}


def test_sets_at_the_same_time(adapted: Daemon) -> None:
    with ThreadPoolExecutor(len(NAMES)) as pool:
        texts = list(pool.map(lambda name: answer(adapted, name, max_tokens=40), NAMES * 2))
    assert all(texts)
    assert len(set(texts[: len(NAMES)])) == len(NAMES)


def test_a_file_that_is_gone_is_the_request_s_error(adapted: Daemon, tmp_path: Path) -> None:
    path = write_lora(builtin.model_path(), tmp_path / "gone.gguf", seed=5)
    create(adapted, "gone", f"FROM {path}")
    path.unlink()
    refused = adapted.post("/v1/completions", model="tiny+gone", prompt="Hello")
    assert refused.status_code == 422
    assert "is gone" in refused.json()["error"]["message"]
    assert answer(adapted, "tiny")
