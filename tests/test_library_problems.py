"""The loaders' own words, and what a person is told instead."""

from __future__ import annotations

import subprocess
import sys

import pytest

from localrun.doctor.llama_build import rebuild
from localrun.hardware.kernels import BUILD_ANEW, OTHER_PROCESSOR, explain

LOAD = "Failed to load shared library '/x/libllama.so': "


@pytest.mark.parametrize(
    ("error", "text", "remedy"),
    [
        ("RuntimeError(\"can't start new thread\")", "no more threads", "ulimit -u"),
        ("No module named 'llama_cpp'", "not installed", BUILD_ANEW),
        ("Shared library with base name 'llama' not found", "without its native library", BUILD_ANEW),
        (LOAD + "libc.musl-x86_64.so.1: cannot open shared object file", "built for musl", BUILD_ANEW),
        (LOAD + "Error loading shared library ld-linux-x86-64.so.2: No such file (needed by /x/libggml.so)",
         "built for glibc", BUILD_ANEW),
        (LOAD + "libcudart.so.12: cannot open shared object file", "libcudart.so.12 is missing",
         "--backend cpu"),
        (LOAD + "libcublasLt.so.12: cannot open shared object file", "libcublasLt.so.12 is missing", "LD_LIBRARY_PATH"),
        (LOAD + "libcuda.so.1: cannot open shared object file", "libcuda.so.1", "--gpus all"),
        (LOAD + "libvulkan.so.1: cannot open shared object file", "libvulkan", "--backend cpu"),
        (LOAD + "/lib/libc.so.6: version `GLIBC_2.38' not found (required by /x/a.so)", "newer system", BUILD_ANEW),
        ("Failed to load shared library 'C:\\x\\llama.dll': Could not find module 'C:\\x\\llama.dll' (or one of its "
         "dependencies). Try using the full path with constructor syntax.", "Microsoft's C++ runtime", "VCRedist"),
        (LOAD + "libgomp.so.1: cannot open shared object file", "needs OpenMP", "libgomp1"),
        (LOAD + "dlopen(/x): tried: '/x' (mach-o, but is an incompatible architecture (have 'arm64', need 'x86_64'))",
         "built for x86_64", "use a Python"),
        (LOAD + "/x/libggml.so: wrong ELF class: ELFCLASS32", "another kind of processor", BUILD_ANEW),
        (LOAD + "/x/libllama.so: undefined symbol: ggml_new", "different versions", BUILD_ANEW),
        (LOAD + "[WinError 193] %1 ist keine zulässige Win32-Anwendung", "another kind of processor", BUILD_ANEW),
        (LOAD + "[WinError 127] Не найдена указанная процедура", "different versions", BUILD_ANEW),
        (LOAD + "something new", "something new", BUILD_ANEW),
    ],
)  # fmt: skip
def test_each_is_one_line_that_says_what_to_type(error: str, text: str, remedy: str) -> None:
    problem = explain(error)
    assert problem is not None
    assert text in problem.text
    assert remedy in problem.remedy
    assert "\n" not in problem.line


def test_errors_of_models_are_none_of_these() -> None:
    assert explain("llama.cpp cannot load /x/model.gguf: wrong magic") is None
    assert explain("") is None


def test_the_command_is_the_doctors_and_there_is_such_a_program() -> None:
    assert rebuild() == BUILD_ANEW
    assert BUILD_ANEW in OTHER_PROCESSOR.line
    program = [sys.executable, "-m", "localrun.native_build", "--help"]
    assert "--force" in subprocess.run(program, capture_output=True, text=True, check=True).stdout
