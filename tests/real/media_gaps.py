"""How long three clients wait for a token while a fourth sends a picture, through a daemon.

    python -m tests.real.media_gaps MODEL.gguf [--latency 45] [--rounds 3]

The projector is made here: a tower like SigLIP's (12 layers of width 768, 384 x 384 pixels, 576 patches; random numbers
in F16) whose 144 rows are computed in one call. Each event begins with a new picture of 1200 x 900 pixels and ends with
the fourth client's answer of four tokens. The time between two tokens is the clients', so HTTP and decoding count.
Each line is of all rounds so far.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from localrun.models.gguf.reader import read_header
from tests.daemon import Daemon, running_daemon
from tests.projector_file import parts_of, write_parts
from tests.server.media import making

N_STREAMS = 3
WINDOW_S = 5.0  # of what is measured with no event
BEFORE = "You look at pictures and say in few words what is in them. " * 4


class Stream:
    """A client whose answer goes on. `arrived_s` are the times of its tokens."""

    def __init__(self, daemon: Daemon, model: str, number: int) -> None:
        self.arrived_s: list[float] = []
        self.n_characters = 0  # for an event has several tokens if drafts were right
        self._daemon = daemon
        self._body = {
            "model": model, "prompt": f"This is story number {number}.", "max_tokens": 100_000, "ignore_eos": True,
            "stream": True, "temperature": 0,
        }  # fmt: skip
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._stop.is_set():  # an answer ends with the context
            with self._daemon.http.stream("POST", "/v1/completions", json=self._body) as answer:
                self.arrived_s.append(float("nan"))
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.arrived_s.append(time.perf_counter())
                        self.n_characters += len(json.loads(line[6:])["choices"][0]["text"])
                    if self._stop.is_set():
                        break

    def gaps_s(self, from_s: float, to_s: float) -> list[float]:
        """The times between two tokens of which the second came in between."""
        pairs = zip(self.arrived_s, self.arrived_s[1:], strict=False)
        return [after - before for before, after in pairs if from_s <= after <= to_s and after - before >= 0]

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


class Measured:
    """Gaps and durations of one event, over all rounds."""

    def __init__(self) -> None:
        self.gaps_s: list[float] = []
        self.longest_s: list[float] = []
        self.took_s: list[float] = []
        self.characters_per_s: list[float] = []

    def line(self) -> str:
        middle, most = statistics.median(self.gaps_s), float(np.quantile(self.gaps_s, 0.95))
        longest = " ".join(f"{each * 1e3:.0f}" for each in sorted(self.longest_s))
        times = f"{middle * 1e3:8.0f} {most * 1e3:8.0f}   {longest:24} {statistics.median(self.took_s):8.1f} s"
        return f"{times} {statistics.median(self.characters_per_s):12.0f}"


def picture(seed: int) -> str:
    values = np.random.default_rng(seed).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    image = Image.fromarray(values).resize((1200, 900))
    return base64.b64encode(making.encoded(image, "PNG")).decode()


def ask(daemon: Daemon, model: str, text: str, *images: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text, "images": list(images)}]
    options = {"num_predict": 4, "temperature": 0}
    answer = daemon.post("/api/chat", model=model, messages=messages, stream=False, options=options)
    assert answer.status_code == 200, answer.text
    counts: dict[str, Any] = answer.json()
    return counts


def run(daemon: Daemon, model: str, n_rounds: int) -> None:
    ask(daemon, model, "hello", picture(0))  # all is loaded and has been computed with
    streams = [Stream(daemon, model, number) for number in range(N_STREAMS)]
    time.sleep(2.0)
    events = {name: Measured() for name in ("nothing", "a text of 190 tokens", "a picture", "the same picture again")}
    for number in range(1, n_rounds + 1):
        pictures = [picture(number)]
        asks: dict[str, Callable[[], dict[str, Any]]] = {
            "a text of 190 tokens": partial(ask, daemon, model, f"{number}, {'and so on ' * 45}"),
            "a picture": partial(ask, daemon, model, f"{number}: {BEFORE} [img]", *pictures),
            "the same picture again": partial(ask, daemon, model, f"{-number}: {BEFORE} [img]", *pictures),
        }
        for name, measured in events.items():
            time.sleep(1.0)
            began_s, n_before = time.perf_counter(), sum(stream.n_characters for stream in streams)
            counts = asks[name]() if name in asks else time.sleep(WINDOW_S)
            measured.took_s.append(time.perf_counter() - began_s)
            n_characters = sum(stream.n_characters for stream in streams) - n_before
            measured.characters_per_s.append(n_characters / measured.took_s[-1])
            time.sleep(0.2)
            gaps_s = [gap for stream in streams for gap in stream.gaps_s(began_s, time.perf_counter())]
            measured.gaps_s += gaps_s
            measured.longest_s.append(max(gaps_s))
            n_tokens = counts["prompt_eval_count"] - counts["prompt_eval_cached_count"] if counts else 0
            print(f"{name:24}", measured.line(), f"{n_tokens:6}", flush=True)
    for stream in streams:
        stream.end()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--latency", default="45", help="milliseconds, or a mode's name")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--speculation", default="on", help="off: each event is one token")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shutil.copy(asked.model, folder / "seeing.gguf")
        parts = parts_of(
            "gemma3", read_header(asked.model).n_embd, n_embd=768, n_ff=3072, n_layers=12, n_heads=12, patch=16,
            image=384, scale=2,
        )  # fmt: skip
        write_parts(folder / "mmproj-seeing.gguf", parts, is_half=True)
        with running_daemon(
            "--slots", "4", "--kv-cells", "32768", "--latency", asked.latency, "--speculation", asked.speculation,
            fake=False, LOCALRUN_MODELS=str(folder), LOCALRUN_THREADS=str(asked.threads),
        ) as daemon:  # fmt: skip
            daemon.http.timeout = 300
            print(f"{asked.model.name}, target {asked.latency}")
            columns = (
                f"{'median':>8} {'95 %':>8}   {'longest of each round':24} {'took':>10} {'characters/s':>12} computed"
            )
            print(f"{'ms between tokens':24}", columns)
            run(daemon, "seeing", asked.rounds)


if __name__ == "__main__":
    main()
