"""What there is to build for and with: the system, the processor, the GPUs that programs of the system tell of, and the
compilers, as CMake will find them, with what they make of this processor."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from localrun.hardware.cpu_features import cpu_facts, cpu_name


def words(variable: str, text: str) -> list[str]:
    """What a variable says, as a shell would split it. Raises ValueError that names it."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{variable} is {text!r}: {error}; close the quotation, or unset it") from None


def run(
    command: Sequence[str], *, text: str = "", environ: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> tuple[int, str, str]:
    """Status, output and complaints of a short command; status 127 when it cannot be started."""
    try:
        ended = subprocess.run(
            command, input=text, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False,
            env=None if environ is None else dict(environ),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, "", str(error)
    return ended.returncode, ended.stdout, ended.stderr


@dataclass(frozen=True)
class Machine:
    """What there is to build for and with."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    # Not uname's, which in Git's shell on Windows names that shell.
    system: str = field(default_factory=lambda: platform.system())
    processor: str = field(default_factory=lambda: platform.machine())
    # Of this program: the kernel below it may have another width.
    is_64_bit: bool = sys.maxsize > 2**32

    def which(self, name: str) -> str | None:
        return shutil.which(name, path=self.environ.get("PATH"))

    @property
    def is_x86(self) -> bool:
        return self.processor.lower() in ("x86_64", "amd64")

    @property
    def is_apple_silicon(self) -> bool:
        return self.system == "Darwin" and self.processor == "arm64"

    @property
    def visual_cpp(self) -> str:
        return f"Microsoft.VisualStudio.Component.VC.Tools.{'ARM64' if self.processor == 'ARM64' else 'x86.x64'}"

    @property
    def has_visual_cpp(self) -> bool:
        """Whether CMake will find it, or another compiler that is chosen or on PATH."""
        folder = Path(self.environ.get("ProgramFiles(x86)", "C:/Program Files (x86)"), "Microsoft Visual Studio")
        asking = [str(folder / "Installer/vswhere.exe"), "-products", "*", "-requires", self.visual_cpp]
        is_other = self.environ.get("CMAKE_GENERATOR") or any(map(self.which, ("cl", "clang-cl", "g++")))
        return bool(is_other or run([*asking, "-property", "installationPath"], environ=self.environ)[1].strip())

    @property
    def is_musl(self) -> bool:
        return "musl" in str(sysconfig.get_config_var("HOST_GNU_TYPE") or sysconfig.get_config_var("SOABI"))

    @property
    def is_translated(self) -> bool:
        """Whether this is an x86 program that Rosetta runs on an Apple processor."""
        if self.system != "Darwin":
            return False
        return run(["sysctl", "-n", "sysctl.proc_translated"], environ=self.environ)[1].strip() == "1"

    @cached_property
    def cpus(self) -> list[dict[str, str]]:
        """The fields of each processor in /proc/cpuinfo, or what other systems tell of them."""
        try:
            return cpu_facts(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
        except OSError:
            _, name, _ = run(["sysctl", "-n", "machdep.cpu.brand_string"], environ=self.environ)
            return [{"model name": name.strip() or platform.processor() or self.processor}]

    @property
    def cpu_flags(self) -> list[str]:
        """What Linux says that the processor can do."""
        return next((cpu.get("flags") or cpu.get("Features", "") for cpu in self.cpus), "").split()

    @property
    def cpu_name(self) -> str:
        return cpu_name(self.cpus, device_tree("model")) or self.processor

    def how_to_get(self, what: str) -> str:
        """The command that installs the compiler or Python's venv on this system."""
        if self.system == "Darwin":
            return "xcode-select --install" if what == "compiler" else "brew install python"
        if self.system == "Windows":
            more = f"--passive --wait --add Microsoft.VisualStudio.Workload.VCTools --add {self.visual_cpp}"
            return f'winget install Microsoft.VisualStudio.2022.BuildTools --override "{more} --includeRecommended"'
        managers = {
            "apt-get": ("apt install g++", "apt install python3-venv"),
            "dnf": ("dnf install gcc-c++", "dnf install python3"),
            "pacman": ("pacman -S gcc", "pacman -S python"),
            "zypper": ("zypper install gcc-c++", "zypper install python3"),
            "apk": ("apk add build-base linux-headers", "apk add python3"),
        }
        for manager, commands in managers.items():
            if self.which(manager):
                return commands[what != "compiler"]
        return "install g++ or clang++" if what == "compiler" else "install Python's venv"


def device_tree(name: str) -> str:
    """What the firmware of a board says of it; empty on other machines."""
    try:
        return Path("/proc/device-tree", name).read_text(encoding="utf-8", errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def rocm_device(machine: Machine) -> str:
    # Agents are CPUs too; a GPU's is named by its instruction set.
    status, text, _ = ask(machine, "rocminfo")
    found = re.findall(r"^ *Name: *(gfx[0-9a-f]+) *$", text, re.MULTILINE)
    return "" if status else ";".join(sorted(set(found)))


def vulkan_device(machine: Machine) -> str:
    # A Vulkan device may be a program that computes on the CPU, which llama.cpp itself does faster.
    status, text, _ = ask(machine, "vulkaninfo", "--summary")
    found = re.findall(r"deviceType *= *\w*(?:DISCRETE|INTEGRATED)_GPU\s+deviceName *= *(.+)", text)
    return "" if status else ", ".join(sorted(name for name in set(found) if not _TOO_SMALL.search(name)))


# GPUs of boards and phones, on which llama.cpp's shaders do not run, or run slower than on the cores beside them.
_TOO_SMALL = re.compile(r"V3D|Mali|PanVK|Panfrost|PowerVR|llvmpipe", re.IGNORECASE)

DEVICES: dict[str, Callable[[Machine], str]] = {
    "metal": lambda machine: "an Apple GPU" if machine.is_apple_silicon else "",
    "cuda": lambda machine: ", ".join(nvidia(machine, "name")),
    "rocm": rocm_device, "vulkan": vulkan_device, "cpu": lambda _: "the processor",
}  # fmt: skip


def ask(machine: Machine, program: str, *arguments: str) -> tuple[int, str, str]:
    path = machine.which(program)
    return run([path, *arguments], environ=machine.environ) if path else (127, "", "")


# The GPU in NVIDIA's boards, which older systems have no nvidia-smi for: its name and its generation.
_TEGRA = {
    "tegra194": ("NVIDIA Xavier", "7.2"), "tegra234": ("NVIDIA Orin", "8.7"), "tegra264": ("NVIDIA Thor", "11.0"),
}  # fmt: skip


def tegra() -> tuple[str, str]:
    """The name and generation of the GPU of NVIDIA's board that this is; empty if it is none."""
    compatible = device_tree("compatible")
    return next((known for chip, known in _TEGRA.items() if chip in compatible), ("", ""))


def nvidia(machine: Machine, what: str) -> list[str]:
    status, text, _ = ask(machine, "nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader")
    found = [] if status else sorted({line.strip() for line in text.splitlines() if line.strip()})
    name, generation = tegra()
    if name and (not found or "[N/A]" in found):
        return [generation if what == "compute_cap" else name]
    return found


def tool(machine: Machine, name: str, variable: str, default: str) -> str:
    """A toolkit's program: on PATH, or in the toolkit's folder, which often is not on it."""
    path = Path(machine.environ.get(variable) or default, "bin", name)
    return machine.which(name) or (str(path) if os.access(path, os.X_OK) else "")


# --- compilers ---
# Every question is answered by compiling something, not by version numbers: distributions mend old compilers.

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
