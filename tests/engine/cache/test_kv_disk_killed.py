"""A writer that is killed at any moment leaves whole segments and nothing else."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from localrun import kv_folders
from tests.depth import DEPTH
from tests.engine.disk_harness import record, scanned, tier

ROOT = Path(__file__).parents[3]
N_KILLS = 10 * DEPTH
WRITER = """
import sys
from pathlib import Path
from tests.engine.disk_harness import record, tier
disk = tier(Path(sys.argv[1]))
disk.scan()
print("ready", flush=True)
for number in range(1_000_000):
    parent = record([number])
    for found in (parent, record([number, 1], parent)):
        disk.write(found, bytearray([number % 256]) * 200_000)
    if number % 3 == 2:
        disk.remove(parent.key)
    disk.flush(60.0)
"""


def test_a_killed_writer_leaves_whole_segments_or_nothing(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    chance = random.Random(7)
    n_killed = n_left_behind = 0
    # Until some kill has hit a write, or the test would prove nothing.
    while n_killed < N_KILLS or not n_left_behind:
        n_killed += 1
        assert n_killed < 10 * N_KILLS
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0.0, 0.05))
        writer.kill()
        writer.communicate()
        folder = tier(root).folder
        n_left_behind += sum(file.writer_pid is not None for file in kv_folders.saved_files(folder))
        disk, found = scanned(root)
        files = list(kv_folders.saved_files(folder))
        assert {file.key for file in files} == {each.key for each in found}
        assert all(file.writer_pid is None for file in files)
        for each in found:
            data = disk.read(each.key)
            assert data is not None
            assert data == bytearray([each.tokens[0] % 256]) * 200_000
            parent = record(each.tokens[:1]) if each.parent_key else None
            assert each.order.tolist() == record(each.tokens, parent).order.tolist()
        disk.close()
