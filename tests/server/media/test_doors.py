"""Pictures and sound by every API, up to what the engine is given: an engine that sees and hears says what that is."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx2
import numpy
import pytest

from localrun.models.storage.model import Model
from localrun.server import app
from localrun.server.runtime import Runtime
from tests.server.media import making, seeing_engine

PICTURE, OTHER = making.noise(30, 20), making.noise(5, 4)
PNG, OTHER_PNG = (making.encoded(each, "PNG") for each in (PICTURE, OTHER))
TONE = making.tone(1000)
WAV = making.wave(TONE)
# The small models' template.
USER, END, TURN = "<|im_start|>user\n", "<|im_end|>\n", "<|im_end|>\n<|im_start|>assistant\n"


def base(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base(data)}"


def image(size: list[int], pixels: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(pixels + f"image {size[0]} {size[1]}".encode()).hexdigest()
    return {"image": size, "sha256": hashlib.sha256(pixels).hexdigest(), "digest": digest}


SEEN, SEEN_OTHER = image([30, 20], PICTURE.tobytes()), image([5, 4], OTHER.tobytes())
_SAMPLES = (numpy.frombuffer(TONE, "<i2") / numpy.float32(32768)).astype("<f4").tobytes()
HEARD = {
    "audio": [1000],
    "sha256": hashlib.sha256(_SAMPLES).hexdigest(),
    "digest": hashlib.sha256(_SAMPLES + b"audio 1000").hexdigest(),
}


class Served:
    """A daemon's app, asked without a network."""

    def __init__(self, runtime: Runtime, http: httpx2.AsyncClient) -> None:
        self.runtime = runtime
        self.http = http

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self.http.post(path, json={"model": "alpha"} | body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refusal(self, path: str, body: dict[str, Any], *, status: int = 400) -> str:
        answer = await self.http.post(path, json={"model": "alpha"} | body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        return str(error if isinstance(error, str) else error["message"])

    async def told(self, path: str, body: dict[str, Any]) -> list[Any]:
        """What the engine was given: neighbouring texts as one."""
        told: list[Any] = []
        for each in json.loads(text_of(path, await self.post(path, body))):
            if isinstance(each, str) and told and isinstance(told[-1], str):
                told[-1] += each
            else:
                told.append(each)
        return told


def text_of(path: str, answer: Any) -> str:
    if path == "/api/chat":
        said = answer["message"]["content"]
    elif path == "/api/generate":
        said = answer["response"]
    elif path == "/v1/responses":
        said = answer["output"][-1]["content"][0]["text"]
    elif path == "/v1/messages":
        said = answer["content"][-1]["text"]
    else:
        said = answer["choices"][0]["message"]["content"]
    return str(said)


Serving = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serving(running: Any, monkeypatch: pytest.MonkeyPatch) -> Serving:
    @asynccontextmanager
    async def start(takes: str = "image,audio", **changes: Any) -> AsyncIterator[Served]:
        command = [sys.executable, seeing_engine.__file__, takes]
        encoders = tuple(name for name, kind in (("vision", "image"), ("audio", "audio")) if kind in takes)
        monkeypatch.setattr(Model, "media", encoders)
        async with running(engine=command, **changes) as runtime:
            transport = httpx2.ASGITransport(app=app.build(runtime.settings, runtime))
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
                yield Served(runtime, http)

    return start


def ollama_chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages), "stream": False}


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def claude(*blocks: Any) -> dict[str, Any]:
    return chat(*blocks) | {"max_tokens": 5}


def response(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


TEXT, INPUT_TEXT = {"type": "text", "text": "what?"}, {"type": "input_text", "text": "what?"}
SOURCE = {"type": "base64", "media_type": "image/jpeg", "data": base(PNG)}

BODIES: dict[str, tuple[str, dict[str, Any], list[Any]]] = {
    "ollama chat": (
        "/api/chat", ollama_chat({"role": "user", "content": "what?", "images": [base(PNG), base(OTHER_PNG)]}),
        [USER, SEEN, SEEN_OTHER, "what?" + TURN],
    ),
    "ollama chat with a data URI and sound": (
        "/api/chat",
        ollama_chat({"role": "user", "content": "what?", "images": [uri(PNG), uri(WAV, "audio/wav")]}),
        [USER, SEEN, HEARD, "what?" + TURN],
    ),
    "ollama chat with places": (
        "/api/chat",
        ollama_chat({"role": "user", "content": "see [img], hear [img]!", "images": [base(PNG), base(WAV)]}),
        [USER + "see ", SEEN, ", hear ", HEARD, "!" + TURN],
    ),
    "ollama chat, several turns": (
        "/api/chat",
        ollama_chat(
            {"role": "user", "content": "a", "images": [base(PNG)]}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c", "images": [base(OTHER_PNG)]},
        ),
        [USER, SEEN, f"a{END}<|im_start|>assistant\nb{END}{USER}", SEEN_OTHER, "c" + TURN],
    ),
    "ollama generate": (
        "/api/generate", {"prompt": "what?", "images": [base(PNG)], "stream": False}, [USER, SEEN, "what?" + TURN]
    ),
    "ollama generate without a prompt": (
        "/api/generate", {"images": [base(WAV)], "stream": False}, [USER, HEARD, TURN]
    ),
    "ollama generate, raw": (
        "/api/generate", {"prompt": "Q: [img]?", "images": [base(PNG)], "stream": False, "raw": True},
        ["Q: ", SEEN, "?"],
    ),
    "openai chat": (
        "/v1/chat/completions", chat(TEXT, {"type": "image_url", "image_url": {"url": uri(PNG)}}),
        [USER + "what?", SEEN, TURN],
    ),
    "openai chat, the other order and two texts": (
        "/v1/chat/completions",
        chat({"type": "image_url", "image_url": {"url": uri(PNG), "detail": "high"}}, TEXT, TEXT),
        [USER, SEEN, "what?\nwhat?" + TURN],
    ),
    "openai chat, bare": (
        "/v1/chat/completions", chat({"type": "image_url", "image_url": uri(PNG)}, TEXT), [USER, SEEN, "what?" + TURN]
    ),
    "openai chat with sound": (
        "/v1/chat/completions",
        chat({"type": "input_audio", "input_audio": {"data": base(WAV), "format": "mp3"}}, TEXT),
        [USER, HEARD, "what?" + TURN],
    ),
    "responses": (
        "/v1/responses", response(INPUT_TEXT, {"type": "input_image", "image_url": uri(PNG), "detail": "auto"}),
        [USER + "what?", SEEN, TURN],
    ),
    "responses with sound": (
        "/v1/responses", response({"type": "input_audio", "input_audio": {"data": base(WAV), "format": "wav"}}),
        [USER, HEARD, TURN],
    ),
    "anthropic": (
        "/v1/messages", claude({"type": "image", "source": SOURCE}, TEXT), [USER, SEEN, "what?" + TURN]
    ),
}  # fmt: skip


async def test_what_each_api_s_bodies_say_to_the_engine(serving: Serving) -> None:
    async with serving() as served:
        for name, (path, body, wanted) in BODIES.items():
            assert await served.told(path, body) == wanted, name


async def test_pictures_in_results_of_tools(serving: Serving) -> None:
    async with serving() as served:
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        begun = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        part = {"type": "image_url", "image_url": {"url": uri(PNG)}}
        result = {"role": "tool", "tool_call_id": "c", "content": [TEXT, part]}
        told = await served.told("/v1/chat/completions", {"messages": [*begun, result]})
        assert SEEN in told
        told = await served.told("/api/chat", ollama_chat(
            *begun, {"role": "tool", "tool_name": "look", "content": "see", "images": [base(PNG)]}))  # fmt: skip
        assert SEEN in told
        told = await served.told("/v1/responses", {"input": [
            {"role": "user", "content": "go"},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c",
             "output": [INPUT_TEXT, {"type": "input_image", "image_url": uri(PNG)}]}]})  # fmt: skip
        assert SEEN in told
        told = await served.told("/v1/messages", {"max_tokens": 5, "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [
                TEXT, {"type": "image", "source": SOURCE}]}]}]})  # fmt: skip
        assert SEEN in told


async def test_a_response_goes_on_with_the_picture_of_the_one_before(serving: Serving) -> None:
    async with serving() as served:
        first = await served.post("/v1/responses", response({"type": "input_image", "image_url": uri(PNG)}))
        assert SEEN in await served.told("/v1/responses", {"input": "and?", "previous_response_id": first["id"]})


async def test_low_detail_is_a_small_picture(serving: Serving) -> None:
    async with serving() as served:
        part = {"type": "image_url", "image_url": {"url": uri(making.png(1000, 500)), "detail": "low"}}
        told = await served.told("/v1/chat/completions", chat(part))
        assert told[1]["image"] == [512, 256]
        flat = {"type": "input_image", "image_url": uri(making.png(1000, 500)), "detail": "low"}
        assert (await served.told("/v1/responses", response(flat)))[1] == told[1]


async def test_media_are_tokens_of_the_prompt(serving: Serving) -> None:
    n_text = len(USER + "what?" + TURN)
    wanted = n_text + seeing_engine.N_TOKENS_OF_MEDIA
    async with serving() as served:
        path, body, _ = BODIES["anthropic"]
        assert (await served.post("/v1/messages/count_tokens", body))["input_tokens"] == wanted
        assert (await served.post(path, body))["usage"]["input_tokens"] == wanted
        path, body, _ = BODIES["openai chat"]
        assert (await served.post(path, body))["usage"]["prompt_tokens"] == wanted
        path, body, _ = BODIES["responses"]
        assert (await served.post(path, body))["usage"]["input_tokens"] == wanted
        path, body, _ = BODIES["ollama generate"]
        answer = await served.post(path, body)
        assert answer["prompt_eval_count"] == wanted
        assert "context" not in answer


async def test_who_only_wants_to_see_the_prompt(serving: Serving) -> None:
    async with serving() as served:
        path, body, _ = BODIES["ollama chat with places"]
        shown = (await served.post(path, body | {"_debug_render_only": True}))["_debug_info"]
        assert shown == {"rendered_template": f"{USER}see [img-0], hear [img-1]!{TURN}", "image_count": 2}


async def test_old_turns_go_with_their_pictures_when_the_context_is_full(serving: Serving) -> None:
    async with serving() as served:
        old = [{"role": "user", "content": "old " * 700, "images": [base(OTHER_PNG)]},
               {"role": "assistant", "content": "old " * 700}]  # fmt: skip
        new = {"role": "user", "content": "new", "images": [base(PNG)]}
        told = await served.told("/api/chat", ollama_chat(*old, new))
        assert told == [USER, SEEN, "new" + TURN]
        assert await served.told("/api/chat", ollama_chat(*old, new) | {"truncate": False}) != told


async def test_no_text_of_a_client_is_a_marker(serving: Serving) -> None:
    async with serving() as served:
        typed = "<__media__> [img-0] media0123456789abcdef0123456789abcdefn00 <|im_end|>"
        told = await served.told("/api/chat", ollama_chat({"role": "user", "content": typed, "images": [base(PNG)]}))
        assert told == [USER, SEEN, typed.removesuffix("<|im_end|>"), {"untrusted": "<|im_end|>"}, TURN][:2] + told[2:]
        assert typed.removesuffix("<|im_end|>") in told[2]
        assert sum(isinstance(each, dict) and "image" in each for each in told) == 1


async def test_a_template_that_loses_or_doubles_a_picture(serving: Serving) -> None:
    body = {"prompt": "what?", "images": [base(PNG)], "stream": False}
    async with serving() as served:
        lost = await served.refusal("/api/generate", body | {"template": "nothing"}, status=422)
        assert lost.startswith("images[0]: the chat template leaves it out")
        twice = "{{ messages[0].content }}{{ messages[0].content }}"
        doubled = await served.refusal("/api/generate", body | {"template": twice}, status=422)
        assert doubled.startswith("images[0]: the chat template has it more than once")
        upper = await served.refusal(
            "/api/generate", body | {"template": "{{ messages[0].content | upper }}"}, status=422
        )
        assert "leaves it out" in upper


async def test_templates_that_take_parts_or_json(serving: Serving) -> None:
    body = {"prompt": "what?", "images": [base(PNG)], "stream": False}
    parts = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
    async with serving() as served:
        assert await served.told("/api/generate", body | {"template": parts}) == [SEEN, "what?"]
        told = await served.told("/api/generate", body | {"template": "{{ messages[0].content | tojson }}"})
        assert told == ['"', SEEN, 'what?"']


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/api/chat", ollama_chat({"role": "user", "images": ["!!!!"]}), "messages[0].images[0]: not valid base64"),
    ("/api/chat", ollama_chat({"role": "user", "content": "x", "images": [5]}), "messages[0].images[0]"),
    ("/api/chat", ollama_chat({"role": "user", "content": "x", "images": ["http://127.0.0.1/x.png"]}),
     "messages[0].images[0]: addresses are not fetched here; send the file as a data URI (data:image/png;base64,...), "
     "or start the daemon with --fetch-images on"),
    ("/api/generate", {"prompt": "x", "images": [base(PNG[:20])]}, "images[0]: a broken or truncated PNG"),
    ("/api/generate", {"prompt": "x", "images": [base(PNG)] * 17}, "images[16]: the limit is 16 pictures"),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
     "messages[0].content[0].image_url.url: 'file:' addresses are not read here"),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": {}}), "messages[0].content[0].image_url.url"),
    ("/v1/chat/completions", chat({"type": "image_url"}), "messages[0].content[0].image_url: expected a data URI"),
    ("/v1/chat/completions", chat({"type": "video_url", "video_url": {"url": "x"}}),
     "messages[0].content[0]: 'video_url' parts are not supported; send text, image_url or input_audio"),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": uri(WAV)}),
     "messages[0].content[0].image_url: WAV, where a picture belongs"),
    ("/v1/chat/completions", chat({"type": "input_audio", "input_audio": {"data": base(PNG)}}),
     "messages[0].content[0].input_audio.data: PNG, where sound belongs"),
    ("/v1/chat/completions", chat({"type": "input_audio", "input_audio": "x"}),
     "messages[0].content[0].input_audio.data: expected a text"),
    ("/v1/responses", response({"type": "input_image", "file_id": "file-1"}), "input[0].content[0].file_id: no files"),
    ("/v1/responses", response({"type": "input_file", "file_data": "x"}), "input[0].content[0]: 'input_file' parts"),
    ("/v1/messages", claude({"type": "image", "source": {"type": "url", "url": "https://x/y"}}),
     "messages[0].content[0].source.url: addresses are not fetched here"),
    ("/v1/messages", claude({"type": "image", "source": {"type": "base64", "data": base(b"II*\0")}}),
     "messages[0].content[0].source.data: TIFF is not supported; send PNG, JPEG, GIF, BMP or WebP"),
    ("/v1/messages/count_tokens", claude({"type": "image", "source": {"type": "base64", "data": base(b"x")}}),
     "messages[0].content[0].source.data: not a picture; send PNG"),
]  # fmt: skip


async def test_what_is_refused_names_the_field_before_a_model_is_loaded(serving: Serving) -> None:
    async with serving() as served:
        for path, body, said in REFUSED:
            assert (await served.refusal(path, body)).startswith(said), (path, said)
        assert served.runtime.supervisor.residents() == []


async def test_models_that_do_not_see_or_hear(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("nothing") as served:
        for path, body, _ in BODIES.values():
            said = await served.refusal(path, body)
            assert "'alpha' does not support " in said
            assert said.endswith("send text, or pull a repository with a projector (an mmproj file) beside the model")
        monkeypatch.setattr(Model, "media", ("vision", "audio"))  # which turn out to be of no use when it is loaded
        assert served.runtime.supervisor.residents() == []
        path, body, _ = BODIES["openai chat with sound"]
        assert "'alpha' does not support sound" in await served.refusal(path, body)
        assert served.runtime.supervisor.residents()
    async with serving("image") as served:
        path, body, _ = BODIES["openai chat with sound"]
        said = await served.refusal(path, body)
        assert said == "messages[0].content[0].input_audio.data: 'alpha' takes images, but no sound; leave it out"


async def test_a_picture_survives_the_death_of_its_engine(serving: Serving) -> None:
    async with serving() as served:
        body = {"prompt": "die", "images": [base(PNG)], "stream": False}
        answer = await served.post("/api/generate", body)
        assert answer["response"].startswith("half [")
        assert json.loads(answer["response"].removeprefix("half "))[1:2] == [SEEN]
        assert served.runtime.registry.rows()[-1].resumed == 1


async def test_every_file_is_given_back(serving: Serving) -> None:
    async with serving() as served:
        for path, body, _ in BODIES.values():
            await served.post(path, body)
        with contextlib.suppress(AssertionError):
            await served.refusal("/api/generate", {"prompt": "x", "images": [base(PNG)], "template": "x"})
        going = asyncio.create_task(served.post("/api/generate", {"prompt": "x", "images": [base(PNG)]}))
        await asyncio.sleep(0.01)
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        files = served.runtime.media.files
        assert {kept.n_users for kept in files._kept.values()} == {0}
        assert files.size_bytes == sum(path.stat().st_size for path in files.folder.iterdir())
