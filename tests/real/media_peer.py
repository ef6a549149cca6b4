"""Answers about pictures and sound, against llama-server's on the same files.

    python -m tests.real.media_peer --server BUILD/bin/llama-server [--only gemma3,qwen2vl]

The models and projectors are small and random, one of each kind of rows and of memory (`tests/engine/native/media.py`).
llama-server answers each question once, with nothing kept. localrun answers it in split cells and in one pool: cold,
again, and after a restart with what was on the disk; text, number of prompt tokens and log-probabilities must be the
same. `make bench-peer` builds a llama-server of the pinned llama.cpp, which is the one to compare with.

A token in the middle of a character is in localrun's list of log-probabilities, as OpenAI has it (`bytes`).
llama-server leaves it out and gives its bytes to the next one, so that is done here. Where an answer ends in the middle
of one, localrun says a replacement character and llama-server nothing, so that character is left out. Where two tokens
are equally likely but for `BOUND`, either may be chosen, and what follows is not compared.
"""

from __future__ import annotations

import argparse
import base64
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from tests.daemon import running_daemon
from tests.engine.native.media import PAIRS, Pair, make_pair
from tests.server.media import making

BOUND = 0.03
N_PREDICT = 24
START_TIMEOUT_S = 60
LONG = "this is a long text about nothing at all that goes on and on " * 8
LAYOUTS = {"split": 4, "one pool": 1}  # and how many slots


class Answer(NamedTuple):
    """The chosen `tokens`, how likely each was, and by how much likelier than the next one."""

    text: str
    n_prompt: int
    n_cached: int
    tokens: list[bytes]
    logprobs: list[float]
    leads: list[float]


def questions(pair: Pair) -> list[list[dict[str, Any]]]:
    """Contents of one user message each: one picture, another, and both."""
    if pair.hears:
        sounds = [making.wave(making.tone(16_000 + more)) for more in (0, 4000)]
        one, other = (_part("input_audio", {"data": _base64(sound), "format": "wav"}) for sound in sounds)
    else:
        pictures = [making.png(width, height) for width, height in ((70, 50), (640, 480))]
        one, other = (_part("image_url", {"url": f"data:image/png;base64,{_base64(picture)}"}) for picture in pictures)
    long, what, both = (_part("text", text) for text in (LONG, "what is this?", "and these?"))
    return [[long, one, what], [long, other, what], [one, long, other, both]]


def _part(kind: str, value: object) -> dict[str, Any]:
    return {"type": kind, kind: value}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def ask(http: httpx2.Client, model: str, content: list[dict[str, Any]], **more: object) -> Answer:
    """Raises AssertionError with what the server said if it refuses."""
    body = {
        "model": model, "messages": [{"role": "user", "content": content}], "max_tokens": N_PREDICT, "temperature": 0,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    answer = http.post("/v1/chat/completions", json=body | more)
    assert answer.status_code == 200, answer.text[:500]
    choice, usage = answer.json()["choices"][0], answer.json()["usage"]
    chosen = _without_halves(choice["logprobs"]["content"])
    return Answer(
        choice["message"]["content"].rstrip("\ufffd"), usage["prompt_tokens"],
        n_cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        tokens=[bytes(token["bytes"]) for token in chosen],
        logprobs=[token["logprob"] for token in chosen],
        leads=[token["top_logprobs"][0]["logprob"] - token["top_logprobs"][1]["logprob"] for token in chosen],
    )  # fmt: skip


def _without_halves(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As llama-server lists them: bytes of characters that are not complete belong to the next token."""
    kept, begun = [], b""
    for token in tokens:
        begun += bytes(token["bytes"])
        tail = begun[:-4:-1]  # the last byte first
        is_half = any(lead <= byte < 0xF8 for byte, lead in zip(tail, (0xC0, 0xE0, 0xF0), strict=False))
        if begun and not is_half:  # an end has no bytes
            kept.append(token | {"bytes": begun})
            begun = b""
    return kept


def difference(answer: Answer, expected: Answer) -> float | None:
    """The largest one of log-probabilities, up to where either of two tokens may be chosen. None if they differ."""
    if answer.n_prompt != expected.n_prompt:
        return None
    largest = 0.0
    for at, lead in enumerate(expected.leads[: len(answer.tokens)]):
        if answer.tokens[at] != expected.tokens[at]:
            return largest if lead < BOUND else None
        largest = max(largest, abs(answer.logprobs[at] - expected.logprobs[at]))
    return largest if answer.text == expected.text and largest < BOUND else None


@contextmanager
def llama_server(server: Path, pair: Pair, log: Path) -> Iterator[httpx2.Client]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--port", str(port), "-c", "4096", "-np", "1", "-t", "1", "--no-webui"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [str(server), "-m", str(pair.model), "--mmproj", str(pair.projector), *options],
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False) as http:
            ends_s = time.monotonic() + START_TIMEOUT_S
            while not _is_up(http):
                is_coming = process.poll() is None and time.monotonic() < ends_s
                assert is_coming, log.read_text(errors="replace")[-2000:]
                time.sleep(0.1)
            yield http
    finally:
        process.terminate()
        process.wait()


def _is_up(http: httpx2.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx2.TransportError:
        return False


class Comparison:
    """Answers of each model, in the order of `questions`; `n_wrong` counts those that are not llama-server's."""

    def __init__(self, pairs: dict[str, Pair], expected: dict[str, list[Answer]]) -> None:
        self._pairs = pairs
        self._expected = expected
        self.n_wrong = 0

    def run(self, http: httpx2.Client, layout: str, state: str) -> None:
        for name, pair in self._pairs.items():
            answers = [ask(http, name, content) for content in questions(pair)]
            differences = list(map(difference, answers, self._expected[name]))
            n_wrong = differences.count(None)
            n_same = sum(ours.text == theirs.text for ours, theirs in zip(answers, self._expected[name], strict=True))
            if state != "cold" and not all(answer.n_cached for answer in answers):
                n_wrong += 1
            self.n_wrong += n_wrong
            print(
                f"{name:14} {layout:9} {state:9}", f"{'+'.join(str(answer.n_prompt) for answer in answers):>15}",
                f"{'+'.join(str(answer.n_cached) for answer in answers):>15}", f"{n_same} of {len(answers)}",
                f"{max(found or 0 for found in differences):8.4f}", "WRONG" if n_wrong else "", flush=True,
            )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", type=Path, required=True)
    parser.add_argument("--only", default=",".join(PAIRS), help="names of pairs")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        models = folder / "models"
        models.mkdir()
        pairs, expected = {}, {}
        for name in asked.only.split(","):
            # Pictures of 16 rows, of which one can be found in the cache.
            pair = make_pair(models, name, image=64)
            pairs[name] = Pair(pair.model, pair.projector.rename(models / f"mmproj-{name}.gguf"), pair.hears)
            with llama_server(asked.server, pairs[name], folder / "server.log") as http:
                expected[name] = [ask(http, name, content, cache_prompt=False) for content in questions(pair)]
        comparison = Comparison(pairs, expected)
        print(f"{'model':14} {'layout':9} {'state':9} {'prompt':>15} {'cached':>15} same text  largest")
        for layout, n_slots in LAYOUTS.items():
            home = str(folder / layout)
            for states in (("cold", "again"), ("restored",)):
                with running_daemon(
                    "--slots", str(n_slots), "--kv-cells", "4096", fake=False,
                    LOCALRUN_MODELS=str(models), LOCALRUN_HOME=home,
                ) as daemon:  # fmt: skip
                    daemon.http.timeout = 300
                    for state in states:
                        comparison.run(daemon.http, layout, state)
                    assert daemon.stop() == 0, daemon.log[-2000:]
    return 1 if comparison.n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
