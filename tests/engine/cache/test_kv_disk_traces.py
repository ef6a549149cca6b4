"""Random lives of a disk tier, with restarts and damage between: what is read is what was written, or a miss."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from localrun import kv_folders
from localrun.engine.cache.disk import KvDisk
from localrun.engine.cache.tree import DiskRecord
from tests.depth import DEPTH
from tests.engine.disk_harness import path_of, record, tier

N_KEYS = 12
RECORDS: list[DiskRecord] = [record([0])]
for number in range(1, N_KEYS):
    RECORDS.append(record([number], RECORDS[(number - 1) // 2]))

keys = st.integers(0, N_KEYS - 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), keys, st.integers(1, 3000)),
        st.tuples(st.sampled_from(["read", "touch", "remove", "unlink"]), keys, st.just(0)),
        st.tuples(st.sampled_from(["cut", "flip"]), keys, st.integers(0, 10_000)),
        st.tuples(st.sampled_from(["restart", "flush", "clear"]), st.just(0), st.just(0)),
    ),
    max_size=40,
)

# Of each key what was ever written, and None: a later one may not have found room.
Written = defaultdict[bytes, list[bytes | None]]


def harm(path: Path, kind: str, at: int) -> None:
    if not path.exists():
        return
    data = bytearray(path.read_bytes())
    if kind == "cut":
        data = data[: at % len(data)]
    else:
        data[at % len(data)] ^= 1 << at % 8
    path.write_bytes(data)


@settings(max_examples=40 * DEPTH)
@given(steps=steps, limit_bytes=st.sampled_from([5_000, 20_000, 1_000_000]))
def test_what_is_read_is_what_was_written_or_a_miss(steps: list[tuple[str, int, int]], limit_bytes: int) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder) / "kv"
        disk = tier(root, limit_bytes=limit_bytes)
        written: Written = defaultdict(lambda: [None])
        for kind, key, number in steps:
            found = RECORDS[key]
            if kind == "write":
                data = os.urandom(8) + bytes(number)
                disk.write(found, data)
                written[found.key].append(data)
            elif kind == "read":
                assert disk.read(found.key) in written[found.key]
            elif kind == "touch":
                disk.touch(found.key)
            elif kind == "remove":
                disk.remove(found.key)
                assert disk.read(found.key) is None
            elif kind == "clear":
                disk.clear()
                assert disk.n_entries == 0
            elif kind == "flush":
                disk.flush(60.0)
            elif kind == "restart":
                disk = restarted(disk, root, limit_bytes, written)
            else:
                disk.flush(60.0)
                path = path_of(disk, found)
                path.unlink(missing_ok=True) if kind == "unlink" else harm(path, kind, number)
        restarted(disk, root, limit_bytes, written).close()


def restarted(disk: KvDisk, root: Path, limit_bytes: int, written: Written) -> KvDisk:
    """Close a tier and open it anew; checks all that it finds and its books."""
    disk.flush(60.0)
    disk.close()
    disk = tier(root, limit_bytes=limit_bytes)
    found = disk.scan()
    seen = {b""}
    for each in found:
        assert each.parent_key in seen
        seen.add(each.key)
    files = list(kv_folders.saved_files(disk.folder))
    assert {file.key for file in files} == seen - {b""}
    assert disk.size_bytes == sum(file.size_bytes for file in files) <= limit_bytes
    for each in found:
        assert disk.read(each.key) in written[each.key]
    return disk
