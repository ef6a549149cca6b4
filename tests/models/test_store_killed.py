"""The store after kill -9 at random points of uploads, creates, copies and removals: the old state or the new one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from localrun.models import naming
from localrun.models.storage import blobs, manifest
from localrun.models.storage.blobs import Blobs
from localrun.models.storage.store import Store
from tests.depth import DEPTH

# Until it is killed: uploads one of three files, names it, copies the name, replaces the copied name's model, removes.
WORK = """
import itertools, sys
from datetime import UTC, datetime
from pathlib import Path
from localrun.models import creation, naming
from localrun.models.storage.blobs import BlobWriter
from localrun.models.creation import Changes
from localrun.models.storage.store import Store

model, folder = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
store = Store(folder, hub_cache_folder=folder / "hub")
print("ready", flush=True)
for turn in itertools.count(int(sys.argv[3])):
    with BlobWriter(store.blobs) as writer:
        writer.write(model)
        writer.write(bytes([turn % 3]))
        digest = writer.finish()
    with store.blobs.held([digest]):
        base = creation.base_of(store, digest, None)
        changes = Changes(system=f"turn {turn}", parameters={"seed": turn})
        naming.point(store, "a", creation.assemble(base, changes, now=datetime.now(UTC)))
    naming.copy(store, "a", f"b:{turn % 2}")
    if turn % 2:
        naming.remove(store, f"b:{turn % 2}")
"""


def kill_at(model: Path, folder: Path, turn: int, delay_s: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WORK, str(model), str(folder), str(turn)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay_s)
    process.kill()
    process.wait()
    process.stdout.close()


def check(folder: Path) -> set[str]:
    """The names that are there."""
    store = Store(folder, hub_cache_folder=folder / "hub")
    survey = manifest.read_all(folder)
    assert survey.damaged == []
    assert store.damaged() == []
    for said in survey.manifests.values():
        model = store.resolve(said.name)
        assert model.system == f"turn {model.parameters['seed']}"
    for blob in store.blobs.all():
        assert blobs.hash_file(blob.path) == blob.digest
    naming.collect_garbage(store, now_s=time.time(), min_age_s=0)
    named = {file.digest for said in survey.manifests.values() for file in said.files}
    assert {blob.digest for blob in store.blobs.all()} == named
    left = [path for path in folder.rglob("*") if path.is_file()]
    assert len(left) == len(named) + len(survey.manifests)
    return {said.name for said in survey.manifests.values()}


def killed_often(model: Path, folder: Path, n_kills: int) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    print("seed", seed)
    chance = random.Random(seed)
    names: set[str] = set()
    for kill in range(n_kills):
        kill_at(model, folder, turn=7 * kill, delay_s=chance.uniform(0, 0.1))
        # A name that only ever changes its meaning is never gone.
        assert names & {"a"} <= (names := check(folder))


def test_kills_leave_the_old_state_or_the_new_one(tiny_gguf: Path, tmp_path: Path) -> None:
    killed_often(tiny_gguf, tmp_path / "models", 8 * DEPTH)
    assert Blobs(tmp_path / "models").folder.is_dir()
