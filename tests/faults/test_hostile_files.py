"""Damaged and hostile model files through everything that reads one, with real engines: an engine may die of such a
file, but each request gets an answer in words, nothing is started over and over, and other models are served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.daemon import Daemon, running_daemon
from tests.depth import DEPTH
from tests.faults.hostile_files import hostile
from tests.faults.postcondition import models_folder, unharmed
from tests.registry import Layer, Registry

N_FILES = 60 if DEPTH == 1 else 2_000
LOOK_EVERY = 20
# Starting an engine takes longest.
LOAD_EVERY = 3 if DEPTH == 1 else 1
# What an engine may be said to have met. Never `internal`, which stands for a bug of ours.
CODES = {"bad_model_file", "engine_died", "engine_failed", "cannot_fit", "unavailable", "bad_request", "bad_template",
         "context_length_exceeded", "no_numbers"}  # fmt: skip


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon("--slots", "1", fake=False) as running:
        yield running


def test_hostile_files_harm_nobody(daemon: Daemon, tmp_path: Path) -> None:
    folder = models_folder(daemon.home)
    folder.mkdir(parents=True, exist_ok=True)
    ended: Counter[str] = Counter()
    with Registry() as registry, unharmed(daemon):
        for number in range(N_FILES):
            what, content = hostile(number, tmp_path)
            path = folder / f"hostile-{number}.gguf"
            path.write_bytes(content)
            try:
                outcome = ask_all(daemon, registry, path, content, loads=number % LOAD_EVERY == 0)
            except AssertionError as error:
                raise AssertionError(f"{number} ({what}): {error}") from error
            ended[outcome] += 1
            path.unlink()
            if outcome == "engine_died" or number % LOOK_EVERY == 0:
                answer = daemon.post("/v1/completions", model="tiny", prompt="Hello", max_tokens=2, temperature=0)
                assert answer.status_code == 200, f"after {number} ({what}): {answer.text}"
    print(dict(ended))
    assert ended["refused"], "the validator refuses some"
    assert ended["answered"], "some are as good as sound"


def ask_all(daemon: Daemon, registry: Registry, path: Path, content: bytes, *, loads: bool = True) -> str:
    """Lists, shows, creates from, pulls and loads one file. How it ended: `refused` by the validator, `taken` by it
    where it is not loaded, `answered`, or the code of an error."""
    name = path.stem
    listed = name in {row["name"].removesuffix(":latest") for row in daemon.http.get("/api/tags").json()["models"]}
    shown = daemon.post("/api/show", model=name, verbose=True)
    assert code_of(shown) in (("",) if listed else ("bad_model_file",)), shown.text
    created = daemon.post("/api/create", model="made", modelfile=f"FROM {path}", stream=False)
    assert code_of(created) in ("", "bad_model_file", "bad_request"), created.text
    pulled = daemon.post("/api/pull", model=registry.add("library/hostile", Layer("model", content)), stream=False)
    assert code_of(pulled) in ("", "bad_model_file", "download_failed"), pulled.text
    assert listed or pulled.status_code != 200, "a file that is refused here is refused there"
    for made in ("made", f"{registry.host}/library/hostile"):
        daemon.http.request("DELETE", "/api/delete", json={"model": made})
    registry.blobs.clear()
    if not listed:
        return "refused"
    if not loads:
        return "taken"
    body = {
        "model": name,
        "prompt": "Hello",
        "raw": True,
        "stream": False,
        "keep_alive": 0,
        "options": {"num_predict": 2},
    }
    answer = daemon.post("/api/generate", body)
    code = code_of(answer)
    assert code in CODES | {""}, answer.text
    rows = daemon.http.get("/localrun/v1/snapshot").json()["engines"]
    assert not [row for row in rows if row["state"] == "loading"], "nothing is started again by itself"
    return code or "answered"


def code_of(response: httpx2.Response) -> str:
    """The code of the error, empty where there is none."""
    if response.status_code == 200:
        return ""
    assert response.json()["error"], response.text
    return response.headers.get("x-localrun-error") or str(response.json()["code"])
