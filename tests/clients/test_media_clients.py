"""The official clients send pictures and sound in their own ways, to a model that sees and one that hears."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import ollama
import openai
import pytest

from tests.daemon import Daemon, running_daemon
from tests.engine.native.media import make_pair
from tests.server.media import making

PNG = making.png(64, 48)
WAV = making.wave(making.tone(8000))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("gemma3", "ultravox"):
        pair = make_pair(folder, kind)
        pair.projector.rename(folder / f"mmproj-{kind}.gguf")
    with running_daemon(
        "--slots", "2", "--kv-cells", "2048", fake=False, LOCALRUN_THREADS="1", LOCALRUN_MODELS=str(folder)
    ) as running:
        yield running


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def with_ollama(seeing: Daemon) -> Iterator[ollama.Client]:
    with ollama.Client(host=seeing.url, trust_env=False) as connected:
        yield connected


def test_ollama_sends_bytes_and_files(with_ollama: ollama.Client, tmp_path: Path) -> None:
    client = with_ollama
    path = tmp_path / "picture.png"
    path.write_bytes(PNG)
    options = {"temperature": 0, "num_predict": 6}
    by_bytes, by_path = (
        client.chat("gemma3", [{"role": "user", "content": "what?", "images": [image]}], options=options)
        for image in (PNG, path)
    )
    assert by_bytes.message.content == by_path.message.content
    assert by_bytes.prompt_eval_count == by_path.prompt_eval_count
    generated = client.generate("gemma3", "what?", images=[PNG], options=options)
    assert (generated.response, generated.context) == (by_bytes.message.content, None)
    assert client.generate("ultravox", "what?", images=[WAV], options=options).response
    with pytest.raises(ollama.ResponseError, match=r"images\[0\]: 'gemma3' takes images, but no sound") as caught:
        client.generate("gemma3", "what?", images=[WAV])
    assert caught.value.status_code == 400


def test_openai_sends_parts(seeing: Daemon) -> None:
    with openai.OpenAI(
        base_url=f"{seeing.url}/v1", api_key="unused", max_retries=0, http_client=httpx.Client(trust_env=False)
    ) as client:
        picture: Any = {"type": "image_url", "image_url": {"url": uri(PNG), "detail": "auto"}}
        content: Any = [{"type": "text", "text": "what?"}, picture]
        chat = client.chat.completions.create(
            model="gemma3", max_tokens=6, temperature=0, messages=[{"role": "user", "content": content}]
        )
        assert chat.usage is not None
        parts: Any = [
            {"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": uri(PNG), "detail": "auto"},
        ]  # fmt: skip
        response = client.responses.create(
            model="gemma3", max_output_tokens=6, temperature=0, input=[{"role": "user", "content": parts}]
        )
        assert response.usage is not None
        assert response.output_text == chat.choices[0].message.content
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        heard: Any = {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}}
        said = client.chat.completions.create(
            model="ultravox", max_tokens=6, messages=[{"role": "user", "content": [heard]}]
        )
        assert said.choices[0].message.content
        picture["image_url"]["url"] = "http://127.0.0.1:1/x.png"
        with pytest.raises(openai.BadRequestError, match="--fetch-images") as caught:
            client.chat.completions.create(model="gemma3", messages=[{"role": "user", "content": content}])
        assert caught.value.param == "messages[0].content[1].image_url.url"


def test_anthropic_sends_blocks(seeing: Daemon) -> None:
    with anthropic.Anthropic(
        base_url=seeing.url, api_key="unused", max_retries=0, http_client=httpx2.Client(trust_env=False)
    ) as client:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
        content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
        asked: Any = {"model": "gemma3", "messages": [{"role": "user", "content": content}]}
        message = client.messages.create(max_tokens=6, **asked)
        counted = client.messages.count_tokens(**asked).input_tokens
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted
        only_text: Any = {"model": "gemma3", "messages": [{"role": "user", "content": "what?"}]}
        assert counted > client.messages.count_tokens(**only_text).input_tokens
        source["data"] = base64.b64encode(b"II*\0").decode()
        with pytest.raises(anthropic.BadRequestError, match="TIFF is not supported"):
            client.messages.create(max_tokens=6, **asked)
