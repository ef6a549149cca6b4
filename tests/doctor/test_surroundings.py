"""Python, memory, disk, folders, port, network settings and caches."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
from pathlib import Path

import pytest

from localrun import kv_folders
from localrun.doctor import Finding, Level
from localrun.doctor.stored_models import check_hub_cache, check_kv_cache
from localrun.doctor.surroundings import (
    check_cache_disk,
    check_disk,
    check_memory,
    check_network,
    check_packages,
    check_places,
    check_port,
    check_python,
    check_threads,
    existing,
)
from localrun.hardware.processors import Processors
from localrun.hardware.thread_choice import ModelShape, SavedChoice, Threads
from localrun.kv_folders import About
from tests.says import says

OK, WARN, FAIL = Level.OK, Level.WARN, Level.FAIL


def levels(findings: object) -> list[Level]:
    return [each.level for each in findings]  # type: ignore[attr-defined]


# --- Python ----------------------------------------------------------------------------------------------------------


def test_python():
    assert check_python().level is OK
    assert check_python((3, 10, 9)).level is FAIL
    assert check_python((3, 14, 0)).level is OK
    assert "32-bit" in check_python(is_64_bit=False).text


def test_pinned_packages_are_compared():
    required = ["llama-cpp-python==0.3.36", "numpy>=1.26", "textual==8.2.8; extra == 'dev'", "gone==1"]

    def installed(name: str) -> str:
        if name in ("gone", "diskcache"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.3.35+cu124"

    wrong = list(check_packages(required, installed))
    assert says(wrong[0].text, "llama-cpp-python", "0.3.35+cu124", "0.3.36")
    assert says(wrong[1].text, "gone", 1)
    assert len(wrong) == 2
    assert wrong[0].remedy == f"{sys.executable} -m pip install llama-cpp-python==0.3.36"
    assert levels(check_packages(["llama-cpp-python==0.3.35"], installed)) == [OK]
    assert any(says(each.text, "diskcache", "5.6.3", "never") for each in check_packages([], lambda name: "5.6.3"))


# --- the machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("available", "level"), [(8e9, OK), (1e9, WARN), (1e8, FAIL)])
def test_memory(available, level):
    assert check_memory(int(available), 16_000_000_000).level is level


@pytest.mark.parametrize(("free", "level"), [(1e12, OK), (5e9, WARN), (1e8, FAIL)])
def test_disk(tmp_path: Path, free, level):
    assert check_disk(tmp_path, int(free)).level is level
    assert existing(tmp_path / "a" / "b") == tmp_path


@pytest.mark.parametrize(
    ("free", "limit", "used", "expected"),
    [(1e12, 3e10, 0, []), (2e10, 3e10, 0, [WARN]), (2e10, 3e10, 1.5e10, []), (0, 3e10, 3e10, [FAIL])],
    ids=["room", "too little for the limit", "most of it is there already", "full"],
)
def test_the_disk_of_the_cache(tmp_path: Path, free, limit, used, expected):
    found = check_cache_disk(tmp_path, int(free), kv_limit_bytes=int(limit), kv_used_bytes=int(used))
    assert levels(found) == expected


# --- folders ---------------------------------------------------------------------------------------------------------


def test_sound_folders_share_a_line(tmp_path: Path):
    (found,) = check_places({"data": tmp_path, "cache": tmp_path / "not" / "yet"})
    assert (found.level, found.text) == (OK, "data, cache are writable")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no permission bits")
def test_folders_that_are_not_sound(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    found = list(check_places({"data": file, "cache": shared, "state": file / "below"}))
    assert levels(found) == [FAIL, WARN, FAIL]
    assert found[1].remedy == f"chmod go-w {shared}"


@pytest.mark.skipif(sys.platform == "win32" or os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path):
    tmp_path.chmod(0o500)
    try:
        assert levels(check_places({"data": tmp_path, "cache": tmp_path / "new"})) == [FAIL, FAIL]
    finally:
        tmp_path.chmod(0o700)


# --- the port --------------------------------------------------------------------------------------------------------


def test_the_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # Bound by somebody who does not answer at all.
        assert check_port("127.0.0.1", port, own_version="2", daemon_version=None).level is FAIL
        same = check_port("127.0.0.1", port, own_version="2", daemon_version="2")
        running = f"localrun 2 is running at 127.0.0.1:{port}, the same version as this program"
        assert (same.level, same.text) == (OK, running)
        old = check_port("127.0.0.1", port, own_version="2", daemon_version="1")
        assert (old.level, "localrun stop --daemon" in old.remedy) == (WARN, True)
        other = check_port("127.0.0.1", port, own_version="2", daemon_version=None, problem="Ollama has it")
        assert (other.level, other.text) == (FAIL, "Ollama has it")
        ending = check_port("::1", port, own_version="2", daemon_version=None, problem="ends", is_stopping=True)
        assert ending.level is WARN
    assert check_port("127.0.0.1", port, own_version="2", daemon_version=None).text.endswith(" is free")


# --- the network -----------------------------------------------------------------------------------------------------


def network(**environ: str) -> list[Finding]:
    return list(check_network(environ))


def test_offline_is_a_warning_that_names_the_variable():
    (found,) = network(HF_HUB_OFFLINE="1")
    assert found.level is WARN
    assert "HF_HUB_OFFLINE" in found.remedy
    assert levels(network(HF_HUB_OFFLINE="0")) == [OK]


def test_proxies_are_shown_without_their_passwords():
    (found,) = network(HTTPS_PROXY="http://kim:secret@proxy:3128", NO_PROXY="corp, 127.0.0.1")
    assert found.text == "HTTPS_PROXY http://***@proxy:3128"
    assert levels(network(http_proxy="http://proxy", no_proxy="corp")) == [OK, WARN]
    assert levels(network(http_proxy="http://proxy", no_proxy="*")) == [OK]
    found, *_ = network(ALL_PROXY="socks4://me:secret@proxy")
    assert (found.level, found.text.partition(",")[0]) == (WARN, "ALL_PROXY is socks4://***@proxy")
    assert network(all_proxy="socks://proxy:1")[0].text == "all_proxy socks5://proxy:1"
    assert network()[0].text == "direct, no proxy set"
    assert network(HF_ENDPOINT="https://mirror")[0].text == "HF_ENDPOINT https://mirror"


# --- caches ----------------------------------------------------------------------------------------------------------


def test_state_of_models_that_are_gone(tmp_path: Path):
    folder = tmp_path / ("1" * 32)
    folder.mkdir()
    (folder / kv_folders.entry_name(b"k" * 16)).write_bytes(b"x" * 2_000_000)
    model = tmp_path / "some.gguf"
    model.touch()
    kv_folders.write_about(folder, About(model="some", model_path=str(model), build="b", created_at_s=0.0))
    found = list(check_kv_cache(kv_folders.survey(tmp_path), limit_bytes=4_000_000_000, root=tmp_path))
    assert says(found[0].text, "2 MB", "4.0 GB", tmp_path)
    assert levels(found) == [OK]
    model.unlink()
    found = list(check_kv_cache(kv_folders.survey(tmp_path), limit_bytes=0, root=tmp_path))
    assert levels(found) == [OK, WARN]
    assert "switched off" in found[0].text
    assert found[1].remedy == "localrun cache prune"


def test_the_hub_cache_counts_contents_once(tmp_path: Path):
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "etag").write_bytes(b"x" * 3_000_000)
    (snapshot / "file").symlink_to(blobs / "etag")
    assert check_hub_cache(tmp_path).text.startswith("3 MB ")
    assert check_hub_cache(tmp_path / "none").text.startswith("0 MB ")


HYBRID = Processors(name="made", n_machine=24, n_allowed=24, performance_cores=8, efficiency_cores=8)
BOXED = Processors(name="made", n_machine=64, n_allowed=64, performance_cores=32, quota=2.5)


def kept(model: str, threads: Threads, *, at_s: float = 0.0, processors: Processors = HYBRID) -> SavedChoice:
    return SavedChoice(
        processors=processors.identity, build="b", shape=ModelShape(1, 1), threads=threads, model=model,
        n_tried=(8, 16), at_s=at_s,
    )  # fmt: skip


def test_it_says_what_there_is_and_what_will_be_tried():
    found = check_threads(HYBRID, [], wanted=0)
    assert found.level is Level.OK
    assert says(found.text, "8 (", "8 performance", "8 efficiency", "24 hyperthreads", "4, 16, 24")


def test_what_was_measured_under_these_limits_is_told_newest_last():
    entries = [
        kept("newer", Threads(8, 24), at_s=5), kept("older", Threads(8, 16), at_s=4),
        kept("boxed", Threads(1, 1), processors=BOXED), *(kept(f"old{n}", Threads(1, 1), at_s=n) for n in range(3)),
    ]  # fmt: skip
    text = check_threads(HYBRID, entries, wanted=0).text
    assert says(text, "old2 1", " 1 ", "older 8", " 16 ", "newer 8", " 24 ")


def test_a_quota_is_named():
    assert says(check_threads(BOXED, [], wanted=0).text, "2 (32 cores", "2.5 of 64")


def test_a_number_that_is_set_is_told_and_warned_of_where_it_is_too_large():
    assert check_threads(BOXED, [], wanted=2).level is Level.OK
    found = check_threads(BOXED, [], wanted=3)
    assert (found.level, found.check) == (Level.WARN, "threads")
    assert "only 2 can run at once" in found.text
    assert "LOCALRUN_THREADS" in found.remedy
