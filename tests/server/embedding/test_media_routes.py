"""Embeddings of pictures over HTTP, on fake engines: where a byte is a token."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from localrun.models import builtin
from localrun.models.gguf.reader import read_header
from tests.daemon import Daemon, running_daemon
from tests.projector_file import write_projector
from tests.says import says
from tests.server.media import making

PNG, OTHER = (base64.b64encode(making.encoded(making.noise(*size), "PNG")).decode() for size in ((30, 20), (9, 8)))


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        folder = running.home / "data" / "models"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("fox", "owl"):
            shutil.copy(builtin.model_path(), folder / f"{name}.gguf")
        write_projector(folder / "mmproj-fox.gguf", width=read_header(builtin.model_path()).n_embd)
        yield running


def item(text: str, *data: str) -> dict[str, Any]:
    return {"prompt_string": text, "multimodal_data": list(data)}


def vectors(daemon: Daemon, path: str = "/v1/embeddings", **body: Any) -> list[list[float]]:
    answer = daemon.post(path, model="fox", **body)
    assert answer.status_code == 200, answer.text
    return [row["embedding"] for row in answer.json()["data"]] if path[1] == "v" else answer.json()["embeddings"]


def refusal(daemon: Daemon, path: str = "/v1/embeddings", *, model: str = "fox", **body: Any) -> str:
    answer = daemon.post(path, model=model, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


def test_every_form_of_an_input_gives_the_same_vector(daemon: Daemon) -> None:
    seen = item("see <__media__>!", PNG)
    parts = {"content": [
        {"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "text", "text": "!"},
    ]}  # fmt: skip
    (alone,) = vectors(daemon, input=seen)
    text, first, second, other = vectors(daemon, input=["text", seen, parts, item("see <__media__>!", OTHER)])
    assert first == second == pytest.approx(alone, abs=1e-6)
    assert other != pytest.approx(alone, abs=1e-3)
    assert text != pytest.approx(alone, abs=1e-3)
    assert vectors(daemon, "/api/embed", input=[seen])[0] == pytest.approx(alone, abs=1e-6)
    usage = daemon.post("/v1/embeddings", model="fox", input=seen).json()["usage"]
    bare = daemon.post("/v1/embeddings", model="fox", input="see !").json()["usage"]
    assert usage["prompt_tokens"] > bare["prompt_tokens"]


def test_messages_are_one_input(daemon: Daemon) -> None:
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "text", "text": "a"},
    ]
    messages = [{"role": "user", "content": content}]
    (closed,), (asked,) = (vectors(daemon, messages=messages, add_generation_prompt=adds) for adds in (False, True))
    assert closed != pytest.approx(asked, abs=1e-3)
    assert len(vectors(daemon, messages=[{"role": "user", "content": "text"}])) == 1
    assert "input" in refusal(daemon, messages=messages, input="a")


def test_what_is_wrong_names_the_field(daemon: Daemon) -> None:
    fine = item("<__media__>", PNG)
    assert says(refusal(daemon, input=["a", fine, item("<__media__>", "?")]), "input[2].multimodal_data[0]", "base64")
    assert says(refusal(daemon, input=[item("none", PNG)]), "input[0].prompt_string", 0, 1)
    assert says(refusal(daemon, "/api/embed", input={"multimodal_data": [PNG]}), "input", "prompt_string")
    assert says(
        refusal(daemon, input=item("<__media__>", "http://localhost/a.png")), "input.multimodal_data[0]", "fetch"
    )
    assert says(refusal(daemon, input=item("<__media__>" * 17, *[PNG] * 17)), "input.multimodal_data[16]", 16)
    assert says(refusal(daemon, model="owl", input=fine), "input.multimodal_data[0]", "owl", "does not support images")


@pytest.mark.parametrize("body", [{"prompt": item("<__media__>", PNG)}, {"images": [PNG]}, {"multimodal_data": [PNG]}])
def test_infill_takes_text_only(daemon: Daemon, body: dict[str, Any]) -> None:
    assert says(refusal(daemon, "/infill", **body), next(iter(body)), "text only")
