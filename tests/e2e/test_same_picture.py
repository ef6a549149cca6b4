"""Eight clients send the same new picture at once to a daemon with a real engine: it is encoded once."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.daemon import Daemon, running_daemon
from tests.engine.native.media import make_pair
from tests.server.media import making

N_CLIENTS = 8
N_ROWS = 16
LONG = "tell me what this is and nothing else. " * 8


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    pair = make_pair(tmp_path, "gemma3", image=64)
    pair.projector.rename(tmp_path / "mmproj-gemma3.gguf")
    with running_daemon(
        "--slots", str(N_CLIENTS), "--kv-cells", "8192", fake=False, LOCALRUN_MODELS=str(tmp_path)
    ) as running:
        yield running


def ask(daemon: Daemon, before: str, after: str, picture: str) -> int:
    """How many tokens of the prompt were computed."""
    messages = [{"role": "user", "content": f"{before}[img]{after}", "images": [picture]}]
    options = {"num_predict": 4, "temperature": 0}
    answer = daemon.post("/api/chat", model="gemma3", messages=messages, stream=False, options=options)
    assert answer.status_code == 200, answer.text
    counts = answer.json()
    return int(counts["prompt_eval_count"] - counts["prompt_eval_cached_count"])


def counted(daemon: Daemon) -> tuple[int, int, int]:
    """Chunks encoded, chunks whose rows were kept, and rows computed."""
    text = daemon.http.get("/metrics").text
    found = dict(re.findall(r"^localrun_media_(\w+_total\{.*\}) ([0-9.]+)", text, re.M))
    encoded, kept = (found.get(f'chunks_total{{model="gemma3",rows="{rows}"}}', 0) for rows in ("encoded", "kept"))
    return int(float(encoded)), int(float(kept)), int(float(found['tokens_total{model="gemma3"}']))


def test_eight_clients_with_the_same_picture_encode_it_once(daemon: Daemon) -> None:
    first, second, third = (base64.b64encode(making.png(64 + 16 * number, 48)).decode() for number in range(3))
    with ThreadPoolExecutor(N_CLIENTS) as clients:
        list(clients.map(lambda number: ask(daemon, LONG, f"client {number}", first), range(N_CLIENTS)))
        n_encoded, n_kept, n_rows = counted(daemon)
        assert n_encoded == 1
        assert n_rows == (1 + n_kept) * N_ROWS <= N_CLIENTS * N_ROWS
        # Other texts before it: no prefix is the same, and the rows are.
        list(clients.map(lambda number: ask(daemon, f"{number}: {LONG}", "", second), range(N_CLIENTS)))
        assert counted(daemon) == (2, n_kept + N_CLIENTS - 1, n_rows + N_CLIENTS * N_ROWS)
    ask(daemon, LONG, "client 0", third)
    assert counted(daemon)[0] == 3
    assert ask(daemon, LONG, "client 0", third) < N_ROWS
    assert counted(daemon)[2] == n_rows + (N_CLIENTS + 1) * N_ROWS
