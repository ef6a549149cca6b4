"""Fault 43 with real engines: whatever is sent as a picture or a recording, the daemon and the engines are the same
processes at the end. And projectors that do not fit take the model's sight, and nothing else."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from localrun.models.gguf.reader import read_header
from tests.daemon import Daemon, running_daemon
from tests.depth import DEPTH
from tests.engine.native.media import make_pair
from tests.faults.test_requests import refusal
from tests.projector_file import changed, parts_of, write_parts, write_projector
from tests.says import says
from tests.server.media import making
from tests.server.media.test_decoder import BOMBS, mutated

PNG = making.png(64, 48)
WAV = making.wave(making.tone(8000))
SEEING = ("gemma3", "qwen2vl")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("models")
    for kind in (*SEEING, "ultravox"):
        make_pair(folder, kind).projector.rename(folder / f"mmproj-{kind}.gguf")
    with running_daemon(
        "--slots", "4", "--kv-cells", "4096", "--max-models", "3", fake=False, LOCALRUN_MODELS=str(folder)
    ) as running:
        for kind in SEEING:
            assert asked(running, kind, PNG).status_code == 200
        assert asked(running, "ultravox", WAV).status_code == 200
        yield running
        assert "Traceback" not in running.log


def asked(daemon: Daemon, model: str, *files: bytes, prompt: str = "x") -> Any:
    images = [base64.b64encode(data).decode() for data in files]
    options = {"num_predict": 1, "temperature": 0}
    return daemon.post("/api/generate", model=model, prompt=prompt, images=images, stream=False, options=options)


def engines(daemon: Daemon) -> dict[str, int]:
    """Their process ids, by model."""
    return {row["model"]: row["pid"] for row in daemon.http.get("/localrun/v1/snapshot").json()["engines"]}


def is_answered(daemon: Daemon, model: str, data: bytes) -> bool:
    """By this model, or, if it is sound, by the one that hears. What is not answered is refused as it must be."""
    answer = asked(daemon, model, data)
    if answer.status_code == 400 and "but no sound" in refusal(answer):
        answer = asked(daemon, "ultravox", data)
    assert answer.status_code == 200 or refusal(answer).startswith("images[0]: ")
    return bool(answer.status_code == 200)


def test_what_must_not_kill_anything(daemon: Daemon) -> None:
    before = engines(daemon)
    assert len(before) == 3
    for data in BOMBS.values():
        is_answered(daemon, "gemma3", data)
    for model in SEEING:
        many = asked(daemon, model, *(making.png(40 + number, 40) for number in range(17)))
        assert many.status_code == 200 or "images" in refusal(many)
        for text in ("<__media__>", "<__image__>[img-0]<start_of_image>", "<|vision_start|><|image_pad|>"):
            assert asked(daemon, model, PNG, prompt=text).status_code == 200, text
        for size in ((1, 1), (1, 3000), (3000, 1), (5, 7)):
            assert asked(daemon, model, making.png(*size)).status_code in (200, 400), size
    assert engines(daemon) == before


def test_mutated_files_end_no_process(daemon: Daemon) -> None:
    before, chance, n_files = engines(daemon), random.Random(16), 100 * DEPTH
    with ThreadPoolExecutor(8) as clients:
        files = [mutated(chance) for _ in range(n_files)]
        n_answered = sum(clients.map(lambda data: is_answered(daemon, SEEING[len(data) % 2], data), files))
    assert n_files // 10 < n_answered < n_files * 9 // 10
    assert engines(daemon) == before
    assert daemon.process.poll() is None


@pytest.fixture(scope="module")
def misfits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One model with many projectors: two that fit, a large one, and three that cannot be used."""
    folder = tmp_path_factory.mktemp("misfits")
    model = make_pair(folder, "gemma3").model
    width = read_header(model).n_embd
    parts = parts_of("gemma3", width)
    projectors = {
        "wide": parts_of("gemma3", width + 64), "lacking": changed(parts, without="mm.input_projection.weight"),
        "typed": parts._replace(i32={"clip.vision.block_count"}),
    }  # fmt: skip
    for name, made in projectors.items():
        write_parts(folder / f"mmproj-{name}.gguf", made)
    write_projector(folder / "mmproj-one.gguf", "gemma3", width, seed=1)
    write_projector(folder / "mmproj-other.gguf", "gemma3", width, seed=2)
    # 1,024 rows that attend to each other, where a batch of prompts has 512.
    write_projector(folder / "mmproj-large.gguf", "gemma3", width, image=128, patch=4, scale=1)
    for path in folder.glob("mmproj-*.gguf"):
        (folder / f"{path.stem.removeprefix('mmproj-')}.gguf").hardlink_to(model)
    model.unlink()
    (folder / "gemma3-mmproj.gguf").unlink()
    with running_daemon("--slots", "2", "--kv-cells", "4096", fake=False, LOCALRUN_MODELS=str(folder)) as running:
        yield running


@pytest.mark.parametrize("model", ["wide", "lacking", "typed"])
def test_a_projector_that_does_not_fit_leaves_the_model_for_text(misfits: Daemon, model: str) -> None:
    assert asked(misfits, model).status_code == 200
    assert model in refusal(asked(misfits, model, PNG))
    assert asked(misfits, model).status_code == 200
    assert misfits.process.poll() is None


def test_a_chunk_larger_than_a_batch_is_refused_with_both_numbers(misfits: Daemon) -> None:
    assert says(refusal(asked(misfits, "large", PNG)), "1024 tokens", "at most 512", "--batch-tokens")
    assert asked(misfits, "large").status_code == 200


def test_the_same_picture_under_two_projectors_is_not_the_same(misfits: Daemon) -> None:
    def logprobs(model: str) -> list[float]:
        body = {"model": model, "prompt": "what? " * 40, "images": [base64.b64encode(PNG).decode()], "logprobs": True}
        options = {"num_predict": 8, "temperature": 0}
        answer = misfits.post("/api/generate", body | {"stream": False, "options": options})
        return [token["logprob"] for token in answer.json()["logprobs"]]

    one, other = logprobs("one"), logprobs("other")
    assert one != pytest.approx(other, abs=0.1)
    # What is taken from the cache rounds differently.
    assert logprobs("one") == pytest.approx(one, abs=0.03)
    assert logprobs("other") == pytest.approx(other, abs=0.03)
