"""The plan: options of CMake, compiler flags and variables, each with its reason, and what stands in the way.

Invariants: what the caller puts into CMAKE_ARGS wins; a problem is one line that says what to type.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shlex
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from localrun.hardware.cpu_features import Feature, features, without_halves
from localrun.native_build.machine import (
    DEVICES,
    LANGUAGE_SOURCE,
    NATIVE_SOURCE,
    VULKAN_SOURCE,
    Compiler,
    Machine,
    ask,
    find_compiler,
    nvidia,
    run,
    tool,
    words,
)

# The ctypes structures of the bindings follow this release's headers; pyproject.toml pins the same.
VERSION = "0.3.36"
BACKENDS = ("cpu", "metal", "cuda", "vulkan", "rocm")

# Read by CMake within llama.cpp. llama-cpp-python puts some options beyond the reach of CMAKE_ARGS, by FORCE.
HOOK_OPTION = "CMAKE_PROJECT_llama.cpp_INCLUDE"
# Built otherwise, and used by nothing that is installed: 51 of 180 files.
_HOOK = "set(LLAMA_BUILD_COMMON OFF)\n"
_HOOK_WITHOUT_METAL = "set(GGML_METAL OFF)\n"

# What CMake and the compilers read of the environment.
_BUILD_VARIABLES = re.compile(
    r"(CC|CXX|CPP|HIPCXX|CUDACXX|CUDAHOSTCXX|CUDAARCHS|HIP_PATH|VULKAN_SDK|ARCHFLAGS|MACOSX_DEPLOYMENT_TARGET"
    r"|(C|CXX|CPP|LD|CUDA|HIP)FLAGS|CMAKE_(ARGS|GENERATOR|BUILD_TYPE|PREFIX_PATH|TOOLCHAIN_FILE)|SKBUILD_.*)"
)  # fmt: skip


@dataclass(kw_only=True)
class Plan:
    """How llama.cpp is compiled here, and what stands in the way."""

    backend: str
    device: str = ""
    # Options of CMake, with why.
    options: dict[str, str] = field(default_factory=dict)
    # Compiler flags, with why.
    flags: dict[str, str] = field(default_factory=dict)
    hook: str = _HOOK
    variables: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    # What the compiled code depends on besides.
    inputs: dict[str, str] = field(default_factory=dict)
    # Modules for one kind of processor each that this compiler cannot make rightly, with why.
    unsound_modules: dict[str, str] = field(default_factory=dict)

    def cmake_args(self, environ: Mapping[str, str]) -> str:
        """The caller's come last, because CMake takes the last."""
        return " ".join([*map(_quoted, self.options), *filter(None, [environ.get("CMAKE_ARGS", "").strip()])])

    def environment(self, environ: Mapping[str, str], hook_path: Path | None) -> dict[str, str]:
        """The environment of the build. The hook's path is left out for a key, which must not depend on it."""
        changed = dict(environ) | self.variables
        # Its mere presence turns GGML_NATIVE's default off, and every instruction set with it: several times slower.
        changed.pop("SOURCE_DATE_EPOCH", None)
        hook = f"-D{HOOK_OPTION}={hook_path.as_posix()}" if hook_path else ""
        changed["CMAKE_ARGS"] = " ".join(filter(None, [_quoted(hook) if hook else "", self.cmake_args(environ)]))
        if self.flags:
            for name in ("CFLAGS", "CXXFLAGS"):
                changed[name] = " ".join([*filter(None, [changed.get(name, "")]), *self.flags])
        return changed

    def record(self, environ: Mapping[str, str]) -> dict[str, object]:
        """What a wheel is made of and for."""
        build = self.environment(environ, None)
        variables = {name: value for name, value in sorted(build.items()) if _BUILD_VARIABLES.fullmatch(name)}
        record: dict[str, object] = {
            "version": VERSION, "backend": self.backend, "hook": self.hook, "variables": variables,
            "diskcache": "imported where it is used", **self.inputs,
        }  # fmt: skip
        record["key"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:24]
        return record


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_@%+=:,;./\\$-]+", text) else shlex.quote(text)


def make_plan(machine: Machine, backend: str = "", *, is_ready: bool = False, is_portable: bool = False) -> Plan:
    """`backend` is one of BACKENDS, "auto" for the best that this machine can be compiled for, or empty for the usual:
    the GPU of an Apple machine, which needs nothing besides, and elsewhere the processor. With `is_ready` there is a
    wheel, and nothing has to be compiled; with `is_portable` it is not for this very processor."""
    environ = machine.environ
    given = environ.get("CMAKE_ARGS", "")
    c_names, cxx_names = ("cc", "gcc", "clang"), ("c++", "g++", "clang++")
    cc = find_compiler(machine, "CC", c_names, "c", option(given, "CMAKE_C_COMPILER"))
    cxx = find_compiler(machine, "CXX", cxx_names, "c++", option(given, "CMAKE_CXX_COMPILER"))
    plan = Plan(backend=backend or ("metal" if machine.is_apple_silicon else "cpu"))
    if plan.backend == "auto":
        _choose(plan, machine, cxx, is_ready=is_ready)
    else:
        plan.device = DEVICES[plan.backend](machine)
        if not plan.device:
            plan.device = "no device that was found"
            plan.notes.append(f"no device for {plan.backend} was found here")
        missing = "" if is_ready else missing_tool(machine, plan.backend, cxx)
        if missing:
            plan.problems.append(f"{missing}, which compiling for {plan.backend} needs; or: --backend cpu")
    if machine.is_translated:
        plan.problems.append(
            "this Python is an x86 program under Rosetta, about ten times slower and without the GPU; "
            "get one for Apple silicon and name it: brew install python, PYTHON=/opt/homebrew/bin/python3"
        )
    if not machine.is_64_bit:
        plan.problems.append(
            "this Python is a 32-bit program; install a 64-bit system, or on one a 64-bit Python: PYTHON=..."
        )
    if is_ready:
        return plan
    _choose_options(plan, machine)
    if machine.is_musl:
        plan.notes.append("this system has musl: wheels for glibc do not fit, so llama.cpp is compiled")
    get = machine.how_to_get("compiler")
    if machine.system == "Windows":
        if not machine.has_visual_cpp:
            plan.problems.append(f"no C++ compiler was found; type: {get}, or take a wheel: --wheels WHERE")
    elif cxx is None or cc is None:
        named = environ.get("CXX" if cxx is None else "CC", "")
        found = f"{named} was not found" if named else f"no {'C++' if cxx is None else 'C'} compiler was found"
        plan.problems.append(f"{found}; type: {get}, or take a wheel: --wheels WHERE")
    else:
        _choose_flags(plan, machine, cc, cxx, is_portable=is_portable)
    plan.inputs["processor"] = machine.cpu_name
    plan.inputs["python"] = f"{sysconfig.get_platform()} {'-'.join(platform.libc_ver())}"
    return plan


def make_portable_plan(machine: Machine) -> Plan:
    """For a wheel that runs on any processor of this architecture: ggml's CPU backend in every variant, as modules of
    which the one that suits best is opened at run time."""
    plan = make_plan(machine, "cpu", is_portable=True)
    for name in ("-DGGML_NATIVE=ON", "-DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON"):
        plan.options.pop(name)
    plan.options |= {
        "-DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON": "a wheel cannot hold links; modules are looked for by the end .so",
        "-DGGML_NATIVE=OFF": "modules for many processors, not one for this",
        "-DGGML_BACKEND_DL=ON": "backends are modules",
        "-DGGML_CPU_ALL_VARIANTS=ON": "one module for each generation of processors",
        "-DCMAKE_INSTALL_BINDIR=llama_cpp/lib": "where modules are installed to, and the engine looks for them",
        "-DCMAKE_INSTALL_RPATH=$ORIGIN": "a module finds libggml-base beside itself",
    }
    for kind in ("SHARED", "MODULE") if machine.system == "Linux" else ():
        plan.options[f"-DCMAKE_{kind}_LINKER_FLAGS=-s"] = "no names for debuggers"
    # Each module has its own flags, which come after these; the one with AMX is left out where it would be unsound.
    plan.flags.clear()
    return plan


def _choose(plan: Plan, machine: Machine, cxx: Compiler | None, *, is_ready: bool) -> None:
    """The first backend that has a device here and all that compiling takes. The makers' own come before Vulkan."""
    for candidate, find in DEVICES.items():
        device = find(machine)
        if not device:
            continue
        missing = "" if is_ready else missing_tool(machine, candidate, cxx)
        if not missing:
            plan.backend, plan.device = candidate, device
            return
        plan.notes.append(f"{device} could be used with {candidate}, but {missing}; or take a wheel: --wheels WHERE")


def _choose_options(plan: Plan, machine: Machine) -> None:
    options = plan.options
    options["-DGGML_NATIVE=ON"] = "for this very processor; said aloud, since the default hangs on the environment"
    options["-DGGML_OPENMP=OFF"] = (
        "two contexts in a process make two OpenMP teams, which sleep at every barrier; the engine has a threadpool"
    )
    options["-DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON"] = "a wheel cannot hold links: each name would be a copy"
    if machine.system == "Darwin":
        options[f"-DCMAKE_OSX_ARCHITECTURES={machine.processor}"] = "CMake may be a program for the other kind of Mac"
    if machine.system == "Darwin" and plan.backend != "metal":
        # llama-cpp-python turns it on by FORCE.
        plan.hook = _HOOK + _HOOK_WITHOUT_METAL
    if plan.backend == "metal":
        options["-DGGML_METAL=ON"] = "Apple's GPU"
    elif plan.backend == "vulkan":
        options["-DGGML_VULKAN=ON"] = "any GPU with a Vulkan driver"
    elif plan.backend == "cuda":
        options["-DGGML_CUDA=ON"] = "NVIDIA's GPUs"
        # "9.0" is 90.
        found = [text.replace(".", "") for text in nvidia(machine, "compute_cap") if re.fullmatch(r"\d+\.\d", text)]
        if found:
            why = "only for the cards that are here; all generations take many times as long"
            options[f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(found)}"] = why
        nvcc = tool(machine, "nvcc", "CUDA_HOME", "/usr/local/cuda")
        if nvcc:
            plan.inputs["nvcc"] = run([nvcc, "--version"], environ=machine.environ)[1].strip()
        if nvcc and not machine.which("nvcc"):
            plan.variables["CUDACXX"] = nvcc
    elif plan.backend == "rocm":
        options["-DGGML_HIP=ON"] = "AMD's GPUs"
        if plan.device.startswith("gfx"):
            options[f"-DGPU_TARGETS={plan.device}"] = "only for the GPUs that are here"
        compilers, root = (ask(machine, "hipconfig", flag)[1].strip() for flag in ("-l", "-R"))
        if compilers and root:
            plan.variables |= {"HIPCXX": f"{compilers}/clang", "HIP_PATH": root}


# ggml's modules for ARM that older compilers cannot make, and what these stumble over.
_NEW_MODULES = {
    "armv8.2-a+sve": ("armv8.2_3",),
    "armv8.6-a+i8mm+sve2": ("armv8.6_0", "armv8.6_1", "armv8.6_2", "armv9.2_1", "armv9.2_2"),
    "armv9.2-a+sme": ("armv9.2_1", "armv9.2_2"),
}


def _choose_flags(plan: Plan, machine: Machine, cc: Compiler, cxx: Compiler, *, is_portable: bool) -> None:
    """The compiler's part: what of the processor it cannot use rightly, and whether it can use it at all."""
    plan.inputs |= {"cc": cc.banner, "cxx": cxx.banner}
    get, n_problems = machine.how_to_get("compiler"), len(plan.problems)
    c_program = "#include <stdio.h>\nint main(void) { return 0; }\n"
    for compiler, program, flag in ((cc, c_program, "-std=c11"), (cxx, LANGUAGE_SOURCE, "-std=c++17")):
        if broken := compiler.complaint(program, flag, link=True):
            plan.problems.append(
                f"the {compiler.language.upper()} compiler does not work, or is too old for llama.cpp, which needs GCC "
                f"9 or clang 9 ({compiler.banner}: {broken}); type: {get}, or take a wheel: --wheels WHERE"
            )
    if len(plan.problems) > n_problems:
        return
    amx_flag = "-mno-amx-int8"
    if machine.is_x86:
        has_amx = "amx_int8" in machine.cpu_flags
        is_sound = "unsound" not in (cc.amx, cxx.amx) and (not has_amx or cxx.amx_computes())
        plan.unsound_modules |= {} if is_sound else {"sapphirerapids": "the compiler makes AMX code that crashes"}
        if not is_sound and not cc.complaint("", amx_flag) and not cxx.complaint("", amx_flag):
            plan.flags[amx_flag] = f"{cxx.banner} makes AMX code that crashes; GCC 13.3, 14.1 and clang do not"
            if has_amx:
                plan.notes.append(
                    "this processor has AMX, which makes prompts 1.3 to 1.6 times faster, but this compiler builds it "
                    "wrongly, so it stays unused; with a newer one: CC=clang CXX=clang++"
                )
    if is_portable:
        for arch, modules in _NEW_MODULES.items() if not machine.is_x86 else ():
            if cxx.complaint(NATIVE_SOURCE, f"-march={arch}"):
                plan.unsound_modules |= dict.fromkeys(modules, f"{cxx.banner} does not know {arch}")
    elif option(machine.environ.get("CMAKE_ARGS", ""), "GGML_NATIVE").upper() not in ("OFF", "0", "NO", "FALSE"):
        _choose_native(plan, machine, cxx)


def _choose_native(plan: Plan, machine: Machine, cxx: Compiler) -> None:
    """What the compiler makes of "native". On ARM many know a processor by its number alone, and use nothing of one
    that is newer, or is a virtual machine's; there it is told what this one has."""
    has = [feature for feature in features(machine.processor) if feature.flag in machine.cpu_flags]
    native, arch = "-march=native" if machine.is_x86 else "-mcpu=native", ""
    if any(feature.tag for feature in has) and _lost(cxx, native, has):
        arch = "armv8.2-a"
        for feature in has:
            if feature.tag and not _lost(cxx, f"-march={arch}+{feature.tag}", [feature]):
                arch = f"{arch}+{feature.tag}"
        plan.options["-DGGML_NATIVE=OFF"] = "the compiler does not find out all that this processor has, so it is named"
        plan.options[f"-DGGML_CPU_ARM_ARCH={arch}"] = "that"
    flag = f"-march={arch}" if arch else native
    name = cxx.banner or cxx.command[0]
    if said := cxx.complaint(NATIVE_SOURCE, "-O3", flag, *plan.flags):
        is_old_assembler = "no such instruction" in said or "Assembler" in said
        who, newer = ("the assembler", "newer binutils") if is_old_assembler else (name, "a newer compiler")
        any_processor = "-DGGML_NATIVE=OFF" + ("" if machine.is_x86 else " -DGGML_CPU_ARM_ARCH=armv8-a")
        plan.problems.append(
            f"{who} does not know this processor's instructions ({said}); get {newer} and name it: CC=clang "
            f"CXX=clang++, or build for any processor: CMAKE_ARGS='{any_processor}'"
        )
    for feature in [] if said else _lost(cxx, flag, has):
        plan.notes.append(
            f"built without {feature.ggml}, which this processor has: {name} does not know it; "
            f"{feature.known_by or 'newer compilers'} do, with which engines are faster: CC=... CXX=..."
        )
    macros = cxx.macros(native)
    plan.inputs["native"] = hashlib.sha256(macros.encode()).hexdigest()[:24] if macros else ""


def _lost(cxx: Compiler, flag: str, has: list[Feature]) -> list[Feature]:
    """What a build with the flag does without: all if there is none, and nothing if the compiler does not tell."""
    macros, is_refused = cxx.macros(flag), cxx.complaint(NATIVE_SOURCE, "-O3", flag)
    used = {each.ggml for each in has if not is_refused and (not macros or f"#define {each.macro} " in macros)}
    return without_halves([feature for feature in has if feature.ggml not in used], used)


def option(arguments: str, name: str) -> str:
    """The value that `-DNAME=VALUE` gives last, or nothing."""
    found = [part for part in words("CMAKE_ARGS", arguments) if re.match(rf"-D{re.escape(name)}(:\w+)?=", part)]
    return found[-1].partition("=")[2] if found else ""


def missing_tool(machine: Machine, backend: str, cxx: Compiler | None) -> str:
    """What compiling for a backend lacks, with the command that gets it; empty when all is there."""
    if backend == "cuda" and not tool(machine, "nvcc", "CUDA_HOME", "/usr/local/cuda"):
        get = "apt install nvidia-cuda-toolkit" if machine.which("apt-get") else "install it from NVIDIA"
        return f"the CUDA toolkit (nvcc) is missing ({get}, or CUDA_HOME=FOLDER)"
    if backend == "rocm" and not tool(machine, "hipcc", "ROCM_PATH", "/opt/rocm"):
        return "ROCm's compiler (hipcc) is missing (install ROCm, or ROCM_PATH=FOLDER)"
    if backend == "metal" and not machine.which("xcrun"):
        return "the Xcode command line tools are missing (xcode-select --install)"
    if backend == "vulkan":
        get = "(apt install glslc libvulkan-dev spirv-headers)" if machine.which("apt-get") else "(the Vulkan SDK)"
        if not machine.which("glslc"):
            return f"Vulkan's shader compiler (glslc) is missing {get}"
        sdk = machine.environ.get("VULKAN_SDK", "")
        include = [f"-I{sdk}/include", f"-L{sdk}/lib"] if sdk else []
        if cxx is not None and cxx.complaint(VULKAN_SOURCE, *include, "-lvulkan", link=True):
            return f"the Vulkan headers, SPIRV-Headers or libvulkan are missing {get}"
    return ""


def say(plan: Plan, machine: Machine, wheels: str) -> Iterator[str]:
    """The plan as lines."""
    yield f"system:   {machine.system} {machine.processor}, {machine.cpu_name}"
    yield f"backend:  {plan.backend}, for {plan.device}"
    if wheels:
        yield f"compile:  nothing, if {wheels} has a wheel of llama-cpp-python for this system"
    else:
        yield from _say_compiling(plan, machine)
    for text in plan.notes:
        yield f"note:     {text}"
    for text in plan.problems:
        yield f"problem:  {text}"


def _say_compiling(plan: Plan, machine: Machine) -> Iterator[str]:
    for name, value in plan.variables.items():
        yield f"variable: {name}={value}"
    yield f'compile:  CMAKE_ARGS="{plan.cmake_args(machine.environ)}" (minutes on two cores, longer for GPUs)'
    for text, why in (plan.options | plan.flags).items():
        yield f"          {text}: {why}"
