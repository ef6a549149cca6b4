"""The disk tier: it survives a restart, and whatever happens to its files, the worst is a miss."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from localrun import kv_folders
from localrun.engine.cache import disk as kv_disk
from localrun.engine.cache import disk as kv_disk_bound
from localrun.engine.cache import disk_files as kv_disk_files
from localrun.engine.cache.tree import DiskRecord
from tests.engine.disk_harness import ABOUT, FINGERPRINT, flushed, path_of, record, scanned, tier

DATA = bytearray(b"state" * 1000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kv"


def filled(root: Path, *records: DiskRecord, data: bytearray = DATA) -> kv_disk.KvDisk:
    """A closed tier with these records on disk."""
    disk = tier(root)
    for found in records:
        disk.write(found, data)
    flushed(disk).close()
    return disk


# --- life ----------------------------------------------------------------------------------------------------------


def test_everything_is_there_after_a_restart_parents_first(root):
    first = record([1, 2, 3])
    second, other = record([4, 5], first), record([6], first, is_whole=True)
    third = record([7], second)
    filled(root, first, second, third, other)
    disk, found = scanned(root)
    keys = [each.key for each in found]
    assert sorted(keys) == sorted(each.key for each in (first, second, third, other))
    assert keys.index(first.key) < keys.index(second.key) < keys.index(third.key)
    by_key = {each.key: each for each in found}
    assert by_key[other.key].is_whole
    assert by_key[second.key].tokens == [4, 5]
    assert disk.n_entries == 4
    assert disk.size_bytes == sum(path_of(disk, each).stat().st_size for each in found)
    assert disk.read(third.key) == DATA


def test_of_two_siblings_the_more_recently_used_comes_first(root):
    parent = record([1])
    old, new = record([2], parent), record([3], parent)
    disk = filled(root, parent, old, new)
    for age_s, found in ((50, old), (10, new)):
        at_s = path_of(disk, found).stat().st_mtime - age_s
        os.utime(path_of(disk, found), (at_s, at_s))
    disk, found = scanned(root)
    assert [each.tokens for each in found] == [[1], [3], [2]]
    disk.touch(old.key)
    flushed(disk).close()
    assert [each.tokens for each in scanned(root)[1]] == [[1], [2], [3]]


def test_a_segment_can_be_read_while_it_waits_to_be_written(root, monkeypatch):
    go = threading.Event()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: go.wait(10.0) and fsync(descriptor))
    disk = tier(root)
    found = record([1])
    disk.write(found, DATA)
    assert disk.read(found.key) == DATA
    assert disk.n_entries == 1
    go.set()
    flushed(disk)
    assert disk.read(found.key) == DATA


def test_a_numpy_array_is_as_good_as_bytes(root):
    disk = tier(root)
    found = record([1])
    disk.write(found, np.arange(200, dtype=np.uint8))
    assert flushed(disk).read(found.key) == bytes(range(200))


def test_removing_takes_the_file_and_writing_again_brings_it_back(root):
    disk = tier(root)
    found = record([1])
    disk.write(found, DATA)
    disk.remove(found.key)
    assert disk.read(found.key) is None
    assert not path_of(flushed(disk), found).exists()
    assert (disk.n_entries, disk.size_bytes) == (0, 0)
    disk.remove(found.key)
    disk.write(found, DATA)
    disk.remove(found.key)
    disk.write(found, bytearray(b"new"))
    assert flushed(disk).read(found.key) == b"new"
    assert disk.size_bytes == path_of(disk, found).stat().st_size


def test_clearing_forgets_what_is_there_and_what_waits(root):
    disk = tier(root)
    for number in range(20):
        disk.write(record([number]), DATA)
    disk.clear()
    assert (disk.n_entries, disk.size_bytes) == (0, 0)
    assert list(kv_folders.saved_files(flushed(disk).folder)) == []
    assert scanned(root)[1] == []


def test_a_write_that_fails_late_takes_nothing_of_what_was_written_since(root, monkeypatch):
    is_at_it, go = threading.Event(), threading.Event()

    def refuse(_: int) -> None:
        monkeypatch.undo()
        is_at_it.set()
        go.wait(10.0)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "fsync", refuse)
    disk, found = tier(root), record([1])
    disk.write(found, DATA)
    assert is_at_it.wait(10.0)
    disk.remove(found.key)
    disk.write(found, bytearray(b"new"))
    go.set()
    assert flushed(disk).read(found.key) == b"new"
    assert disk.size_bytes == path_of(disk, found).stat().st_size
    assert disk.take_lost() == []


def test_a_child_whose_parent_is_not_there_is_not_written(root):
    disk = tier(root)
    child = record([2], record([1]))
    disk.write(child, DATA)
    assert (disk.n_entries, disk.n_dropped_writes) == (0, 1)


def test_under_pressure_a_write_is_dropped_and_counted(root, monkeypatch):
    go = threading.Event()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: go.wait(10.0) and fsync(descriptor))
    monkeypatch.setattr(kv_disk, "BACKLOG_BYTES", 3 * len(DATA))
    disk = tier(root)
    for number in range(10):
        disk.write(record([number]), DATA)
    assert disk.is_behind
    assert disk.n_dropped_writes == 7
    go.set()
    assert flushed(disk).n_entries == 3
    assert disk.n_dropped_writes == 7
    disk.write(record([5]), DATA)
    assert flushed(disk).n_entries == 4


# --- damage --------------------------------------------------------------------------------------------------------


def overwrite(path: Path, data: bytes) -> None:
    """Change a file in place, as a bad disk does: the name and the inode stay."""
    with path.open("r+b") as file:
        file.truncate(len(data))
        file.write(data)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.01, 0.3, 0.99])
def test_a_truncated_file_is_a_miss_now_and_gone_at_the_next_start(root, part):
    found = record([1, 2, 3])
    filled(root, found)
    disk, _ = scanned(root)
    path = path_of(disk, found)
    overwrite(path, path.read_bytes()[: int(part * path.stat().st_size)])
    assert disk.read(found.key) is None
    assert disk.n_entries == 0
    assert not path_of(flushed(disk), found).exists()
    filled(root, found)
    overwrite(path, path.read_bytes()[: int(part * path.stat().st_size)])
    assert scanned(root)[1] == []
    assert not path.exists()


def test_a_damaged_payload_is_found_when_it_is_read(root, caplog):
    found = record([1])
    filled(root, found)
    disk, (only,) = scanned(root)
    path = path_of(disk, only)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    overwrite(path, data)
    assert len(scanned(root)[1]) == 1
    with caplog.at_level(logging.WARNING):
        assert disk.read(found.key) is None
    assert "damaged" in caplog.text
    assert not path_of(flushed(disk), found).exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders here")
def test_links_pipes_and_folders_in_the_place_of_a_file_are_misses(root, tmp_path):
    records = [record([number]) for number in range(4)]
    disk = filled(root, *records)
    disk, _ = scanned(root)
    target = tmp_path / "target"
    target.write_bytes(path_of(disk, records[0]).read_bytes())
    for found in records:
        path_of(disk, found).unlink()
    path_of(disk, records[0]).symlink_to(target)
    os.mkfifo(path_of(disk, records[1]))
    path_of(disk, records[2]).mkdir()
    path_of(disk, records[3]).symlink_to(tmp_path / "nowhere")
    assert [disk.read(found.key) for found in records] == [None] * 4
    flushed(disk)
    again, found = scanned(root)
    assert found == []
    assert target.exists()
    assert not path_of(again, records[0]).is_symlink()
    assert not path_of(again, records[1]).exists()


def test_a_segment_of_another_model_under_our_name_is_a_miss(root):
    found = record([1])
    ours, theirs = filled(root, found), tier(root, fingerprint=b"t" * 16)
    theirs.write(found, bytearray(b"theirs"))
    flushed(theirs)
    disk, _ = scanned(root)
    overwrite(path_of(ours, found), path_of(theirs, found).read_bytes())
    assert disk.read(found.key) is None
    assert theirs.read(found.key) == b"theirs"


def test_orphans_and_circles_are_deleted_at_the_start(root):
    first, second = record([1]), record([2], record([1]))
    third = record([3], second)
    disk = filled(root, first, second, third)
    path_of(disk, first).unlink()
    one = DiskRecord(b"1" * 16, b"2" * 16, 0, [1], False)
    two = DiskRecord(b"2" * 16, b"1" * 16, 0, [1], False)
    for each in (one, two):
        header = kv_disk.pack(each, DATA, FINGERPRINT)
        path_of(disk, each).write_bytes(header + DATA)
    disk, found = scanned(root)
    assert found == []
    assert list(kv_folders.saved_files(disk.folder)) == []


def test_files_that_vanish_are_misses(root):
    records = [record([number]) for number in range(3)]
    filled(root, *records)
    disk, _ = scanned(root)
    path_of(disk, records[0]).unlink()
    assert disk.read(records[0].key) is None
    assert disk.n_entries == 2
    kv_folders.remove(disk.folder)
    disk.touch(records[1].key)
    assert disk.read(records[1].key) is None
    disk.write(records[0], DATA)
    assert flushed(disk).read(records[0].key) == DATA
    assert kv_folders.read_about(disk.folder) == ABOUT


def test_strange_files_in_the_folder_are_left_alone(root):
    disk = filled(root, record([1]))
    strange = disk.folder / "notes.txt"
    strange.write_text("mine")
    disk, found = scanned(root)
    assert len(found) == 1
    disk.clear()
    assert kv_folders.remove(flushed(disk).folder) == 0
    assert strange.read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "symlink") or os.name == "nt", reason="links need a right here")
def test_a_link_in_the_place_of_a_folder_is_refused(root, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root.parent.mkdir()
    root.symlink_to(elsewhere)
    with pytest.raises(NotADirectoryError):
        tier(root)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="modes mean little there")
def test_nobody_else_can_look(root):
    root.mkdir(parents=True, mode=0o755)
    disk = filled(root, record([1]))
    assert root.stat().st_mode & 0o777 == 0o700
    assert disk.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in disk.folder.iterdir()} == {0o600}


# --- refusals of the system ------------------------------------------------------------------------------------------

CALLS = ("open", "write", "fsync", "close", "utime", "replace")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("nth", range(4))
def test_a_refused_call_costs_the_write_and_leaves_nothing_half(root, monkeypatch, number, call, nth, caplog):
    disk = tier(root)
    count = 0
    real = getattr(os, call)

    def refuse(*arguments, **options):
        nonlocal count
        if threading.current_thread().name == "kv disk":
            count += 1
            if count == nth + 1:
                if call == "close":
                    real(*arguments)
                raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    records = [record([number]) for number in range(4)]
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(kv_disk_files.os, call, refuse)
        for found in records:
            disk.write(found, DATA)
        flushed(disk)
    assert not [line for line in caplog.messages if "a background job failed" in line]
    was_refused = count > nth
    if call != "open":  # a survey opens notes too, and does without one that it cannot have
        assert disk.may_write == (number == errno.EMFILE or not was_refused)
    assert sum("no longer saved" in line for line in caplog.messages) == (not disk.may_write)
    names = {path.name for path in disk.folder.iterdir()} - {"about.json"}
    assert not [name for name in names if name.endswith(".tmp")]
    readable = [found for found in records if disk.read(found.key) is not None]
    assert disk.n_entries == len(readable)
    again, found = scanned(root)
    assert len(found) == len(names)
    assert all(again.read(each.key) == DATA for each in found)


def test_a_full_disk_turns_writing_off_with_one_line(root, monkeypatch, caplog):
    disk = tier(root)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(kv_disk_files.os, "write", full)
        for number in range(5):
            disk.write(record([number]), DATA)
        flushed(disk)
    assert not disk.may_write
    assert len([line for line in caplog.messages if "No space left" in line]) == 1
    disk.write(record([9]), DATA)
    assert flushed(disk).n_entries == 0


def test_the_last_gigabyte_is_left_to_others(root, monkeypatch, caplog):
    free_bytes = kv_disk_bound.RESERVE_BYTES + 3 * (len(DATA) + 3000)
    monkeypatch.setattr(
        kv_disk_files.KvDiskFiles,
        "free_bytes",
        lambda files: free_bytes - sum(file.size_bytes for file in kv_folders.saved_files(files.folder)),
    )
    disk = tier(root)
    with caplog.at_level(logging.WARNING):
        for number in range(10):
            disk.write(record([number]), DATA)
            flushed(disk)
    assert 1 <= disk.n_entries <= 3
    assert disk.n_entries == len(list(kv_folders.saved_files(disk.folder)))
    assert disk.may_write
    assert disk.read(record([9]).key) == DATA
    free_bytes = kv_disk_bound.RESERVE_BYTES
    with caplog.at_level(logging.WARNING):
        disk.write(record([10]), DATA)
        disk.write(record([11]), DATA)
    assert flushed(disk).read(record([11]).key) is None
    assert len([line for line in caplog.messages if "short of space" in line]) == 1


# --- company ---------------------------------------------------------------------------------------------------------


def test_two_processes_in_one_folder_do_not_hurt_each_other(root):
    shared, of_one, of_two = record([1]), record([2]), record([3])
    one, two = tier(root), tier(root)
    one.write(shared, DATA)
    flushed(one)
    two.write(shared, bytearray(b"other bytes for the same tokens"))
    two.write(of_two, DATA)
    flushed(two)
    one.write(of_one, DATA)
    flushed(one)
    # Those that another process wrote are not ours to use.
    assert one.read(shared.key) is None
    assert two.read(shared.key) == b"other bytes for the same tokens"
    assert one.read(of_one.key) == two.read(of_two.key) == DATA
    assert {each.key for each in scanned(root)[1]} == {shared.key, of_one.key, of_two.key}
    one.clear()
    flushed(one)
    assert two.read(of_two.key) is None
    two.write(of_two, DATA)
    assert flushed(two).read(of_two.key) == DATA


def test_what_a_living_writer_is_at_is_kept_and_what_a_dead_one_left_is_not(root, monkeypatch):
    disk = tier(root)
    folder = disk.folder
    living = folder / f"{'a' * 32}.{os.getpid()}-00000000.tmp"
    old = folder / f"{'b' * 32}.{os.getpid()}-00000000.tmp"
    dead = folder / f"{'c' * 32}.999999999-00000000.tmp"
    for path in (living, old, dead):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    monkeypatch.setattr(kv_disk_files.psutil, "pid_exists", lambda pid: pid == os.getpid())
    assert disk.scan() == []
    assert {path.name for path in folder.iterdir()} == {"about.json", living.name}


def test_somebody_who_deletes_all_the_time_costs_entries_and_nothing_else(root, caplog):
    disk = tier(root)
    is_over = threading.Event()

    def delete() -> None:
        while not is_over.is_set():
            for folder in kv_folders.survey(root):
                kv_folders.remove(folder.path)

    vandal = threading.Thread(target=delete)
    vandal.start()
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            disk.write(record([number]), DATA)
            disk.touch(record([number // 2]).key)
            assert disk.read(record([number // 3]).key) in (None, DATA)
        flushed(disk)
        is_over.set()
        vandal.join()
    assert disk.may_write
    assert not caplog.messages
    disk.write(record([1000]), DATA)
    assert flushed(disk).read(record([1000]).key) == DATA


# --- the bound -------------------------------------------------------------------------------------------------------


def test_the_bound_holds_over_all_models_and_the_least_recently_used_goes_first(root):
    limit_bytes = 10 * (len(DATA) + 200)
    other = tier(root, fingerprint=b"o" * 16, limit_bytes=limit_bytes)
    others = [record([100 + number]) for number in range(6)]
    for number, found in enumerate(others):
        other.write(found, DATA)
        flushed(other)
        os.utime(path_of(other, found), (1000 + number, 1000 + number))
    disk = tier(root, limit_bytes=limit_bytes)
    for number in range(7):
        disk.write(record([number]), DATA)
        flushed(disk)
    total_bytes = sum(folder.size_bytes for folder in kv_folders.survey(root))
    assert limit_bytes / 2 < total_bytes <= limit_bytes
    assert disk.n_entries == 7
    alive = [other.read(found.key) is not None for found in others]
    assert alive == sorted(alive)
    assert 0 < sum(alive) < 6
    for number in range(20, 40):
        disk.write(record([number]), DATA)
    flushed(disk)
    assert sum(folder.size_bytes for folder in kv_folders.survey(root)) <= limit_bytes
    assert disk.n_entries == len(list(kv_folders.saved_files(disk.folder)))
    assert disk.size_bytes == sum(file.size_bytes for file in kv_folders.saved_files(disk.folder))


def test_what_was_used_stays_and_a_beginning_outlives_its_continuation(root):
    disk = tier(root, limit_bytes=8 * (len(DATA) + 200))
    first = record([1] * 8)
    second = record([2] * 8, first)
    disk.write(first, DATA)
    disk.write(second, DATA)
    for number in range(5):
        disk.write(record([10 + number]), DATA)
    flushed(disk)
    for found in (second, first):
        disk.touch(found.key)
    flushed(disk)
    for number in range(4):
        disk.write(record([20 + number]), DATA)
        flushed(disk)
    assert disk.read(second.key) == DATA
    for number in range(30):
        disk.write(record([30 + number]), DATA)
        flushed(disk)
        assert not (path_of(disk, second).exists() and not path_of(disk, first).exists())
    assert disk.read(second.key) is None


def test_what_another_process_is_writing_is_left_to_it_whatever_room_is_needed(root):
    disk = tier(root, limit_bytes=3 * (len(DATA) + 200))
    half = disk.folder / f"{'a' * 32}.{os.getpid()}-00000000.tmp"
    half.write_bytes(DATA)
    os.utime(half, (1, 1))
    for number in range(4):
        disk.write(record([number]), DATA)
        flushed(disk)
    assert half.exists()
    assert disk.n_entries == 1
    assert disk.read(record([3]).key) == DATA


def test_what_is_larger_than_the_limit_is_not_written(root):
    disk = tier(root, limit_bytes=1000)
    disk.write(record([1]), DATA)
    assert flushed(disk).n_entries == 0
    filled(root, record([1]))
    assert scanned(root, limit_bytes=1000)[1] == []


def test_there_is_a_bound_on_files_too(root, monkeypatch):
    monkeypatch.setattr(kv_disk_bound, "MAX_FILES", 64)
    disk = tier(root)
    for number in range(200):
        disk.write(record([number]), bytearray(b"x"))
    assert flushed(disk).n_entries <= 64
    assert len(list(kv_folders.saved_files(disk.folder))) == disk.n_entries


def test_a_system_that_refuses_another_priority_still_gets_its_disk_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse, raising=False)
    disk = tier(tmp_path / "kv")
    found = record([1, 2, 3])
    disk.write(found, b"abc")
    flushed(disk)
    assert path_of(disk, found).exists()
    disk.close()
