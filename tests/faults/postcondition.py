"""What must be true after every fault, whatever it was: each request ended once, nothing is held, nothing is left, and
the next request is answered as before.

    with unharmed(daemon):
        ...  # the fault, and whatever clients see of it
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import psutil

from localrun.models.download.huggingface import MAX_AT_ONCE
from localrun.models.storage import manifest
from localrun.models.storage.blobs import Blobs, hash_file
from tests.daemon import Daemon

CANARY: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
FINAL = {"done", "cancelled", "failed"}
# Names under which the program, its engines and its downloads write what is not complete, and locks.
UNFINISHED = re.compile(r"\.localrun-temp$|\.tmp$|\.localrun-(?:part|partial|lock|journal)|\.lock$")
# With llama.cpp, an idle daemon asks once what the kernels compute. That is its own doing, and may take a while.
PROBE, N_PROBE_PIPES = "localrun.doctor.kernel_probe", 3
# More memory than a fault may cost the daemon's process, which keeps buffers and gives no pages back.
MAX_GROWTH_BYTES = 128 * 1024 * 1024
# How long a daemon may take to tidy up, on a machine that is busy with other tests.
PATIENCE_S = 60.0


class Held(NamedTuple):
    """What a daemon without any model holds: descriptors of its process, connections that it made and keeps for its
    next question, and its children by what they run. Where Linux tells, `open_on` says what the descriptors are."""

    n_descriptors: int
    connections: tuple[str, ...]
    children: tuple[str, ...]
    open_on: tuple[str, ...]


# Of each daemon, before its first fault.
_answers: WeakKeyDictionary[Daemon, str] = WeakKeyDictionary()
# Of each daemon: how many models were deleted, and the requests that were counted for them alone.
_gone: WeakKeyDictionary[Daemon, tuple[int, float]] = WeakKeyDictionary()


@contextmanager
def unharmed(daemon: Daemon, *, may_leave: tuple[str, ...] = (), may_trace: bool = False) -> Iterator[None]:
    """Whatever happens inside leaves the daemon as it was. `may_leave` are endings of names of unfinished files that a
    fault may leave on purpose, such as a download that can be resumed; with `may_trace` an engine that dies may leave
    its last lines in the log."""
    if daemon not in _answers:
        _answers[daemon] = _answer(daemon)
    before, before_bytes = _held_without_models(daemon), _rss_bytes(daemon)
    files = unfinished_files(daemon.home)
    n_traces = daemon.log.count("Traceback")
    yield
    check_requests(daemon)
    assert _answer(daemon) == _answers[daemon], "the next request is answered as before"
    _within_patience(lambda: _held_without_models(daemon), lambda held: _is_no_more(held, before), before)
    assert _rss_bytes(daemon) - before_bytes < MAX_GROWTH_BYTES
    left = [path for path in unfinished_files(daemon.home) - files if not path.name.endswith(may_leave or ("\0",))]
    assert not left, f"left behind: {left}"
    assert check_store(daemon.home) == []
    assert may_trace or daemon.log.count("Traceback") == n_traces, daemon.log[-4000:]


def check_requests(daemon: Daemon) -> None:
    """No request is under way and each ended once; no slot, lease, sequence or cell belongs to one."""
    snapshot = _within_patience(lambda: _snapshot(daemon), _is_settled, "no request under way")
    total = snapshot["aggregate"]
    ended = re.findall(r"^localrun_requests_total\{[^}]*\} ([0-9.]+)", daemon.http.get("/metrics").text, re.M)
    n_gone, (n_gone_before, n_lost_before) = daemon.log.count("its series leave /metrics"), _gone.get(daemon, (0, 0.0))
    n_lost = total["requests_total"] - sum(map(float, ended))
    is_told = n_lost == n_lost_before or (n_gone > n_gone_before and n_lost > n_lost_before)
    assert is_told, "each request is counted as ended, and once"
    _gone[daemon] = n_gone, n_lost
    ids = [row["id"] for row in snapshot["requests"]]
    assert len(ids) == len(set(ids))
    for engine in snapshot["engines"]:
        assert [run for run in engine["kv_runs"] if run[2] is not None] == [], "a cell belongs to an ended request"


def models_folder(home: Path) -> Path:
    """Where a daemon with this home keeps its models."""
    return home / "data" / "models"


def check_store(home: Path) -> list[str]:
    """What is wrong in a models folder: manifests that cannot be read, and files that are not what their names say."""
    folder = models_folder(home)
    damaged = [problem for _, problem in manifest.read_all(folder).damaged]
    return damaged + [str(blob.path) for blob in Blobs(folder).all() if hash_file(blob.path) != blob.digest]


def unfinished_files(home: Path) -> set[Path]:
    """Temporary files, locks and partial downloads anywhere below the daemon's home."""
    return {path for path in home.rglob("*") if UNFINISHED.search(path.name)}


def _answer(daemon: Daemon) -> str:
    response = daemon.post("/v1/completions", CANARY)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def _held_without_models(daemon: Daemon) -> Held:
    """Unloads every model first: one that is leased cannot be unloaded."""
    for engine in _snapshot(daemon)["engines"]:
        daemon.post("/api/generate", model=engine["model"], keep_alive=0)
    _within_patience(lambda: _snapshot(daemon)["engines"], lambda engines: not engines, "no engine")
    daemon.disconnect()
    process = psutil.Process(daemon.process.pid)
    connections = [
        f"{row.raddr} {row.status}"
        for row in process.net_connections("tcp")
        if row.raddr and row.laddr.port != daemon.port
    ]
    children, n_descriptors = [], process.num_fds() - len(connections)
    for child in process.children():
        if PROBE in _command(child):
            n_descriptors -= N_PROBE_PIPES
        else:
            with suppress(psutil.NoSuchProcess):  # ended since
                children += [child, *child.children(recursive=True)]
    open_on = sorted(map(_target, Path(f"/proc/{process.pid}/fd").glob("*")))
    # While one connection is open, SQLite keeps the descriptor of one that was closed for the next one.
    n_descriptors -= sum(target.endswith("/usage.db") for target in open_on)
    return Held(n_descriptors, tuple(connections), tuple(sorted(map(_command, children))), tuple(open_on))


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:  # closed since
        return ""


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[1:])
    except psutil.NoSuchProcess:  # or it has ended, and nobody has asked for its status yet
        return "ended"


def _rss_bytes(daemon: Daemon) -> int:
    return int(psutil.Process(daemon.process.pid).memory_info().rss)


def _is_no_more(held: Held, before: Held) -> bool:
    n_connections = max(MAX_AT_ONCE, len(before.connections))
    is_as_before = held.n_descriptors <= before.n_descriptors and held.children == before.children
    return is_as_before and len(held.connections) <= n_connections


def _is_settled(snapshot: dict[str, Any]) -> bool:
    running = [row for row in snapshot["requests"] if row["state"] not in FINAL]
    total = snapshot["aggregate"]
    busy = total["running"] + total["queued"] + total["loading"]
    return not running and not busy and not any(row["slots_busy"] + row["queued"] for row in snapshot["engines"])


def _snapshot(daemon: Daemon) -> dict[str, Any]:
    snapshot: dict[str, Any] = daemon.http.get("/localrun/v1/snapshot").json()
    return snapshot


def _within_patience(look: Any, is_right: Any, wanted: object) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_right(seen := look()):
        assert time.monotonic() < deadline_s, f"wanted: {wanted}\nseen: {seen}"
        time.sleep(0.1)
    return seen
