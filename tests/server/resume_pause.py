"""How long a stream pauses when its engine is killed: `python -m tests.server.resume_pause MODEL [ROUNDS]`, from the
folder of the sources.

The engine of a stream gets SIGKILL after 100 tokens. Printed are, in seconds and as medians: from the kill to
the next token, from the kill to the warning in the log (the engine is loaded by then), and the engine's own load time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import sys
import time

from tests.daemon import Daemon, running_daemon

N_BEFORE = 100
BODY = {"prompt": "Tell me a long story.", "stream": True, "ignore_eos": True, "temperature": 0, "max_tokens": 140}


def paused_s(daemon: Daemon, model: str) -> float:
    """From the kill to the next piece of text."""
    n_seen, killed_at_s = 0, 0.0
    with daemon.http.stream("POST", "/v1/completions", json=BODY | {"model": model}) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {") or not json.loads(line[6:])["choices"]:
                continue
            n_seen += 1
            now_s = time.monotonic()
            if killed_at_s and now_s - killed_at_s > 0.05:  # what was on its way does not count
                return now_s - killed_at_s
            if n_seen == N_BEFORE:
                (engine,) = daemon.http.get("/localrun/v1/snapshot").json()["engines"]
                os.kill(engine["pid"], signal.SIGKILL)
                killed_at_s = time.monotonic()
    raise RuntimeError("the stream had ended before")


def main(model: str, n_rounds: int) -> None:
    with running_daemon("--kv-cells", "8192", fake=False, LOCALRUN_THREADS="0") as daemon:
        pauses_s = [paused_s(daemon, model) for _ in range(n_rounds)]
        borrowed_s = [float(found) for found in re.findall(r"tokens and ([\d.]+) s", daemon.log)]
        loads_s = [float(found) for found in re.findall(r"loaded .* in ([\d.]+) s", daemon.log)][1:]
    for name, values_s in (("kill to token", pauses_s), ("kill to engine", borrowed_s), ("load", loads_s)):
        spread = " to ".join(f"{value:.2f}" for value in (min(values_s), max(values_s)))
        print(f"{name}: {statistics.median(values_s):.2f} s ({spread})")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 7)
