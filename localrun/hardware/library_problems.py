"""Why the native library cannot be loaded, in one line that also says what to type.

Pure: from the text of the error alone. The engine puts the line into its refusal, which the API hands on, and the
doctor shows it: both say the same.

Does not: load anything, or know errors of model files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import NamedTuple

# `localrun.native_build` needs nothing that is broken here.
BUILD_ANEW = f"{sys.executable} -m localrun.native_build install --force"


class Problem(NamedTuple):
    """What is wrong, and what to type."""

    text: str
    remedy: str

    @property
    def line(self) -> str:
        return f"{self.text}; {self.remedy}"


OTHER_PROCESSOR = Problem(
    "llama.cpp was built for a different processor (illegal instruction)", f"rebuild it: {BUILD_ANEW}"
)
_BUILD_FOR_CPU = f"{BUILD_ANEW} --backend cpu"


def explain(error: str) -> Problem | None:
    """What the error of importing `llama_cpp` means; None for one that says nothing about the library."""
    for pattern, problem in _KNOWN:
        found = re.search(pattern, error)
        if found:
            return problem(found)
    if "shared library" in error.lower():
        return Problem(f"llama.cpp cannot be loaded: {error}", f"rebuild it: {BUILD_ANEW}")
    return None


def _cuda(found: re.Match[str]) -> Problem:
    return Problem(
        f"this build of llama.cpp uses CUDA, whose library {found[1]} is missing",
        f"install CUDA's runtime and name its folder in LD_LIBRARY_PATH, or build for the processor alone: "
        f"{_BUILD_FOR_CPU}",
    )


def _cuda_driver(found: re.Match[str]) -> Problem:
    return Problem(
        f"this build of llama.cpp uses CUDA, but NVIDIA's driver ({found[1]}) is missing",
        f"install the driver (in a container: --gpus all), or build for the processor alone: {_BUILD_FOR_CPU}",
    )


def _gpu(found: re.Match[str]) -> Problem:
    return Problem(
        f"this build of llama.cpp uses a GPU, whose library {found[1]} is missing",
        f"install it, or build for the processor alone: {_BUILD_FOR_CPU}",
    )


def _always(text: str, remedy: str = f"rebuild it: {BUILD_ANEW}") -> Callable[[re.Match[str]], Problem]:
    return lambda found: Problem(found.expand(text), remedy)


# The first that matches counts. What is quoted is the words of glibc's, musl's, Apple's and Windows' loaders.
_KNOWN: tuple[tuple[str, Callable[[re.Match[str]], Problem]], ...] = (
    (r"No module named '?llama_cpp'?", _always("llama-cpp-python is not installed", f"install it: {BUILD_ANEW}")),
    (r"base name '\w+' not found", _always("llama-cpp-python is installed without its native library")),
    (r"libc\.musl|ld-musl", _always("this llama.cpp was built for musl (Alpine), which this system does not have")),
    (r"ld-linux[-\w.]*: cannot open|Error (?:loading|relocating) .*(?:libc\.so\.6|libm\.so\.6|ld-linux|__\w+_chk)",
     _always("this llama.cpp was built for glibc, and this system has musl")),
    (r"version [`'](GLIBC(?:XX)?_[\d.]+)'? not found",
     _always(r"this llama.cpp was built on a newer system than this one (it needs \1)")),
    # Windows names the library that was asked for, and not the one that is missing.
    (r"Could not find module '[^']*\.dll' \(or one of its dependencies\)",
     _always("a library that llama.cpp needs is missing: Microsoft's C++ runtime, or that of the GPU it was built for",
             "winget install Microsoft.VCRedist.2015+.x64, put the bin folder of CUDA or ROCm into PATH, or build for "
             f"the processor alone: {_BUILD_FOR_CPU}")),
    (r"(libcuda\.so[.\d]*)", _cuda_driver),
    (r"((?:libcudart|libcublas\w*|libnccl|libcufft|libnvrtc\w*)\.so[.\d]*)", _cuda),
    (r"((?:libamdhip64|librocblas|libhipblas|libhsa-runtime64|libvulkan|libsycl|libOpenCL|libmusa)\.so[.\d]*)", _gpu),
    (r"libgomp\.so[.\d]*: cannot open",
     _always("this llama.cpp needs OpenMP, which is missing", f"apt install libgomp1, or build without: {BUILD_ANEW}")),
    (r"incompatible architecture \(have '(\w+)', need '(\w+)'",
     _always(r"this Python is built for \2, and llama.cpp for \1",
             f"use a Python for this machine's own processor, or rebuild it: {BUILD_ANEW}")),
    # Windows says it in the user's language; the number is the same.
    (r"wrong ELF class|invalid ELF header|Exec format error|WinError 193\b",
     _always("this llama.cpp was built for another kind of processor, or its files are damaged")),
    (r"undefined symbol: (\w+)|[Ss]ymbol not found: (\w+)|WinError 127\b",
     _always("the files of llama.cpp come from different versions (a symbol is missing)")),
)  # fmt: skip
