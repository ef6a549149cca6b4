"""The compilers, as CMake will find them, and what they make of this processor.

Every question is answered by compiling something, not by version numbers: distributions mend old compilers.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from localrun.native_build.machine import Machine, run, words

# Of a small board that is busy: a compiler that is given up is taken for one that does not know what it was asked.
TIMEOUT_S = 600.0

# Uses what makes compilers and assemblers stumble that are older than the processor.
NATIVE_SOURCE = Path(__file__).with_name("native.c").read_text(encoding="utf-8")
# GCC before 9 lacks a part of the library that llama.cpp uses.
LANGUAGE_SOURCE = "#include <filesystem>\nint main(int, char ** name) { return !std::filesystem::exists(*name); }\n"
VULKAN_SOURCE = """
#include <vulkan/vulkan.h>
#include <spirv/unified1/spirv.hpp>
int main() { return 0; }
"""
# A tile configuration that is made on the stack, as ggml makes it. An unsound `_tile_loadconfig` reads eight of its 64
# bytes, so the compiler drops the rest: the load faults, or what is read back differs.
_AMX_SOURCE = Path(__file__).with_name("amx.cpp").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Compiler:
    """A C or C++ compiler, as CMake would find it."""

    command: tuple[str, ...]
    language: str
    environ: Mapping[str, str]

    @cached_property
    def banner(self) -> str:
        return next(iter(run([*self.command, "--version"], environ=self.environ)[1].splitlines()), "")

    def output(self, source: str, *flags: str) -> str:
        """The preprocessor's output, or nothing."""
        status, text, _ = run(
            [*self.command, *flags, "-E", "-x", self.language, "-"], text=source, environ=self.environ,
            timeout_s=TIMEOUT_S,
        )  # fmt: skip
        return "" if status else text

    def complaint(self, source: str, *flags: str, link: bool = False, out: str = "") -> str:
        """Why the source does not compile; empty when it does."""
        with tempfile.TemporaryDirectory(prefix="localrun-probe-") as folder:
            path = Path(folder, "probe.c" if self.language == "c" else "probe.cpp")
            path.write_text(source, encoding="utf-8")
            made = ["-o", out or str(Path(folder, "probe.o"))]
            libraries = [flag for flag in flags if flag.startswith("-l")]
            others = [flag for flag in flags if not flag.startswith("-l")]
            command = [*self.command, *others, *([] if link else ["-c"]), *made, str(path), *libraries]
            status, _, errors = run(command, environ=self.environ, timeout_s=TIMEOUT_S)
        lines = [line for line in errors.splitlines() if re.search(r"error|no such instruction", line, re.IGNORECASE)]
        said = (lines or errors.strip().splitlines() or [f"status {status}"])[0].strip()
        return re.sub(r"^\S*probe\.\w+:|^/tmp/\S+?:", "", said).strip() if status else ""

    @cached_property
    def amx(self) -> str:
        """ "sound", "unsound", or "" for a compiler without AMX (which is a kind of soundness).

        GCC before 13.3 and 14.1 tells the optimizer that the tile configuration has 8 bytes, while the processor reads
        64. The rest is dropped as never read, and the first prompt of every quantized model ends in SIGSEGV.
        """
        text = self.output("#include <immintrin.h>\n", "-mamx-tile")
        if "_tile_loadconfig" not in text:
            return ""
        return "sound" if re.search(r"__builtin_ia32_(ldtilecfg|tile_loadconfig)", text) else "unsound"

    def amx_computes(self) -> bool:
        """Whether a program with tiles does what it should, on a processor that has them."""
        with tempfile.TemporaryDirectory(prefix="localrun-amx-") as folder:
            program = str(Path(folder, "amx"))
            if self.complaint(_AMX_SOURCE, "-O3", "-mamx-tile", "-mamx-int8", link=True, out=program):
                return False
            # 2 is a kernel or sandbox that does not give the tiles to anybody: ggml then computes without them.
            return run([program])[0] in (0, 2)

    def macros(self, flag: str) -> str:
        """Everything that the compiler knows of itself and of the processor that the flag names."""
        return self.output("", flag, "-dM")


def find_compiler(machine: Machine, variable: str, names: Sequence[str], language: str, chosen: str) -> Compiler | None:
    """CMake's way: an option of CMake's, the variable, the usual names in the usual order."""
    named = chosen or machine.environ.get(variable, "")
    for command in [words("CMAKE_ARGS" if chosen else variable, named)] if named else [[name] for name in names]:
        path = machine.which(command[0]) if command else None
        if path:
            return Compiler((path, *command[1:]), language, machine.environ)
    return None
