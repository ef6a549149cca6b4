"""What localrun runs in: the interpreter and its packages, memory and disk, the folders, how many threads engines use,
the network and the port.

Does not: connect to anything.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from localrun.doctor import Finding, fail, ok, size, warn
from localrun.hardware.processors import Processors
from localrun.hardware.thread_choice import SavedChoice
from localrun.models.download import ranges

# --- the interpreter, and whether the packages are the versions that this release needs ---

OLDEST = (3, 11)
_RUNNING = tuple(sys.version_info[:3])
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^;\s]+)")


def check_python(
    version: Sequence[int] = _RUNNING, *, is_64_bit: bool = sys.maxsize > 2**32, is_translated: bool = False
) -> Finding:
    """Whether the interpreter is one that localrun runs on. Rosetta `is_translated` programs for Intel processors."""
    shown = ".".join(str(part) for part in version[:3])
    if tuple(version[:2]) < OLDEST:
        return fail("python", f"Python {shown} is too old", "install Python 3.11 or newer and localrun with it")
    if not is_64_bit:
        return fail("python", f"Python {shown} is a 32-bit program", "install a 64-bit Python and localrun with it")
    if is_translated:
        return warn(
            "python", f"Python {shown} is an Intel program under Rosetta: engines are about ten times slower",
            "install a Python for Apple silicon (brew install python) and install localrun with it: "
            "PYTHON=/opt/homebrew/bin/python3 packaging/install.sh",
        )  # fmt: skip
    return ok("python", f"{shown} ({platform.machine() or 'unknown machine'}, {sys.executable})")


def check_packages(
    required: Sequence[str], installed: Callable[[str], str] = importlib.metadata.version
) -> Iterator[Finding]:
    """`required` are requirement lines; those with `==` and no marker are compared with what is installed."""
    wrong = []
    for line in required:
        match = _PINNED.match(line)
        if match is None or ";" in line:
            continue
        name, wanted = match.groups()
        try:
            found = installed(name)
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        if found.partition("+")[0] != wanted:
            wrong.append((name, wanted, found))
    for name, wanted, found in wrong:
        yield fail("packages", f"{name} is {found}; this version needs {wanted}", pip(f"{name}=={wanted}"))
    if not wrong:
        yield ok("packages", "the versions that this release needs")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        yield ok("packages", f"diskcache {installed('diskcache')} (CVE-2025-69872) is here, but localrun never uses it")


def own_requirements() -> Sequence[str]:
    """The requirement lines of the installed localrun; empty for one that runs from a bare checkout."""
    try:
        return importlib.metadata.requires("localrun") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def pip(arguments: str) -> str:
    """The command that installs into this interpreter's environment."""
    return f"{sys.executable} -m pip install {arguments}"


# --- memory and disk ---

# The built-in model runs in a tenth of this; a small useful one (1B, 4 bits) needs about all of it.
LOW_MEMORY_BYTES = 2_000_000_000
LEAST_MEMORY_BYTES = 300_000_000
LOW_DISK_BYTES = 10_000_000_000
LEAST_DISK_BYTES = 500_000_000
FULL_DISK_BYTES = 20_000_000


def check_memory(available_bytes: int, total_bytes: int) -> Finding:
    """Of the machine, or of the container around us."""
    text = f"{size(available_bytes)} of {size(total_bytes)} available"
    if available_bytes < LEAST_MEMORY_BYTES:
        return fail("memory", text, "close other programs, or give this container more memory: no model can be loaded")
    if available_bytes < LOW_MEMORY_BYTES:
        return warn("memory", text, "close other programs before loading models larger than the built-in one")
    return ok("memory", text)


def check_disk(folder: Path, free_bytes: int) -> Finding:
    """`folder` is where models are pulled to."""
    text = f"{size(free_bytes)} free at {folder}"
    if free_bytes < LEAST_DISK_BYTES:
        return fail("disk", text, "free some space, or put models on another disk with LOCALRUN_MODELS")
    if free_bytes < LOW_DISK_BYTES:
        return warn("disk", text, "an 8B model takes 5 GB; free some space, or set LOCALRUN_MODELS")
    return ok("disk", text)


def check_cache_disk(folder: Path, free_bytes: int, *, kv_limit_bytes: int, kv_used_bytes: int) -> Iterator[Finding]:
    """`folder` is the cache folder, perhaps on another disk than models: small files go there, and the KV cache, which
    may still grow to its limit. Nothing is said while there is room."""
    to_come_bytes = kv_limit_bytes - kv_used_bytes
    if free_bytes < FULL_DISK_BYTES:
        yield fail(
            "disk", f"{size(free_bytes)} free at {folder}", "free some space, or move all folders with LOCALRUN_HOME"
        )
    elif to_come_bytes > free_bytes:
        yield warn(
            "disk", f"the KV cache may take {size(to_come_bytes)} more, more than is free at {folder}",
            "lower disk_cache_bytes (LOCALRUN_DISK_CACHE), or `localrun cache clear --disk`",
        )  # fmt: skip


def free_bytes(folder: Path) -> int:
    """Of the disk that the folder is on, or will be on."""
    return int(psutil.disk_usage(str(existing(folder))).free)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))


# --- the folders: whether they can be made, read and written, and by nobody else ---

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_places(places: Mapping[str, Path]) -> Iterator[Finding]:
    """By name, such as `data`. One line for all that are well, one for each that is not."""
    sound = []
    for name, folder in places.items():
        finding = _problem(name, folder)
        if finding is None:
            sound.append(name)
        else:
            yield finding
    if sound:
        yield ok("folders", f"{', '.join(sound)} are writable")


def _problem(name: str, folder: Path) -> Finding | None:
    check = "folders"
    if not folder.exists():
        above = existing(folder)
        if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
            return None
        return fail(
            check, f"{name}: {folder} cannot be created in {above}", f"make {above} yours, or set LOCALRUN_HOME"
        )
    if not folder.is_dir():
        return fail(check, f"{name}: {folder} is not a folder", "move it away, or set LOCALRUN_HOME")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        remedy = "give yourself full control of it" if sys.platform == "win32" else f"sudo chown -R $(id -u) {folder}"
        return fail(check, f"{name}: {folder} is not readable and writable for you", remedy)
    if sys.platform != "win32":
        status = folder.stat()
        if status.st_uid != os.getuid():
            return warn(check, f"{name}: {folder} belongs to another user", f"sudo chown -R $(id -u) {folder}")
        if status.st_mode & _OTHERS_MAY_WRITE and not status.st_mode & stat.S_ISVTX:
            return warn(check, f"{name}: others may write to {folder}", f"chmod go-w {folder}")
    return None


# --- threads: what limits them, and what was measured ---

MAX_MODELS = 3


def check_threads(processors: Processors, kept: Iterable[SavedChoice], *, wanted: int) -> Finding:
    """`wanted` is the setting `threads`, and `kept` all that was measured, here and under other limits."""
    most, usual = processors.most_threads, processors.usual_threads
    what = ", ".join(filter(None, (processors.kinds, processors.limit)))
    if wanted > most:
        return warn(
            "threads", f"`threads` is {wanted}, but only {most} can run at once ({what}): steps wait for the rest",
            "unset it (LOCALRUN_THREADS, or `threads` in localrun.toml), or give this process more processors",
        )  # fmt: skip
    if wanted:
        return ok("threads", f"{wanted}, because `threads` is set ({what})")
    text = f"{usual} ({what})"
    here = [each for each in kept if each.processors == processors.identity]
    if here:
        newest = sorted(here, key=lambda each: each.at_s)[-MAX_MODELS:]
        found = "; ".join(
            f"{each.model} {each.threads.decode} for streams and {each.threads.prompt} for prompts" for each in newest
        )
        return ok("threads", f"{text}; measured: {found}")
    others = sorted({each.n_threads for each in processors.candidates()} - {usual})
    if others:
        shown = ", ".join(map(str, others))
        return ok("threads", f"{text}; an engine also tries {shown} when it is idle after its first load")
    return ok("threads", text)


# --- the network: whether pulls can go out, as far as settings decide it ---

_TRUE = ("1", "true", "yes", "on")


def check_network(environ: Mapping[str, str]) -> Iterator[Finding]:
    """By the variables that huggingface_hub and HTTP clients read."""
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if environ.get(name, "").lower() in _TRUE]
    if offline:
        yield warn("network", f"offline: {offline[0]}={environ[offline[0]]}", f"unset {offline[0]} to pull models")
    endpoint = environ.get("HF_ENDPOINT")
    named = ranges.named_proxies(environ)
    parts = [f"{name} {ranges.without_password(value)}" for name, value in named.items()]
    if endpoint:
        parts.append(f"HF_ENDPOINT {ranges.without_password(endpoint)}")
    if problem := ranges.proxy_problem(environ):
        yield warn("network", problem, "change or unset that variable, or no model can be pulled")
    elif not offline:
        yield ok("network", ", ".join(parts) or "direct, no proxy set")
    spared = (environ.get("no_proxy") or environ.get("NO_PROXY") or "").replace(" ", "").split(",")
    if named and not {"*", "localhost", "127.0.0.1", "127.0.0.0/8"} & set(spared):
        yield warn(
            "network", "a proxy is set, and NO_PROXY does not name this machine: editors may ask it for the daemon",
            "export NO_PROXY=localhost,127.0.0.1,::1",
        )  # fmt: skip


# --- the port: nobody, our daemon, or somebody else ---


def check_port(
    host: str, port: int, *, own_version: str, daemon_version: str | None, problem: str = "", is_stopping: bool = False
) -> Finding:
    """`daemon_version` of a daemon that answers there; `problem` says who else does, or why ours does not."""
    where = f"{host}:{port}"
    if is_stopping:
        return warn("daemon", problem, "wait until it has stopped, then run this again")
    if problem:
        return fail("daemon", problem, "stop that program, or choose another port with --port or LOCALRUN_PORT")
    if daemon_version is None:
        refusal = _cannot_listen(host, port)
        if refusal:
            return fail("daemon", f"{where} is not available: {refusal}", "choose another one: LOCALRUN_PORT")
        return ok("daemon", f"not running; {where} is free")
    if daemon_version != own_version:
        return warn(
            "daemon", f"{where} is localrun {daemon_version}, but this is {own_version}",
            "stop the old one: `localrun stop --daemon`, or `localrun service install` for the service",
        )  # fmt: skip
    return ok("daemon", f"localrun {daemon_version} is running at {where}, the same version as this program")


def _cannot_listen(host: str, port: int) -> str:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # A daemon that has just ended leaves closed connections behind, which are in nobody's way.
            if hasattr(socket, "SO_REUSEPORT"):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""
