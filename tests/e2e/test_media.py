"""Pictures and sound through the whole program: a daemon, real engines, small models with projectors of random numbers.

The models say nothing that means anything. What counts is that another picture gives another answer, the same one the
same answer and nothing computed twice, by every API, after the death of an engine and of the decoding worker.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import localrun
from tests.daemon import Daemon, running_daemon
from tests.engine.native.media import make_pair
from tests.server.batches.batch_files import begun, client_of, encoded, ended, lines_of
from tests.server.media import making

KINDS = ("gemma3", "qwen2vl", "ultravox")
PICTURES = [base64.b64encode(making.png(64 + 16 * n, 48)).decode() for n in range(3)]
RECORDINGS = [base64.b64encode(making.wave(making.tone(n * 4000))).decode() for n in (1, 2)]
GREEDY = {"temperature": 0, "num_predict": 8}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        pair = make_pair(folder, kind, image=64)
        pair.projector.rename(folder / f"mmproj-{kind}.gguf")
    with running_daemon(
        "--slots", "4", "--kv-cells", "4096", fake=False, LOCALRUN_THREADS="1", LOCALRUN_MODELS=str(folder)
    ) as running:
        yield running
        assert "Traceback" not in running.log


def said(daemon: Daemon, model: str, *images: str, prompt: str = "what?", **fields: Any) -> Any:
    answer = daemon.post(
        "/api/generate", model=model, prompt=prompt, images=list(images), stream=False, options=GREEDY, logprobs=True,
        **fields,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    return answer.json()


def numbers(answer: Any) -> tuple[float, ...]:
    """How probable each token was: random models say the same of much."""
    return tuple(round(token["logprob"], 3) for token in answer["logprobs"])


def engines(daemon: Daemon) -> list[int]:
    """Their process ids."""
    return [row["pid"] for row in daemon.http.get("/localrun/v1/snapshot").json()["engines"]]


def worker_of(daemon: Daemon) -> int:
    children = psutil.Process(daemon.process.pid).children(recursive=True)
    return next(child.pid for child in children if "localrun.server.media.worker" in child.cmdline())


@pytest.mark.parametrize("model", ["gemma3", "qwen2vl"])
def test_a_picture_counts_and_the_same_one_is_not_computed_again(daemon: Daemon, model: str) -> None:
    prompt = "tell me what it is. " * 10
    blind, first, second = (said(daemon, model, *some, prompt=prompt) for some in ([], PICTURES[:1], PICTURES[1:2]))
    assert first["prompt_eval_count"] > blind["prompt_eval_count"]
    assert len({numbers(answer) for answer in (blind, first, second)}) == 3
    again = said(daemon, model, PICTURES[0], prompt=prompt)
    assert again["response"] == first["response"]
    assert again["prompt_eval_count"] == first["prompt_eval_count"]
    assert again["prompt_eval_cached_count"] > first["prompt_eval_count"] * 0.8
    assert second["prompt_eval_cached_count"] < first["prompt_eval_count"] * 0.2


def test_sound_counts(daemon: Daemon) -> None:
    first, second = (said(daemon, "ultravox", recording) for recording in RECORDINGS)
    assert numbers(first) != numbers(second)
    assert said(daemon, "ultravox", RECORDINGS[0])["response"] == first["response"]
    refused = daemon.post("/api/generate", model="ultravox", prompt="x", images=PICTURES[:1], stream=False)
    assert refused.status_code == 400
    assert refused.json()["error"] == "images[0]: 'ultravox' takes sound, but no images; leave it out"


def test_every_api_sees_the_same(daemon: Daemon) -> None:
    uri = f"data:image/png;base64,{PICTURES[0]}"
    common = {"model": "gemma3", "temperature": 0}
    chat = daemon.post(
        "/v1/chat/completions",
        common | {"max_tokens": 8, "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "what?"}]}]},
    ).json()  # fmt: skip
    source = {"type": "base64", "media_type": "image/png", "data": PICTURES[0]}
    messages = common | {"messages": [{"role": "user", "content": [
        {"type": "image", "source": source}, {"type": "text", "text": "what?"}]}]}  # fmt: skip
    claude = daemon.post("/v1/messages", messages | {"max_tokens": 8}).json()
    response = daemon.post(
        "/v1/responses",
        common | {"max_output_tokens": 8, "input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": uri}, {"type": "input_text", "text": "what?"}]}]},
    ).json()  # fmt: skip
    generated = said(daemon, "gemma3", PICTURES[0])
    texts = {
        generated["response"], chat["choices"][0]["message"]["content"], claude["content"][0]["text"],
        response["output"][0]["content"][0]["text"],
    }  # fmt: skip
    assert len(texts) == 1
    n_prompt = generated["prompt_eval_count"]
    assert chat["usage"]["prompt_tokens"] == response["usage"]["input_tokens"] == n_prompt
    assert daemon.post("/v1/messages/count_tokens", messages).json()["input_tokens"] == n_prompt
    assert claude["usage"]["input_tokens"] + claude["usage"]["cache_read_input_tokens"] == n_prompt


def test_llama_server_s_completion_sees_the_same(daemon: Daemon) -> None:
    raw = said(daemon, "gemma3", PICTURES[0], raw=True)

    def completed(*texts: str) -> Any:
        prompts = [{"prompt_string": text, "multimodal_data": PICTURES[: text.count("<__media__>")]} for text in texts]
        answer = daemon.post("/completion", model="gemma3", prompt=prompts, temperature=0, n_predict=8)
        assert answer.status_code == 200, answer.text
        return answer.json()

    one = completed("<__media__>what?")
    assert (one["content"], one["tokens_evaluated"]) == (raw["response"], raw["prompt_eval_count"])
    assert one["prompt"] == "[img-0]what?"
    assert [each["content"] for each in completed("<__media__>what?", "<__media__>what?")] == [one["content"]] * 2
    assert completed("<__media__>and<__media__>?")["prompt"] == "[img-0]and[img-1]?"
    for body, field in (
        ({"model": "gemma3", "prompt": "what?", "multimodal_data": PICTURES[:1]}, "multimodal_data"),
        ({"model": "gemma3", "prompt": "what?", "image_data": [{"data": PICTURES[0], "id": 1}]}, "image_data"),
        ({"model": "gemma3", "prompt": {"prompt_string": "<__media__>", "multimodal_data": ["aGk="]}},
         "prompt.multimodal_data[0]"),
        ({"model": "ultravox", "prompt": {"prompt_string": "<__media__>", "multimodal_data": PICTURES[:1]}},
         "prompt.multimodal_data[0]"),
    ):  # fmt: skip
        refused = daemon.post("/completion", body)
        assert (refused.status_code, refused.json()["error"]["field"]) == (400, field)


def test_a_line_of_a_batch_sees_what_a_request_sees(daemon: Daemon) -> None:
    def asked(data: str) -> dict[str, Any]:
        content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]
        message = {"role": "user", "content": [*content, {"type": "text", "text": "what?"}]}
        return {"model": "gemma3", "temperature": 0, "max_tokens": 8, "messages": [message]}

    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": asked(data)}
        for name, data in (("first", PICTURES[0]), ("second", PICTURES[1]), ("broken", "aGk="))
    ]
    with client_of(daemon) as client:
        batch = ended(client, begun(client, encoded(lines)))
        output = lines_of(client, batch.output_file_id)
        (refused,) = lines_of(client, batch.error_file_id)
    assert [line["custom_id"] for line in output] == ["first", "second"]
    for line, picture in zip(output, PICTURES, strict=False):
        same = daemon.post("/v1/chat/completions", asked(picture)).json()["choices"][0]["message"]["content"]
        assert line["response"]["body"]["choices"][0]["message"]["content"] == same
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("broken", 400)


@pytest.mark.skipif(not shutil.which("curl") or not shutil.which("base64"), reason="needs curl and base64")
def test_the_command_of_the_page_sends_a_photo(daemon: Daemon, tmp_path: Path) -> None:
    """It is larger than what one argument of a command may be."""
    page = Path(localrun.__file__).parent / "docs" / "media-and-tools.md"
    command = re.findall(r"```sh\n(\(printf.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]
    command = command.replace("http://127.0.0.1:11434", daemon.url).replace("gemma3:4b", "gemma3")
    photo = making.encoded(making.noise(800, 600), "JPEG")
    assert len(photo) > 200_000
    (tmp_path / "photo.jpg").write_bytes(photo)
    ran = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    assert answers, ran.stderr
    assert answers[-1].get("prompt_eval_count", 0) > 30, answers


def test_several_pictures_in_several_turns(daemon: Daemon) -> None:
    turns = [
        {"role": "user", "content": "a [img] b [img]", "images": PICTURES[:2]}, {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d", "images": PICTURES[2:]},
    ]  # fmt: skip

    def ask(*messages: dict[str, Any]) -> Any:
        body = {"model": "qwen2vl", "messages": list(messages), "stream": False, "options": GREEDY}
        answer = daemon.post("/api/chat", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    whole = ask(*turns)
    assert ask(*turns)["message"] == whole["message"]
    other = [turns[0] | {"images": PICTURES[1::-1]}, *turns[1:]]
    assert ask(*other)["message"] != whole["message"]


def test_the_death_of_the_worker_or_of_an_engine_loses_no_picture(daemon: Daemon) -> None:
    wanted = said(daemon, "gemma3", PICTURES[2])["response"]
    os.kill(worker_of(daemon), signal.SIGKILL)
    fresh = base64.b64encode(making.png(100, 100)).decode()
    assert said(daemon, "gemma3", fresh)["response"]
    for pid in engines(daemon):
        os.kill(pid, signal.SIGKILL)
    assert said(daemon, "gemma3", PICTURES[2])["response"] == wanted


def test_what_is_hostile_ends_no_engine(daemon: Daemon) -> None:
    said(daemon, "gemma3", PICTURES[0])
    before = engines(daemon)
    hostile = [
        making.png(90, 90)[:-300], making.png_header(20000, 20000), making.gif_header(9, 9, frame=(65535, 65535)), b"",
        making.wave(b"\0\0"), making.wave(making.tone(), rate_hz=1), making.png_header(6000, 6000, data=b"\0" * 100),
    ]  # fmt: skip
    for data in hostile:
        body = {"model": "gemma3", "prompt": "x", "images": [base64.b64encode(data).decode()], "stream": False}
        answer = daemon.post("/api/generate", body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"].startswith("images[0]: ")
    thin = [base64.b64encode(making.png(*size)).decode() for size in ((1, 1), (1, 3000), (3000, 1), (5, 7))]
    for picture in thin:
        for model in ("gemma3", "qwen2vl"):
            answer = daemon.post(
                "/api/generate", model=model, prompt="x", images=[picture], stream=False, options=GREEDY
            )
            assert answer.status_code in (200, 400), answer.text
    after = engines(daemon)
    assert set(before) <= set(after)


def test_nothing_is_left_behind(daemon: Daemon) -> None:
    """After the others: the folder has this daemon's files alone, and none is in use."""
    folders = [path for path in Path(daemon.home, "cache", "media").iterdir() if path.is_dir()]
    assert [path.name.partition("-")[0] for path in folders] == [str(daemon.process.pid)]
