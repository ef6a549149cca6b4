"""Files of ours, cut and flipped at random places, and those of a newer program: nothing crashes, what is lost is told
or found out, and nothing else is lost.

The files are read by the functions that the program reads them with, so that thousands of places can be tried.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from localrun import config, kv_folders
from localrun.config import ConfigError
from localrun.errors import BadModelFile, DownloadFailed
from localrun.hardware import kernels, thread_choice
from localrun.hardware.kernels import Pair, Verdict
from localrun.hardware.thread_choice import ModelShape, SavedChoice, Threads
from localrun.models import naming
from localrun.models.download import journal
from localrun.models.download.journal import Header, Journal, Range, Record
from localrun.models.storage import manifest
from localrun.models.storage.blobs import BlobWriter
from localrun.models.storage.manifest import Manifest, Place, Role, Source, StoredFile
from localrun.models.storage.store import Store
from localrun.server import pulls
from localrun.tui import preferences
from localrun.tui.history import VERSION, HistoryUnavailable, open_history
from tests.depth import DEPTH
from tests.engine.disk_harness import record, scanned, tier
from tests.models.handmade import VALID

N_PLACES = 50 if DEPTH == 1 else 1_000
PAIR = Pair("library", "processor")
NAMES = ("one", "two", "three")


class Case(NamedTuple):
    """`write` makes a file in a folder, and says which; `look` reads it after it was damaged, and fails when more is
    lost than that file, or what it says is not said."""

    write: Callable[[Path], Path]
    look: Callable[[Path, pytest.LogCaptureFixture], None]


def store_of(folder: Path) -> Store:
    return Store(folder / "models", hub_cache_folder=folder / "hub")


def write_manifests(folder: Path) -> Path:
    store = store_of(folder)
    for name in NAMES:
        with BlobWriter(store.blobs) as writer:
            writer.write(VALID + name.encode())
            digest = writer.finish()
        file = StoredFile(role=Role.MODEL, place=Place.BLOB, size_bytes=writer.n_bytes, digest=digest)
        said = Manifest(
            name=name, files=(file,), created_at=datetime(2026, 1, 1, tzinfo=UTC), source=Source(kind="create"),
            parameters={"temperature": 0.5, "stop": ["x"]}, system="Be brief.",
        )  # fmt: skip
        naming.point(store, name, said)
    return manifest.ManifestKey.of("one").path(store.folder)


def look_at_manifests(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_of(folder)
    n_blobs = len(store.blobs.all())
    assert n_blobs == len(NAMES)
    listed = {model.name.lower() for model in store.list()}
    assert listed >= {"two", "three"}
    assert "one" in listed or store.damaged(), "it is listed, or told"
    # A damaged manifest may have named any blob.
    naming.collect_garbage(store, now_s=10**10, min_age_s=0)
    assert len(store.blobs.all()) == n_blobs
    with contextlib.suppress(BadModelFile):
        naming.copy(store, "one", "copied")
        naming.remove(store, "copied")


def write_chats(folder: Path) -> Path:
    path = folder / "chats.db"
    history = open_history(path).history
    for chat_number in range(12):
        chat = history.begin("tiny", now_s=1.0, system="Be brief.", parameters={"top_k": 3})
        parent = None
        for number in range(6):
            text = f"message {number} of {chat_number}: " + "many words " * 30
            parent = history.add(chat.id, parent, "user", text, now_s=2.0, extra={"n": number}).id
    history.close()
    return path


def look_at_chats(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = folder / "chats.db"
    version = path.read_bytes()[60:64]
    if len(version) == 4 and int.from_bytes(version, "big", signed=True) > VERSION and _opens(path):
        with pytest.raises(HistoryUnavailable, match="newer localrun"):
            open_history(path)
        return
    history, aside, n_rescued = open_history(path)
    with contextlib.closing(history):
        chats = history.chats()
        if aside is not None:
            assert aside.exists()
            assert n_rescued == len(chats)
        else:
            assert len(chats) == 12
        for chat in chats:
            with contextlib.suppress(sqlite3.Error):
                for message in history.branch(chat.id):
                    history.siblings(message)
                    history.show(message)
        with contextlib.suppress(sqlite3.Error):
            history.search("many")
        chat = history.begin("tiny", now_s=3.0)
        # SQLite has no checksums: one in some thousand flips is in what only a writer of the index reads.
        try:
            history.add(chat.id, None, "user", "new", now_s=4.0)
        except sqlite3.DatabaseError:
            assert history.chat(chat.id).title == "", "what is refused leaves nothing behind"
        else:
            assert history.chat(chat.id).title == "new"


def _opens(path: Path) -> bool:
    """Whether SQLite takes it for a database, as far as it looks when it opens one."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        try:
            database.execute("PRAGMA journal_mode = WAL")
        except (sqlite3.Error, UnicodeDecodeError):
            return False
    return True


def write_blocks(folder: Path) -> Path:
    disk = tier(folder / "kv")
    disk.scan()
    for number in range(3):
        disk.write(record([number]), bytearray([number]) * 2_000)
    disk.flush(60.0)
    disk.close()
    return next(file.path for file in kv_folders.saved_files(disk.folder) if file.key == record([0]).key)


def look_at_blocks(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk, found = scanned(folder / "kv")
    assert {each.key for each in found} >= {record([1]).key, record([2]).key}
    for each in found:
        data = disk.read(each.key)
        assert data is None or data == bytearray([each.tokens[0]]) * 2_000, "a miss, or what was written"
        assert data is not None or each.key == record([0]).key
    disk.close()


def write_about(folder: Path) -> Path:
    write_blocks(folder)
    return next((folder / "kv").glob("*/about.json"))


def look_at_about(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (found,) = kv_folders.survey(folder / "kv")
    assert found.n_entries == 3
    assert found.model_name


def write_journal(folder: Path) -> Path:
    path = folder / "fox.localrun-journal"
    opened = Journal.create(path, Header(size_bytes=1_000, sha256="a" * 64))
    for start in range(0, 900, 100):
        opened.append(Record(Range(start, start + 100), start))
    opened.content_reached_the_disk()
    opened.close()
    return path


def look_at_journal(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it still says it said before: a range is never believed that was not written."""
    found = journal.read(folder / "fox.localrun-journal")
    wanted = [Record(Range(start, start + 100), start) for start in range(0, 900, 100)]
    assert found is None or found.records == wanted[: len(found.records)]


def write_verdict(folder: Path) -> Path:
    kernels.keep(folder, PAIR, Verdict(is_probed=True, quick_types=("Q4_0",)))
    return folder / PAIR.file_name


def look_at_verdict(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernels.read(folder, PAIR)
    with contextlib.suppress(FileExistsError):
        kernels.keep(folder, PAIR, Verdict(is_probed=True))
        assert kernels.read(folder, PAIR).is_probed


def kept(number: int) -> SavedChoice:
    return SavedChoice(
        processors="p",
        build="b",
        shape=ModelShape(number, 10),
        threads=Threads(2, 4),
        model="m",
        n_tried=(1, 2),
        at_s=1.0,
    )


def write_threads(folder: Path) -> Path:
    for number in range(3):
        thread_choice.keep(folder / "threads.json", kept(number))
    return folder / "threads.json"


def look_at_threads(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = folder / "threads.json"
    thread_choice.read(path)
    thread_choice.keep(path, kept(9))
    assert thread_choice.find(path, "p", "b", ModelShape(9, 10)) == Threads(2, 4)


def write_pulls(folder: Path) -> Path:
    pulls._write(folder / "pulls.json", [pulls.PullRequest("acme/fox"), pulls.PullRequest("acme/bear", True)])
    return folder / "pulls.json"


def look_at_pulls(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    if not pulls._read(folder / "pulls.json"):
        assert "cannot be read" in caplog.text
        assert (folder / "pulls.unreadable").exists()


def write_preferences(folder: Path) -> Path:
    path = folder / "tui.toml"
    path.write_text('theme = "localrun-light"\n\n[keys]\n"chat.new" = "f7"\n"monitor.cancel" = "k,delete"\n')
    return path


def look_at_preferences(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = preferences.load(folder / "tui.toml")
    assert all("\n" not in problem or "tui.toml" in problem for problem in found.problems)


def write_settings(folder: Path) -> Path:
    path = folder / "config" / "localrun.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text('port = 1234\nlatency = "interactive"\nslots = 3\nmodel_dirs = "/tmp/a"\n')
    return path


def look_at_settings(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    try:
        config.load(environ={"LOCALRUN_HOME": str(folder)})
    except ConfigError as error:
        if "localrun.toml" not in str(error):
            raise


CASES = {
    "manifest": Case(write_manifests, look_at_manifests),
    "chats.db": Case(write_chats, look_at_chats),
    "block.kv": Case(write_blocks, look_at_blocks),
    "about.json": Case(write_about, look_at_about),
    "journal": Case(write_journal, look_at_journal),
    "verdict": Case(write_verdict, look_at_verdict),
    "threads.json": Case(write_threads, look_at_threads),
    "pulls.json": Case(write_pulls, look_at_pulls),
    "tui.toml": Case(write_preferences, look_at_preferences),
    "localrun.toml": Case(write_settings, look_at_settings),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_of_ours_that_is_cut_or_flipped(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    seed = int.from_bytes(os.urandom(4), "big")
    print("seed", seed)
    chance = random.Random(seed)
    caplog.set_level(logging.WARNING)
    path = case.write(tmp_path)
    sound = path.read_bytes()
    case.look(tmp_path, caplog)
    for place in range(N_PLACES):
        for companion in path.parent.glob(f"{path.name}-*"):
            companion.unlink()
        content = bytearray(sound)
        if place % 4 == 0:
            del content[chance.randrange(len(content)) :]
            what = f"cut to {len(content)} bytes"
        else:
            at = chance.randrange(len(content))
            content[at] ^= 1 << chance.randrange(8) if place % 2 else chance.randrange(1, 256)
            what = f"flipped at {at}"
        path.write_bytes(content)
        try:
            case.look(tmp_path, caplog)
        except BaseException as error:
            error.add_note(f"{path.name} was {what}")
            raise


# --- newer files -----------------------------------------------------------------------------------------------------


def newer(path: Path, **fields: Any) -> bytes:
    content: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(content | fields))
    return path.read_bytes()


def test_a_newer_manifest_is_told_and_left_alone(tmp_path: Path) -> None:
    path = write_manifests(tmp_path)
    content = newer(path, version=2, shape={"new": True})
    store = store_of(tmp_path)
    (damaged,) = store.damaged()
    assert "newer localrun (version 2 of the format, this one knows 1)" in damaged.problem
    with pytest.raises(BadModelFile, match="newer localrun"):
        store.resolve("one")
    naming.remove(store, "two")
    naming.collect_garbage(store, now_s=10**10, min_age_s=0)
    assert len(store.blobs.all()) == len(NAMES)
    assert path.read_bytes() == content


def test_a_newer_journal_is_told_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "fox.localrun-journal"
    Journal.create(path, Header(size_bytes=1_000, sha256="a" * 64, version=2)).close()
    content = path.read_bytes()
    with pytest.raises(DownloadFailed, match="newer localrun"):
        journal.read(path)
    assert path.read_bytes() == content


def test_a_newer_verdict_and_newer_threads_stay(tmp_path: Path) -> None:
    path = write_verdict(tmp_path)
    content = newer(path, version=kernels.VERSION + 1)
    assert kernels.read(tmp_path, PAIR) == Verdict()
    with pytest.raises(FileExistsError, match="newer localrun"):
        kernels.keep(tmp_path, PAIR, Verdict(is_probed=True))
    assert path.read_bytes() == content
    threads = tmp_path / "threads.json"
    threads.write_bytes(b'{"version": 2, "entries": []}')
    assert thread_choice.read(threads) == []
    with pytest.raises(FileExistsError, match="newer localrun"):
        thread_choice.keep(threads, kept(1))
    assert threads.read_bytes() == b'{"version": 2, "entries": []}'


def test_newer_pulls_are_told_and_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pulls.json"
    path.write_bytes(b'{"version": 2, "pulls": []}')
    assert pulls._read(path) == []
    assert "pulls of before do not go on" in caplog.text
    assert (tmp_path / "pulls.unreadable").read_bytes() == b'{"version": 2, "pulls": []}'
