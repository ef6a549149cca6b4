"""The engine process with a disk tier: what it computed is there after a restart, until somebody clears it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from localrun import kv_folders
from localrun.wire import ClearCache, Cleared, Open, Ready, Step, Usage
from tests.engine.test_process import OPEN, PATIENCE_S, Child, child, submit

FAKE: tuple[str, ...] = ()
REAL = ("-m", "localrun.engine.process")
PROMPT = "The same long beginning of a conversation, again and again. " * 5
N_PROMPT = len(PROMPT)


@pytest.fixture
def opening(tiny_gguf: Path, tmp_path: Path) -> Open:
    return replace(
        OPEN, model_path=str(tiny_gguf), model="tiny one", disk_cache_bytes=1 << 28, kv_folder=str(tmp_path / "kv")
    )


def answer(engine: Child) -> tuple[Usage, list[int]]:
    """Usage and tokens of the prompt's answer."""
    engine.send(submit(1, PROMPT))
    tokens: list[int] = []
    while True:
        step = engine.receive()
        assert isinstance(step, Step)
        for delta in step.deltas:
            tokens += delta.tokens
            if delta.finish:
                assert delta.usage is not None
                return delta.usage, tokens


def wait_for_files(root: Path) -> None:
    """Until what was computed is on disk: that comes after the answer."""
    ends_at_s = time.monotonic() + PATIENCE_S
    while not any(folder.n_entries for folder in kv_folders.survey(root)):
        assert time.monotonic() < ends_at_s, "nothing was saved"
        time.sleep(0.01)


def life(opened: Open, *arguments: str) -> tuple[Usage, list[int]]:
    """One process from its start to its end, with one request."""
    with child(*arguments) as engine:
        engine.send(opened)
        assert isinstance(engine.receive(), Ready)
        answered = answer(engine)
        engine.process.stdin.close()
        assert engine.exit_code() == 0
        return answered


@pytest.mark.parametrize("arguments", [FAKE, REAL], ids=["fake", "llama.cpp"])
def test_a_restart_finds_the_cache_warm(opening: Open, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCALRUN_FAKE_STEP_MS", "20")  # what costs nothing to compute is not kept
    cold, tokens = life(opening, *arguments)
    assert cold.n_cached == 0
    warm, same_tokens = life(opening, *arguments)
    assert warm.n_cached >= warm.n_prompt - 2
    assert same_tokens == tokens
    (folder,) = kv_folders.survey(Path(opening.kv_folder))
    assert folder.n_entries > 0
    about = json.loads((folder.path / "about.json").read_text())
    assert (about["model"], about["model_path"]) == ("tiny one", opening.model_path)


@pytest.mark.parametrize("change", [{"kv_type": "q8_0"}, {"disk_cache_bytes": 0}, {"kv_folder": ""}])
def test_other_parameters_and_no_disk_start_cold(opening: Open, change: dict[str, Any]):
    life(opening, *FAKE)
    assert life(replace(opening, **change), *FAKE)[0].n_cached == 0


def test_a_touched_model_file_starts_cold(opening: Open, tmp_path: Path):
    own = tmp_path / "own.gguf"
    own.write_bytes(Path(opening.model_path).read_bytes())
    opening = replace(opening, model_path=str(own))
    life(opening, *FAKE)
    own.touch()
    assert life(opening, *FAKE)[0].n_cached == 0


def test_damaged_files_start_cold_with_the_same_answer(opening: Open):
    _, tokens = life(opening, *REAL)
    for file in kv_folders.saved_files(kv_folders.survey(Path(opening.kv_folder))[0].path):
        data = bytearray(file.path.read_bytes())
        data[len(data) // 2] ^= 16
        file.path.write_bytes(data)
    usage, same_tokens = life(opening, *REAL)
    assert usage.n_cached == 0
    assert same_tokens == tokens


@pytest.mark.parametrize(("ram", "disk", "is_cold"), [(True, True, True), (True, False, False), (False, True, False)])
def test_clearing(opening: Open, ram: bool, disk: bool, is_cold: bool):
    with child() as engine:
        engine.send(opening)
        assert isinstance(engine.receive(), Ready)
        answer(engine)
        wait_for_files(Path(opening.kv_folder))
        cleared = None
        engine.send(ClearCache(id=5, ram=ram, disk=disk))
        while cleared is None:
            message = engine.receive()
            cleared = message if isinstance(message, Cleared) else None
        assert cleared.id == 5
        assert (answer(engine)[0].n_cached == 0) == is_cold


def test_a_folder_that_cannot_be_is_one_line_and_no_error(opening: Open, tmp_path: Path):
    (tmp_path / "kv").write_text("a file")
    with child() as engine:
        engine.send(opening)
        assert isinstance(engine.receive(), Ready)
        answer(engine)
        engine.process.stdin.close()
        assert engine.exit_code() == 0
        assert engine.errors().count("not kept on disk") == 1
