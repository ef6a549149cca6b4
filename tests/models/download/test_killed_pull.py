"""kill -9 at any point: nothing half-done has a final name, and the next pull transfers only what is missing."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub
import pytest

from localrun.models.download.partial import find_stale, remove_stale
from tests.depth import DEPTH
from tests.hub.repository import Repository
from tests.hub.server import Hub

from .killable_pull import N_CONNECTIONS, RECORD_BYTES

REPO = "acme/Fox-GGUF"
FILE = "fox-Q4_K_M.gguf"
SIZE_BYTES = 3_000_017
CONTENT = random.Random(7).randbytes(SIZE_BYTES)
ROOT = Path(__file__).parents[3]


@dataclass
class Run:
    """One process. `resumed_bytes` and `last_bytes` are what it said first and last, None if it never got so far."""

    lines: list[str] = field(default_factory=list)

    @property
    def positions(self) -> list[int]:
        return [int(line.split()[1]) for line in self.lines if line.startswith("at ")]

    @property
    def is_done(self) -> bool:
        return "done" in self.lines


def run_and_kill(hub: Hub, cache: Path, draws: random.Random) -> Run:
    """Starts a pull and kills it at a point drawn at random: while it starts, transfers, verifies or names."""
    command = [sys.executable, "-m", "tests.models.download.killable_pull", hub.endpoint, str(cache), REPO]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    run = Run()
    phase = draws.choice(["start", "transfer", "transfer", "transfer", "verify"])
    n_lines = draws.randrange(1, 40)
    if phase == "start":
        time.sleep(draws.uniform(0.2, 0.8))
    else:
        for line in process.stdout:
            run.lines.append(line.strip())
            if (phase == "transfer" and len(run.lines) >= n_lines) or "verifying" in line:
                break
        if phase == "verify":
            time.sleep(draws.uniform(0, 0.02))
    process.kill()
    rest, _ = process.communicate()
    # The kill may have cut the last line.
    run.lines += rest.splitlines() if rest.endswith("\n") else rest.splitlines()[:-1]
    return run


def check_after(hub: Hub, cache: Path, runs: list[Run]) -> None:
    for path in cache.rglob("*"):
        if path.is_file() and path.parent.name == "blobs" and ".localrun-" not in path.name:
            assert path.read_bytes() == CONTENT
        if path.name == FILE:
            assert path.read_bytes() == CONTENT
    *_, before, last = [Run(), *runs]
    if last.positions:
        assert last.positions == sorted(last.positions)
        assert hub.record.requested_bytes <= SIZE_BYTES - last.positions[0]
        if before.positions:
            assert last.positions[0] >= before.positions[-1] - N_CONNECTIONS * RECORD_BYTES


def kill_often(hub: Hub, cache: Path, n_kills: int, seed: int) -> None:
    draws = random.Random(seed)
    hub.faults.bytes_per_s = 1_500_000
    runs: list[Run] = []
    n_whole = 0
    for _ in range(n_kills):
        hub.record.clear()
        run = run_and_kill(hub, cache, draws)
        if run.positions or run.is_done:
            runs.append(run)
            check_after(hub, cache, runs)
        found = huggingface_hub.try_to_load_from_cache(REPO, FILE, cache_dir=cache)
        if isinstance(found, str):
            n_whole += 1
            Path(found).resolve().unlink()
            Path(found).unlink()
            runs.clear()
    assert n_kills < 20 or n_whole > 0
    hub.faults.bytes_per_s = None
    command = [sys.executable, "-m", "tests.models.download.killable_pull", hub.endpoint, str(cache), REPO]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found = huggingface_hub.try_to_load_from_cache(REPO, FILE, cache_dir=cache)
    assert isinstance(found, str)
    assert Path(found).read_bytes() == CONTENT
    for left in find_stale([cache], now_s=time.time(), min_age_s=0):
        remove_stale(left)
    assert [path.name for path in cache.rglob("*") if "localrun" in path.name] == []
    assert huggingface_hub.scan_cache_dir(cache).warnings == []


@pytest.fixture
def hub():
    with Hub(Repository(REPO, {FILE: CONTENT})) as running:
        yield running


def test_a_killed_pull_goes_on(hub: Hub, tmp_path: Path):
    kill_often(hub, tmp_path / "hub", 6 * DEPTH, seed=2)


def test_two_processes_transfer_it_once(hub: Hub, tmp_path: Path):
    hub.faults.bytes_per_s = 3_000_000
    command = [sys.executable, "-m", "tests.models.download.killable_pull", hub.endpoint, str(tmp_path / "hub"), REPO]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert output.splitlines()[-1] == "done"
    assert hub.record.content_bytes == SIZE_BYTES
    found = huggingface_hub.try_to_load_from_cache(REPO, FILE, cache_dir=tmp_path / "hub")
    assert isinstance(found, str)
    assert Path(found).read_bytes() == CONTENT
