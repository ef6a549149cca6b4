"""Real engines with projectors: one that takes a picture, and one that ends libmtmd although its header is sound."""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from localrun.models import builtin
from localrun.models.gguf.reader import read_header
from tests.daemon import Daemon, running_daemon
from tests.projector_file import changed, parts_of, write_parts
from tests.says import says

pytestmark = pytest.mark.skipif(not builtin.model_path().is_file(), reason="the built-in model's file is not there")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(fake=False) as running:
        width = read_header(builtin.model_path()).n_embd
        # A type whose tensors nobody checks: libmtmd asserts what these are not.
        for name, kind in (("fox", "gemma3"), ("owl", "gemma4v")):
            folder: Path = running.home / "data" / "models"
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(builtin.model_path(), folder / f"{name}.gguf")
            parts = changed(parts_of("gemma3", width), {"clip.projector_type": kind})
            if kind == "gemma4v":
                output = "mm.input_projection.weight"
                parts.tensors[output] = parts.tensors[output][::-1]
            read_header(write_parts(folder / f"mmproj-{name}.gguf", parts), kind="projector")
        yield running


def asked(daemon: Daemon, model: str, *images: str) -> Any:
    message = {"role": "user", "content": "what is this?", "images": list(images)}
    return daemon.post("/api/chat", model=model, stream=False, messages=[message], options={"num_predict": 3})


def picture() -> str:
    file = io.BytesIO()
    Image.new("RGB", (60, 40), (200, 30, 30)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_a_model_with_a_projector_takes_a_picture(daemon: Daemon) -> None:
    seen, blind = asked(daemon, "fox", picture()), asked(daemon, "fox")
    assert (seen.status_code, blind.status_code) == (200, 200)
    assert seen.json()["prompt_eval_count"] > blind.json()["prompt_eval_count"]


def test_a_projector_that_ends_the_engine_leaves_the_model_for_text(daemon: Daemon) -> None:
    assert asked(daemon, "owl").status_code == 200
    refused = asked(daemon, "owl", picture())
    assert refused.status_code == 400
    assert says(refused.json()["error"], "owl", "without its projector mmproj-owl.gguf", "log")
    assert says(daemon.log, "owl is used without its projector mmproj-owl.gguf, for text only")
    as_vector = {"prompt_string": "<__media__>", "multimodal_data": [picture()]}
    assert daemon.post("/v1/embeddings", model="owl", input="what is this?").status_code == 200
    refused = daemon.post("/v1/embeddings", model="owl", input=as_vector)
    assert refused.status_code == 400
    assert says(refused.json()["error"]["message"], "owl", "without its projector mmproj-owl.gguf", "log")
