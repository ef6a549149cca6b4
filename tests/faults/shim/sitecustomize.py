"""Faults inside a process of the program that knows nothing of them: Python imports this file at its start where
`tests.faults.injection` put the folder into PYTHONPATH.

LOCALRUN_FAULTS names a file of JSON that a test may replace at any time; each replacement starts the count anew:

    {"what": "disk", "root": FOLDER, "at": 7, "errno": 28, "lasts": true}   the 7th touch of the disk below the folder
    {"what": "disk", "root": FOLDER, "at": 7, "signal": 9}                  the process is killed at that touch
    {"what": "llama_decode", "at": 3, "returns": [1, 1, 2]}                 the 3rd call and those after it
    {"what": "clock", "jump_s": 86400}                                      what time.time() says

Each entry of `returns` is what llama.cpp is said to have answered; with `"computes": true` it did compute, as where a
failure leaves the micro-batches before it. LOCALRUN_FAULTS_CONSTANTS (JSON, `{module: {name: value}}`) sets constants
of modules, or with an object the defaults of a class, so that nobody waits for half a minute. How often a fault was met
stands beside the file, in FILE.met.
"""

from __future__ import annotations

import builtins
import functools
import importlib.abc
import importlib.util
import io
import json
import os
import sys
import threading
import time

_plan_path = os.environ.get("LOCALRUN_FAULTS", "")
_constants = json.loads(os.environ.get("LOCALRUN_FAULTS_CONSTANTS", "{}"))
_lock = threading.RLock()
_real_open, _real_time, _os_open = io.open, time.time, os.open
_counts: dict[str, int] = {}
_stamp: object = None
_plan: dict = {}


def _read_plan() -> dict:
    global _stamp, _plan
    with _lock:  # a thread that saw the new plan late would start the count once more
        try:
            status = os.stat(_plan_path)
        except OSError:
            _plan, _stamp = {}, None
            return _plan
        if (stamp := (status.st_ino, status.st_mtime_ns)) != _stamp:
            with _real_open(_plan_path) as file:
                _plan = json.load(file)
            _stamp = stamp
            _counts.clear()
        return _plan


def _is_met(what: str) -> dict | None:
    """Counts a call; the plan, when this one is to fail."""
    with _lock:
        plan = _read_plan()
        if plan.get("what") != what:
            return None
        n = _counts[what] = _counts.get(what, 0) + 1
        if n < plan["at"] or (n > plan["at"] and not plan.get("lasts") and "returns" not in plan):
            return None
        descriptor = _os_open(f"{_plan_path}.met", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        _real_write(descriptor, b"x")
        os.close(descriptor)
        return plan


# --- the disk -------------------------------------------------------------------------------------------------------


def _touch(*paths: object) -> None:
    plan = _read_plan()
    if plan.get("what") != "disk":
        return
    root = plan["root"]
    if not any(isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(root) for path in paths):
        return
    met = _is_met("disk")
    if met is None:
        return
    if "signal" in met:
        os.kill(os.getpid(), met["signal"])
    raise OSError(met["errno"], os.strerror(met["errno"]), str(paths[0]))


_real_write = os.write
_names: dict[int, str] = {}


def _by_path(real):
    @functools.wraps(real)
    def wrapped(path, *rest, **more):
        _touch(path, *rest[:1])
        return real(path, *rest, **more)

    return wrapped


def _by_descriptor(real):
    @functools.wraps(real)
    def wrapped(descriptor, *rest, **more):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
        except (OSError, TypeError):
            name = ""
        _touch(name)
        return real(descriptor, *rest, **more)

    return wrapped


def _open_descriptor(path, flags, *rest, **more):
    if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _touch(path)
    return _os_open(path, flags, *rest, **more)


class _File(io.FileIO):
    def write(self, data):
        _touch(os.readlink(f"/proc/self/fd/{self.fileno()}"))
        return super().write(data)


def _open(file, mode="r", buffering=-1, *rest, **more):
    is_path = isinstance(file, (str, os.PathLike))
    if not set(mode) & set("wxa+") or "b" not in mode or not (is_path or isinstance(file, int)):
        if is_path and set(mode) & set("wxa+"):
            _touch(file)
        return _real_open(file, mode, buffering, *rest, **more)
    if is_path:
        _touch(file)
    raw = _File(file, mode.replace("b", ""))
    if buffering == 0:
        return raw
    return (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)


def _break_disk() -> None:
    for name in ("replace", "rename", "mkdir", "unlink", "remove", "rmdir", "link", "symlink", "truncate", "chmod"):
        setattr(os, name, _by_path(getattr(os, name)))
    for name in ("write", "fsync", "ftruncate", "posix_fallocate"):
        setattr(os, name, _by_descriptor(getattr(os, name)))
    os.open = _open_descriptor
    io.open = builtins.open = _open


# --- the clock, the native library, constants -----------------------------------------------------------------------


def _time() -> float:
    plan = _read_plan()
    return _real_time() + (plan["jump_s"] if plan.get("what") == "clock" else 0.0)


def _failing_call(module, name: str, what: str) -> None:
    real = getattr(module, name)

    def call(*arguments):
        plan = _is_met(what)
        step = _counts.get(what, 0) - plan["at"] if plan else 0
        if plan is None or step >= len(plan["returns"]):
            return real(*arguments)
        if plan.get("computes"):
            real(*arguments)
        return plan["returns"][step]

    setattr(module, name, call)


def _patch(module) -> None:
    if module.__name__ == "llama_cpp.llama_cpp":
        _failing_call(module, "llama_decode", "llama_decode")
        _failing_call(module, "llama_state_seq_set_data", "state_set")
    for name, value in _constants.get(module.__name__, {}).items():
        if isinstance(value, dict):
            defaults = getattr(module, name).__init__.__kwdefaults__
            assert value.keys() <= defaults.keys()
            defaults |= value
        else:
            assert hasattr(module, name), f"{module.__name__} has no {name}"
            setattr(module, name, value)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "llama_cpp.llama_cpp" and name not in _constants:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        real = spec.loader.exec_module

        def exec_module(module):
            real(module)
            _patch(module)

        spec.loader.exec_module = exec_module
        return spec


# A daemon that has been quiet for two seconds has the kernels probed; what is planned is not for these processes.
_is_probe = not {"localrun.doctor.kernel_probe", "localrun.engine.tools.probe"}.isdisjoint(sys.orig_argv)
if (_plan_path or _constants) and not _is_probe:
    sys.meta_path.insert(0, _Finder())
if _plan_path and not _is_probe:
    _break_disk()
    time.time = _time
