"""How long a stream pauses when its engine is killed: `python -m tests.server.resume_pause MODEL [ROUNDS]`, from the
folder of the sources.

The engine of a stream gets SIGKILL after 100 tokens. Printed are, in seconds and as medians: from the kill to the next
token, from the kill to the warning in the log (the engine is loaded by then), the engine's own load time, and what a
load and the same tokens take when nothing died: the first token of a new request with that text as its prompt, to a
model that was unloaded and of which nothing is kept. Rounds of both alternate; the last line is their ratio.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.daemon import Daemon, running_daemon

N_BEFORE = 100
PROMPT = "Tell me a long story."
BODY: dict[str, Any] = {"prompt": PROMPT, "stream": True, "ignore_eos": True, "temperature": 0, "max_tokens": 140}


def paused_s(daemon: Daemon, model: str) -> tuple[float, str]:
    """From the kill to the next piece of text, and the text until then."""
    text, killed_at_s = "", 0.0
    for n_seen, (now_s, piece) in enumerate(_pieces(daemon, BODY | {"model": model}), 1):
        if killed_at_s and now_s - killed_at_s > 0.05:  # what was on its way does not count
            return now_s - killed_at_s, text
        text += piece
        if n_seen == N_BEFORE:
            (engine,) = daemon.http.get("/localrun/v1/snapshot").json()["engines"]
            os.kill(engine["pid"], signal.SIGKILL)
            killed_at_s = time.monotonic()
    raise RuntimeError("the stream had ended before")


def loaded_s(daemon: Daemon, model: str, text: str) -> float:
    """From a request with this prompt to its first piece of text, when nothing is loaded or kept."""
    daemon.post("/api/generate", model=model, keep_alive=0)
    while daemon.http.get("/localrun/v1/snapshot").json()["engines"]:
        time.sleep(0.02)
    daemon.http.request("DELETE", "/localrun/v1/cache")
    began_s = time.monotonic()
    return next(_pieces(daemon, BODY | {"model": model, "prompt": text, "max_tokens": 4}))[0] - began_s


def _pieces(daemon: Daemon, body: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """When each piece of text came, and the piece."""
    with daemon.http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                yield time.monotonic(), choices[0]["text"]


def main(model: str, n_rounds: int) -> None:
    pauses_s, cold_s = [], []
    with running_daemon("--kv-cells", "8192", fake=False, LOCALRUN_THREADS="0") as daemon:
        for _ in range(n_rounds):
            pause_s, text = paused_s(daemon, model)
            pauses_s.append(pause_s)
            cold_s.append(loaded_s(daemon, model, PROMPT + text))
        borrowed_s = [float(found) for found in re.findall(r"tokens and ([\d.]+) s", daemon.log)]
        loads_s = [float(found) for found in re.findall(r"loaded .* in ([\d.]+) s", daemon.log)][1:]
    for name, values in (
        ("kill to token", pauses_s), ("kill to engine", borrowed_s), ("load, by the engine", loads_s),
        ("request to token, nothing loaded", cold_s), ("ratio", [a / b for a, b in zip(pauses_s, cold_s, strict=True)]),
    ):  # fmt: skip
        print(f"{name}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 7)
