"""Which of the native library's quick kernels are right on this processor, as far as anybody knows; and why the library
cannot be loaded.

ggml copies weights into layouts of its own for the quickest kernels ("extra buffers": interleaved rows, AMX tiles).
These depend on the processor and the compiler like nothing else, and some builds crash there or compute nonsense, while
the plain kernels are right. A `Verdict` says what was found for one library on one processor (a `Pair`): by the
probe (`localrun.doctor.kernel_probe`), and by engines that died and answered without extra buffers
(`localrun.server.engines.link`).

One file per pair in `<cache folder>/kernels/`. Any number of processes may read and write; a damaged, foreign or older
file is as none, and of two writers the later one stays: what the other knew is found out again.

Does not: load the library, or compute.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from localrun import stored
from localrun.hardware.processors import run_sysctl

# Raised when the probe looks at more, or judges otherwise: what was kept before is then as none.
VERSION = 3
FOLDER_NAME = "kernels"
MAX_CRASHES = 100
# No extra buffers hold these: norms, biases and the like.
_PLAIN_TYPES = frozenset({"F32", "F64", "I8", "I16", "I32", "I64"})
# Of /proc/cpuinfo, on x86 and on Arm: who made the processor, and what it can do.
_IDENTIFYING = frozenset(
    {
        *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
        *("CPU implementer", "CPU part", "CPU variant", "CPU revision", "Features"),
    }
)


class Pair(NamedTuple):
    """A library and a processor, each as a short digest of what tells it from others."""

    library: str
    processor: str

    @property
    def file_name(self) -> str:
        return f"{self.library}-{self.processor}.json"


class Fault(msgspec.Struct, frozen=True):
    """The probe's: the quick kernels for this weight type fail in models with this kind of memory. `how` ends the
    sentence "the kernels for ..."."""

    weight_type: str
    memory: str
    how: str


class Crash(msgspec.Struct, frozen=True):
    """An engine's: it died as `how` says before its first token, and answered without extra buffers."""

    weight_types: tuple[str, ...]
    memory: str
    how: str
    model: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a pair. `quick_types` are the weight types that have quick kernels at all, `wrong` those that no
    kernel computes rightly. `broken` says how the plain kernels failed, in which case nothing can be run. Before the
    probe `is_probed` is false."""

    version: int = VERSION
    is_probed: bool = False
    quick_types: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    crashes: tuple[Crash, ...] = ()
    wrong: tuple[str, ...] = ()
    broken: str = ""

    def allows_quick(self, weight_types: Collection[str], memory: str) -> bool:
        """Whether a model with weights of these types and this kind of memory may use the quick kernels."""
        types = frozenset(weight_types) - _PLAIN_TYPES
        if any(fault.memory == memory and fault.weight_type in types for fault in self.faults):
            return False
        # Which of its types an engine died of is not known, so only a model that has them all is sure to meet it again.
        return not any(crash.memory == memory and types.issuperset(crash.weight_types) for crash in self.crashes)

    def with_crash(self, weight_types: Collection[str], memory: str, how: str, model: str) -> Verdict:
        """This verdict and one more crash, unless no weight of the model can have met a quick kernel."""
        types = frozenset(weight_types) - _PLAIN_TYPES
        if not types or (self.is_probed and types.isdisjoint(self.quick_types)):
            return self
        crash = Crash(tuple(sorted(types)), memory, how, model)
        alike = (crash.weight_types, memory)
        others = [known for known in self.crashes if (known.weight_types, known.memory) != alike]
        return msgspec.structs.replace(self, crashes=(*others, crash)[-MAX_CRASHES:])


def folder(cache_folder: Path) -> Path:
    """Where verdicts are kept, given the cache folder of `config.folders`."""
    return cache_folder / FOLDER_NAME


def read(verdicts: Path, pair: Pair) -> Verdict:
    """What is kept of a pair; an empty verdict if nothing is."""
    found = stored.read(verdicts / pair.file_name, _decoder)
    return found if found is not None and found.version == VERSION else Verdict()


def keep(verdicts: Path, pair: Pair, verdict: Verdict) -> None:
    """Keeps a verdict in place of what was kept. Raises OSError, also for one that a newer localrun has kept."""
    path = verdicts / pair.file_name
    if (found := stored.read(path, _decoder)) is not None and found.version > VERSION:
        raise FileExistsError(f"{path} was written by a newer localrun and stays")
    stored.write(path, verdict)


def present_pair(library: Path | None = None) -> Pair | None:
    """The installed library on this processor; None without a library. `library` is the folder of its files.

    Costs a millisecond: files count by name, size and time of change, as everywhere in localrun.
    """
    found = library or library_folder()
    if found is None:
        return None
    try:
        files = [
            f"{file.name} {(status := file.stat()).st_size} {status.st_mtime_ns}" for file in sorted(found.iterdir())
        ]
    except OSError:
        return None
    return Pair(_digest(files), processor())


def library_folder() -> Path | None:
    """Where the native library lies, as its Python package looks for it; None where there is none. Imports nothing."""
    named = os.environ.get("LLAMA_CPP_LIB_PATH")
    if named:
        return Path(named)
    try:
        found = importlib.util.find_spec("llama_cpp")
    except (ImportError, ValueError):
        return None
    return Path(found.origin).parent / "lib" if found and found.origin else None


def has_media_library() -> bool:
    """Whether llama.cpp's library for images and audio (libmtmd) lies with the others. Loads nothing."""
    folder = library_folder()
    try:
        return folder is not None and any("mtmd" in file.name for file in folder.iterdir())
    except OSError:
        return False


@cache
def processor() -> str:
    """A digest of what this processor is and can do."""
    return _digest([platform.machine(), *processor_lines(Path("/proc/cpuinfo"))])


def processor_lines(cpuinfo: Path) -> list[str]:
    """Of the first processor: the others are as good as the same, and there may be hundreds."""
    lines = []
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip():
                    break
                if line.partition(":")[0].strip() in _IDENTIFYING:
                    lines.append(line.strip())
    except OSError:
        pass
    if lines:
        return lines
    brand = run_sysctl("machdep.cpu.brand_string") if sys.platform == "darwin" else None
    return [platform.processor(), *([brand] if brand else [])]


def _digest(lines: list[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


_decoder = msgspec.json.Decoder(Verdict)


# --- why the library cannot be loaded, in one line that also says what to type ---
# The engine puts the line into its refusal, which the API hands on, and the doctor shows it: both say the same.

# `localrun.native_build` needs nothing that is broken here.
BUILD_ANEW = f"{sys.executable} -m localrun.native_build install --force"


class Problem(NamedTuple):
    """What is wrong, and what to type."""

    text: str
    remedy: str

    @property
    def line(self) -> str:
        return f"{self.text}; {self.remedy}"


_REBUILD = f"rebuild it: {BUILD_ANEW}"
_BUILD_FOR_CPU = f"{BUILD_ANEW} --backend cpu"
OTHER_PROCESSOR = Problem("llama.cpp was built for a different processor (illegal instruction)", _REBUILD)
NO_THREADS = Problem(
    "the system lets it start no more threads",
    "raise the limit of processes that this user (ulimit -u), service (TasksMax) or container (pids.max) has",
)
# In Python's words, those of the libraries that compute, and where a process was to be started.
_NO_THREADS = (
    r"can't start new thread|Thread creation failed|what\(\):.*Resource temporarily|GGML_ASSERT\(rc == 0\)"
    r"|for OMP thread|\[Errno (?:11|35)\]"
)


def has_no_threads(said: str) -> bool:
    """Whether a process that says so had no threads left."""
    return re.search(_NO_THREADS, said) is not None


def explain(error: str) -> Problem | None:
    """What the error of importing `llama_cpp` means; None for one that says nothing about the library."""
    for pattern, text, remedy in _KNOWN:
        if found := re.search(pattern, error):
            return Problem(found.expand(text), remedy)
    if "shared library" in error.lower():
        return Problem(f"llama.cpp cannot be loaded: {error}", _REBUILD)
    return None


# The first pattern that matches counts, with what is wrong and what to type. What is quoted is the words of glibc's,
# musl's, Apple's and Windows' loaders.
_KNOWN: tuple[tuple[str, str, str], ...] = (
    (_NO_THREADS, *NO_THREADS),
    (r"No module named '?llama_cpp'?", "llama-cpp-python is not installed", f"install it: {BUILD_ANEW}"),
    (r"base name '\w+' not found", "llama-cpp-python is installed without its native library", _REBUILD),
    (r"libc\.musl|ld-musl", "this llama.cpp was built for musl (Alpine), which this system does not have", _REBUILD),
    (r"ld-linux[-\w.]*: cannot open|Error (?:loading|relocating) .*(?:libc\.so\.6|libm\.so\.6|ld-linux|__\w+_chk)",
     "this llama.cpp was built for glibc, and this system has musl", _REBUILD),
    (r"version [`'](GLIBC(?:XX)?_[\d.]+)'? not found",
     r"this llama.cpp was built on a newer system than this one (it needs \1)", _REBUILD),
    # Windows names the library that was asked for, and not the one that is missing.
    (r"Could not find module '[^']*\.dll' \(or one of its dependencies\)",
     "a library that llama.cpp needs is missing: Microsoft's C++ runtime, or that of the GPU it was built for",
     "winget install Microsoft.VCRedist.2015+.x64, put the bin folder of CUDA or ROCm into PATH, or build for the "
     f"processor alone: {_BUILD_FOR_CPU}"),
    (r"(libcuda\.so[.\d]*)",
     r"this build of llama.cpp uses CUDA, but NVIDIA's driver (\1) is missing",
     f"install the driver (in a container: --gpus all), or build for the processor alone: {_BUILD_FOR_CPU}"),
    (r"((?:libcudart|libcublas\w*|libnccl|libcufft|libnvrtc\w*)\.so[.\d]*)",
     r"this build of llama.cpp uses CUDA, whose library \1 is missing",
     "install CUDA's runtime and name its folder in LD_LIBRARY_PATH, or build for the processor alone: "
     f"{_BUILD_FOR_CPU}"),
    (r"((?:libamdhip64|librocblas|libhipblas|libhsa-runtime64|libvulkan|libsycl|libOpenCL|libmusa)\.so[.\d]*)",
     r"this build of llama.cpp uses a GPU, whose library \1 is missing",
     f"install it, or build for the processor alone: {_BUILD_FOR_CPU}"),
    (r"libgomp\.so[.\d]*: cannot open",
     "this llama.cpp needs OpenMP, which is missing", f"apt install libgomp1, or build without: {BUILD_ANEW}"),
    (r"incompatible architecture \(have '(\w+)', need '(\w+)'",
     r"this Python is built for \2, and llama.cpp for \1",
     f"use a Python for this machine's own processor, or rebuild it: {BUILD_ANEW}"),
    # Windows says it in the user's language; the number is the same.
    (r"wrong ELF class|invalid ELF header|Exec format error|WinError 193\b",
     "this llama.cpp was built for another kind of processor, or its files are damaged", _REBUILD),
    (r"undefined symbol: (\w+)|[Ss]ymbol not found: (\w+)|WinError 127\b",
     "the files of llama.cpp come from different versions (a symbol is missing)", _REBUILD),
)  # fmt: skip
