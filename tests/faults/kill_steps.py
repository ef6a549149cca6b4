"""Changes a file of ours in a process that is killed at its n-th touch of the disk, for every n until it is done:
`python -m tests.faults.kill_steps NAME FOLDER`, with the environment of `injection.Injected`.

What is read after each kill is the old state or the new one. The process that is killed is a fork, for starting Python
a few hundred times would take minutes. SQLite touches the disk in its own code: there each step of its machine counts.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from localrun import kv_folders, stored
from localrun.hardware import kernels, thread_choice
from localrun.hardware.kernels import Verdict
from localrun.hardware.thread_choice import ModelShape
from localrun.models import naming
from localrun.models.download import journal
from localrun.models.download.journal import Journal, Range, Record
from localrun.models.storage.blobs import BlobWriter, hash_file
from localrun.models.storage.manifest import Place, Role, StoredFile
from localrun.server import pulls
from localrun.tui.history import open_history
from tests.engine.disk_harness import record, scanned, tier
from tests.faults import test_damaged_files as files
from tests.models.handmade import VALID

SQLITE_STRIDE = 5


class Change(NamedTuple):
    """`write` makes the old state in a folder, `change` the new one; `state` tells them apart, and cleans up first."""

    write: Callable[[Path], Any]
    change: Callable[[Path, int], Any]
    state: Callable[[Path], Any]


def change_models(folder: Path, _: int) -> None:
    store = files.store_of(folder)
    with BlobWriter(store.blobs) as writer:
        writer.write(VALID + b"new")
        digest = writer.finish()
    said = store.resolve("one").manifest
    assert said is not None
    with store.blobs.held([digest]):
        file = StoredFile(role=Role.MODEL, place=Place.BLOB, size_bytes=writer.n_bytes, digest=digest)
        naming.point(store, "one", msgspec.structs.replace(said, files=(file,), system="new"))
    naming.copy(store, "one", "four")
    naming.remove(store, "two")


def models(folder: Path) -> bool:
    """Whether anything was changed. Each of several changes is old or new, and no file is left over or missing."""
    store = files.store_of(folder)
    naming.collect_garbage(store, now_s=10**10, min_age_s=0)
    assert store.damaged() == []
    for blob in store.blobs.all():
        assert hash_file(blob.path) == blob.digest
    listed = {model.name: model for model in store.list() if model.name != "tiny"}
    named = {file.digest for model in listed.values() if model.manifest for file in model.manifest.files}
    assert {blob.digest for blob in store.blobs.all()} == named
    assert len([path for path in store.folder.rglob("*") if path.is_file()]) == len(named) + len(listed)
    assert set(listed) in ({"one", "two", "three"}, {"one", "two", "three", "four"}, {"one", "three", "four"})
    assert listed["one"].system in ("Be brief.", "new")
    return set(listed) != {"one", "two", "three"} or listed["one"].system == "new"


def change_blocks(folder: Path, _: int) -> None:
    disk = tier(folder / "kv")
    disk.scan()
    disk.write(record([9]), bytearray([9]) * 2_000)
    disk.flush(60.0)


def blocks(folder: Path) -> tuple[bytes, ...]:
    disk, found = scanned(folder / "kv")
    for each in found:
        assert disk.read(each.key) == bytearray([each.tokens[0]]) * 2_000
    assert all(file.writer_pid is None for file in kv_folders.saved_files(disk.folder))
    disk.close()
    return tuple(sorted(each.key for each in found))


def change_journal(folder: Path, _: int) -> None:
    path = folder / "fox.localrun-journal"
    found = journal.read(path)
    assert found is not None
    opened = Journal.reopen(path, found.n_sound_bytes)
    opened.append(Record(Range(900, 950), 900))
    opened.content_reached_the_disk()


def ranges(folder: Path) -> int:
    found = journal.read(folder / "fox.localrun-journal")
    return len(found.records) if found else -1


def change_chats(folder: Path, n: int) -> None:
    """Killed at the n-th step of SQLite's machine."""
    history = open_history(folder / "chats.db").history
    left = [n * SQLITE_STRIDE]

    def step() -> int:
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    history._db.set_progress_handler(step, 1)
    chat = history.chats()[-1]
    history.add(chat.id, chat.leaf_id, "user", "new", now_s=9.0)


def chats(folder: Path) -> int:
    history, aside, _ = open_history(folder / "chats.db")
    assert aside is None
    n_messages = sum(len(history.branch(chat.id)) for chat in history.chats())
    history.close()
    return n_messages


CHANGES = {
    "manifest": Change(files.write_manifests, change_models, models),
    "block.kv": Change(files.write_blocks, change_blocks, blocks),
    "journal": Change(files.write_journal, change_journal, ranges),
    "chats.db": Change(files.write_chats, change_chats, chats),
    "verdict": Change(
        files.write_verdict,
        lambda folder, _: kernels.keep(folder, files.PAIR, Verdict(is_probed=True, broken="new")),
        lambda folder: kernels.read(folder, files.PAIR).broken,
    ),
    "threads.json": Change(
        files.write_threads,
        lambda folder, _: thread_choice.keep(folder / "threads.json", files.kept(9)),
        lambda folder: thread_choice.find(folder / "threads.json", "p", "b", ModelShape(9, 10)) is None,
    ),
    "pulls.json": Change(
        files.write_pulls,
        lambda folder, _: pulls._write(folder / "pulls.json", [pulls.PullRequest("acme/new")]),
        lambda folder: tuple(wanted.model for wanted in pulls._read(folder / "pulls.json")),
    ),
    "private file": Change(
        lambda folder: stored.replace(folder / "unit", b"old"),
        lambda folder, _: stored.replace(folder / "unit", b"new"),
        lambda folder: (folder / "unit").read_bytes(),
    ),
}


def main(name: str, folder: Path) -> None:
    logging.disable()
    plan = Path(os.environ["LOCALRUN_FAULTS"])
    change = CHANGES[name]
    change.write(folder)
    seen = [change.state(folder)]
    for n in range(1, 2_000):
        plan.write_text(json.dumps({"what": "disk", "root": str(folder), "at": n, "signal": signal.SIGKILL}))
        pid = os.fork()
        if not pid:
            try:
                change.change(folder, n)
            except BaseException as error:
                print("in the fork:", repr(error), file=sys.stderr)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        plan.unlink()
        seen.append(change.state(folder))
        if status == 0:
            break
        assert os.WIFSIGNALED(status), status
        if seen[-1] != seen[0]:
            # It was done all but for what comes after: from the beginning again, one step further.
            _empty(folder)
            change.write(folder)
    assert status == 0, "the change has no end"
    assert set(seen) <= {seen[0], seen[-1]}, f"neither old nor new: {seen}"
    print(n)


def _empty(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
