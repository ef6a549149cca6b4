"""Wheels of llama-cpp-python: compiled, kept for the next time, taken ready-made, and installed.

Invariant: a compiled wheel is kept by what it was made of and for (processor, compiler, flags), and used for nothing
else. pip's own cache knows none of these, so it stays out of it.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from localrun.native_build.machine import Machine, run
from localrun.native_build.plan import VERSION, Plan, make_plan

PACKAGE = "llama-cpp-python"
# Lies in the wheels that are made here, and says what they were made of.
RECORD = "llama_cpp/build.json"
N_KEPT_WHEELS = 4


# llama-cpp-python's own cache of prompts, which localrun has none of, unpickles files with diskcache (CVE-2025-69872):
# the package asks for it, imports it with everything else, and uses it in one place.
_ASKS = re.compile(rb"(?m)^Requires-Dist: diskcache\b.*\n")
_IMPORTS = re.compile(rb"(?m)^import diskcache\n")
_USES = re.compile(rb"(?m)^( +)(?=self\.cache = diskcache\.)")


class BuildError(Exception):
    """One line: what is wrong, and what to type."""


def rewrite_wheel(
    source: Path, folder: Path, *, keep: Callable[[str], bool], add: Mapping[str, bytes], tag: str = ""
) -> Path:
    """A copy of a wheel with some of its files and some more, perhaps for another platform, which asks for
    diskcache only where it is used. Returns its path.

    RECORD is made anew. The copy has its final name only when it is whole.
    """
    name = source.name if not tag else "-".join([*source.stem.split("-")[:2], tag]) + ".whl"
    lines: list[tuple[str, str, int | str]] = []
    part = folder / f".{name}.part"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as new:
        record = next(entry for entry in old.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", entry))
        infos = [info for info in old.infolist() if keep(info.filename) and not info.is_dir()]
        files = [(info, old.read(info)) for info in infos if info.filename != record]
        files += [(_zip_info(path), data) for path, data in add.items()]
        for info, data in files:
            if tag and info.filename == record.replace("RECORD", "WHEEL"):
                data = re.sub(rb"(?m)^Tag: .*$", b"Tag: " + tag.encode(), data)
            if info.filename == record.replace("RECORD", "METADATA"):
                data = _ASKS.sub(b"", data)
            if info.filename == "llama_cpp/llama_cache.py":
                data = _USES.sub(rb"\1import diskcache\n\n\1", _IMPORTS.sub(b"", data))
            new.writestr(info, data, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append((info.filename, f"sha256={digest}", len(data)))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*lines, (record, "", "")])
        new.writestr(_zip_info(record), text.getvalue())
    return part.replace(folder / name)


def _zip_info(path: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
    info.external_attr = 0o100644 << 16
    return info


def is_needed(path: str) -> bool:
    """Beside the package CMake installs headers, programs and every library once more."""
    return not path.startswith(("lib/", "lib64/", "include/", "bin/", "share/"))


def cache_folder(environ: Mapping[str, str], system: str) -> Path:
    """Where compiled wheels are kept: below the folder that the program itself uses as its cache."""
    if home := environ.get("LOCALRUN_HOME"):
        base = Path(home).expanduser() / "cache"
    elif system == "Windows":
        base = Path(environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local", "localrun", "Cache")
    elif system == "Darwin":
        base = Path.home() / "Library" / "Caches" / "localrun"
    else:
        base = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "localrun")
    return base / "native-wheels"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time, where the system has such locks; elsewhere two compile, and the later one's is kept."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            tell("another process compiles the same; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def kept_wheel(folder: Path, key: str) -> Path | None:
    """The wheel of that key, which thereby becomes the newest; one that is damaged is removed."""
    found = next(iter((folder / key).glob("*.whl")), None)
    if found is not None and not is_whole(found):
        tell(f"{found} is damaged, and is compiled anew")
        shutil.rmtree(folder / key)
        return None
    if found is not None:
        with contextlib.suppress(OSError):
            os.utime(folder / key)
    return found


def keep_newest(folder: Path, n_kept: int = N_KEPT_WHEELS) -> None:
    """Remove what has not been used for the longest time."""
    ages = []
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            ages.append((entry.stat().st_mtime, entry))
    whole = sorted(((age, entry) for age, entry in ages if entry.is_dir() and not entry.name.startswith(".")))
    for _, entry in whole[: max(0, len(whole) - n_kept)]:
        shutil.rmtree(entry, ignore_errors=True)
        for suffix in ("lock", "log"):
            (folder / f"{entry.name}.{suffix}").unlink(missing_ok=True)
    for age, entry in ages:
        # A build that was killed; a living one is not a day old.
        if entry.name.startswith(".") and time.time() - age > 24 * 3600:
            shutil.rmtree(entry, ignore_errors=True)


def compiled_wheel(plan: Plan, machine: Machine, python: str, *, anew: bool = False) -> Path:
    """The wheel of this plan, from the cache or compiled now. Raises BuildError."""
    if plan.problems:
        raise BuildError("\n".join(plan.problems))
    record = plan.record(machine.environ)
    key = str(record["key"])
    folder = cache_folder(machine.environ, machine.system)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / f"{key}.lock"):
        found = None if anew else kept_wheel(folder, key)
        if found is not None:
            tell(f"llama.cpp was compiled earlier, for this processor and with these flags: {found}")
            return found
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as work_name:
            work = Path(work_name)
            whole = work / "whole"
            whole.mkdir()
            environ = plan.environment(machine.environ, write_hook(plan, work))
            made = compile_wheel(environ, work, builder(python, work), log=folder / f"{key}.log")
            add = {RECORD: json.dumps(record, indent=1, sort_keys=True).encode()}
            wheel = rewrite_wheel(made, whole, keep=is_needed, add=add)
            target = folder / key
            if anew and target.exists():
                shutil.rmtree(target)
            with contextlib.suppress(OSError):  # on a system without locks another may have been faster
                whole.rename(target)
        keep_newest(folder)
        return target / wheel.name


def write_hook(plan: Plan, folder: Path) -> Path:
    path = folder / "hook.cmake"
    path.write_text(plan.hook, encoding="utf-8")
    return path


def compile_wheel(
    environ: Mapping[str, str], folder: Path, python: Sequence[str], source: str = "", *, log: Path
) -> Path:
    """Let pip build the wheel into the folder. Its own cache stays out of it: that one knows neither flags nor CPUs.
    The log stays where this fails. Raises BuildError."""
    tell(f"compiling llama.cpp, about four minutes on two cores; the output goes to {log}")
    command = [*python, "-m", "pip", "--verbose", "wheel", "--no-deps", "--no-cache-dir", "--no-binary", PACKAGE]
    command += ["--wheel-dir", str(folder), source or f"{PACKAGE}=={VERSION}"]
    started_s = time.monotonic()
    if run_with_progress(command, environ, log):
        for line in reasons(log):
            print(f"  {line}", file=sys.stderr)
        raise BuildError(
            f"llama.cpp did not compile; the compiler's output is in {log}. Without compiling: --wheels WHERE"
        )
    tell(f"compiled in {time.monotonic() - started_s:.0f} s")
    log.unlink()
    return next(folder.glob("*.whl"))


def builder(python: str, folder: Path) -> list[str]:
    """An interpreter with pip: that of the environment, this one, or one of an environment that is made for it."""
    for candidate in (python, sys.executable):
        if run([candidate, "-m", "pip", "--version"])[0] == 0:
            return [candidate]
    if run([python, "-m", "venv", str(folder / "venv")])[0]:
        raise BuildError(f"{python} has no pip and cannot make environments; type: {Machine().how_to_get('venv')}")
    return [str(folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python")]


def pip_install(python: str, *arguments: str) -> int:
    """Install into an environment, by uv where that has no pip."""
    uv = shutil.which("uv")
    if uv and run([python, "-m", "pip", "--version"])[0]:
        command = [uv, "pip", "install", "--quiet", "--python", python, "--reinstall"]
    else:
        command = [python, "-m", "pip", "install", "--quiet", "--quiet", "--no-compile", "--disable-pip-version-check"]
        command += ["--force-reinstall"]
    return subprocess.run([*command, "--no-deps", *arguments], stdout=sys.stderr, check=False).returncode


def check_where(where: str) -> None:
    """Raises BuildError where no wheels can be."""
    if "://" not in where and not Path(where).is_dir():
        raise BuildError(f"--wheels: there is no folder {where}; name a folder of wheels or the URL of an index")


def wheel_from(where: str, python: str) -> bool:
    """Install the ready wheel from a folder or an index, or from those that pip is configured for when it is empty;
    False when there is none for this system."""
    command = ["--only-binary", PACKAGE, f"{PACKAGE}=={VERSION}"]
    if not where:
        return pip_install(python, *command) == 0
    if "://" in where:
        return pip_install(python, "--no-cache-dir", "--index-url", where, *command) == 0
    return pip_install(python, "--no-index", "--find-links", where, *command) == 0


def damaged_wheels(where: str) -> list[Path]:
    """Wheels in a folder that cannot be read to their end; none in an index, whose files have digests."""
    if "://" in where:
        return []
    wheels = sorted(Path(where).glob(f"{PACKAGE.replace('-', '_')}-{VERSION}-*.whl"))
    return [wheel for wheel in wheels if not is_whole(wheel)]


def is_whole(wheel: Path) -> bool:
    """Whether all of its files can be read."""
    try:
        with zipfile.ZipFile(wheel) as opened:
            return opened.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError):
        return False


def installed(python: str) -> dict[str, object]:
    """The version in an environment, and how it was built if it was built here; empty without one."""
    program = (
        "import importlib.metadata as m, json, pathlib; d = m.distribution('llama-cpp-python'); "
        f"p = pathlib.Path(d.locate_file({RECORD!r})); "
        "print(json.dumps({'version': d.version} | (json.loads(p.read_text()) if p.exists() else {})))"
    )
    status, text, _ = run([python, "-c", program])
    return {} if status else dict(json.loads(text))


def install(machine: Machine, backend: str, wheels: str, python: str, *, force: bool) -> None:
    """Put llama-cpp-python into an environment, unless what is there is what would be put there."""
    if run([python, "-c", ""])[0]:
        raise BuildError(f"--python: {python} does not run; name the interpreter of an environment")
    there = {} if force else installed(python)
    is_version = there.get("version") == VERSION
    suits = (backend, "cpu") if backend in ("", "auto") else (backend,)
    if wheels:
        if problems := make_plan(machine, backend, is_ready=True).problems:
            raise BuildError("\n".join(problems))
        if is_version and there.get("portable") and there.get("backend") in suits:
            return tell("the ready wheel is installed already")
        check_where(wheels)
        if damaged := damaged_wheels(wheels):
            raise BuildError(f"{damaged[0]} is no whole wheel; fetch it again, or leave --wheels out to compile")
        if not wheel_from(wheels, python):
            tell(f"{wheels} has no wheel of {PACKAGE} {VERSION} for this system; compiling instead")
        elif installed(python).get("backend", backend) in suits:
            return tell(f"installed the ready wheel from {wheels}")
        else:
            tell(f"the wheel from {wheels} is not for {backend}; compiling instead")
    plan = make_plan(machine, backend)
    for note in plan.notes:
        tell(note)
    if is_version and not plan.problems and there.get("key") == plan.record(machine.environ)["key"]:
        return tell("llama.cpp is installed already, compiled for this processor and with these flags")
    try:
        wheel = compiled_wheel(plan, machine, python, anew=force)
    except BuildError as error:
        # Made by others, so for any processor: slower, but better than none.
        if "cpu" not in suits or force or there.get("key"):
            raise
        if is_version:
            return tell(f"{error}; keeping the llama.cpp that is installed, which was compiled elsewhere")
        tell(f"{error}; looking for a wheel that pip can fetch")
        if not wheel_from("", python):
            raise
        return tell("installed the wheel that pip found; it was compiled elsewhere, and may be slower here")
    if pip_install(python, "--no-index", str(wheel)):
        raise BuildError(f"{wheel} could not be installed into {python}; see above")
    return tell("installed llama.cpp as compiled here")


def tell(line: str) -> None:
    print(f"native: {line}", file=sys.stderr, flush=True)


# Ninja's count of steps, or Make's percentage. CMake's tests of the compiler have a few steps of their own.
_STEP = re.compile(r"^\s*\[\s*(\d+)(?:/(\d+)|%)\]")
_LEAST_STEPS = 20
_SAYS_WHY = re.compile(r"error: |undefined reference|No space left|Could not find|No matching distribution", re.I)
_N_REASONS = 5
_N_LAST_LINES = 5
# Time left is a guess from what has gone by; before this it would be a wild one.
_LEAST_S = 10.0


class Progress:
    """On a terminal one line that is written again and again; elsewhere a line for every ten percent. Time is an
    argument."""

    def __init__(self, out: TextIO, now_s: float) -> None:
        self._out = out
        self._is_terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        self._began_s = now_s
        self._percent = -1
        self._show("fetching llama.cpp and what builds it")

    def see(self, line: str, now_s: float) -> None:
        """A line of the build's output."""
        found = _STEP.match(line)
        if found is None:
            return
        n_done, n_all = int(found[1]), int(found[2] or 100)
        if n_all < _LEAST_STEPS or n_done > n_all:
            return
        if self._percent < 0:
            self._began_s, self._percent = now_s, 0
        percent = n_done * 100 // n_all
        if self._is_terminal or percent // 10 > self._percent // 10:
            self._show(f"compiling llama.cpp: {percent} %{self._left(n_done, n_all, now_s)}")
            self._percent = percent

    def end(self) -> None:
        """Clears the line, for what is written next."""
        if self._is_terminal:
            self._out.write("\r\x1b[2K")
            self._out.flush()

    def _left(self, n_done: int, n_all: int, now_s: float) -> str:
        gone_s = now_s - self._began_s
        if n_done in (0, n_all) or gone_s < _LEAST_S:
            return ""
        seconds = gone_s * (n_all - n_done) / n_done
        minutes = round(seconds / 60)
        if seconds < 50:
            return " (less than a minute left)"
        return f" (about {max(1, minutes)} minute{'' if minutes <= 1 else 's'} left)"

    def _show(self, text: str) -> None:
        if self._is_terminal:
            self._out.write(f"\r\x1b[2K{text[: shutil.get_terminal_size().columns - 1]}")
        else:
            self._out.write(f"{text}\n")
        self._out.flush()


def run_with_progress(command: Sequence[str], environ: Mapping[str, str], log: Path) -> int:
    """The status of a build whose output goes into the log."""
    progress = Progress(sys.stderr, time.monotonic())
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, encoding="utf-8", errors="replace",
        ) as build,
    ):  # fmt: skip
        assert build.stdout is not None
        try:
            for line in build.stdout:
                file.write(line)
                progress.see(line, time.monotonic())
        finally:
            progress.end()
    return build.returncode


def reasons(log: Path) -> list[str]:
    """The lines of a failed build's log that say why, and its last ones."""
    lines = [line.strip()[:200] for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    said = [line for line in lines[:-_N_LAST_LINES] if _SAYS_WHY.search(line)][:_N_REASONS]
    return [*said, *lines[-_N_LAST_LINES:]]
