"""`localrun.native_build`: what it chooses, on compilers that refuse as real ones do, and the wheels it uses again."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from localrun import config
from localrun.hardware.cpu_features import ARM, cpu_facts
from localrun.native_build import machine as build_machine
from localrun.native_build import wheels
from localrun.native_build.machine import Compiler, Machine
from localrun.native_build.plan import VERSION, Plan, make_plan, make_portable_plan
from localrun.native_build.wheels import RECORD, BuildError, cache_folder, compiled_wheel, install, keep_newest
from tests.arm_machines import MACHINES, ArmMachine
from tests.says import says

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the compilers are scripts with a #! line")

# What compilers say when they are older than the processor (GCC 4.9, binutils 2.30, a system without headers).
NO_NATIVE = "cc1plus: error: bad value ('native') for '-march=' switch"
OLD_ASSEMBLER = "/tmp/ccQ1.s: Assembler messages:\n/tmp/ccQ1.s:12: Error: no such instruction: `vpdpbusd %zmm1,%zmm2'"
NO_HEADERS = "probe.cpp:1:10: fatal error: vector: No such file or directory"
# The two forms of GCC's header: an operand of 8 bytes, and the builtin that knows all 64.
UNSOUND_HEADER = (
    '_tile_loadconfig (const void *c) { __asm__ volatile ("ldtilecfg\\t%X0" :: "m" (*((const void **)c))); }'
)
SOUND_HEADER = "_tile_loadconfig (const void *c) { __builtin_ia32_ldtilecfg (c); }"


def machine(folder: Path, *, system: str = "Linux", processor: str = "x86_64", **environ: str) -> Machine:
    """A machine with nothing on PATH but what lies in the folder, and a processor without AMX."""
    made = Machine(
        {"PATH": str(folder), "HOME": str(folder), "LOCALRUN_HOME": str(folder), **environ}, system, processor
    )
    made.__dict__["cpus"] = [{"model name": "Test", "flags": "avx2"}]  # what is read once
    return made


def add_compiler(folder: Path, *, fails_with: str = "", when: str = "*", header: str = SOUND_HEADER) -> None:
    """`cc` and `c++` that print a header when they preprocess, and refuse what matches `when`, a shell pattern."""
    said = f"cat >&2 <<'END'\n{fails_with}\nEND\nexit 1" if fails_with else ":"
    script = (
        f"#!{shutil.which('bash')}\nPATH=/usr/bin:/bin\n"
        'case "$*" in\n'
        '--version) echo "g++ (Test) 1.0"; exit ;;\n'
        f"*-E*) cat <<'END'\n{header}\nEND\nexit ;;\n"
        "esac\n"
        f'case "$*" in\n{when})\n{said}\n;;\nesac\n'
    )
    for name in ("cc", "c++"):
        path = folder / name
        path.write_text(script, encoding="utf-8")
        path.chmod(0o755)


def test_the_version_is_the_pinned_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"llama-cpp-python=={VERSION}" in project["dependencies"]


def test_it_runs_before_anything_is_installed():
    isolated = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); "]
    isolated[-1] += (
        "import runpy; sys.argv[1:] = ['--help']; runpy.run_module('localrun.native_build', run_name='__main__')"
    )
    ran = subprocess.run(isolated, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "--wheels" in ran.stdout


def test_the_cache_lies_where_the_programs_own_does(tmp_path: Path):
    assert cache_folder({"LOCALRUN_HOME": str(tmp_path)}, "Linux").is_relative_to(
        config.folders({"LOCALRUN_HOME": str(tmp_path)}).cache
    )
    assert cache_folder({"XDG_CACHE_HOME": "/x"}, "Linux") == Path("/x/localrun/native-wheels")


# --- What is chosen ---


def test_openmp_is_off_and_native_code_said_aloud(tmp_path: Path):
    add_compiler(tmp_path)
    here = machine(tmp_path, SOURCE_DATE_EPOCH="1", CMAKE_ARGS="-DGGML_OPENMP=ON")
    plan = make_plan(here)
    assert plan.problems == []
    build = plan.environment(here.environ, tmp_path / "hook.cmake")
    # Set at all, it makes a build without any vector instruction.
    assert "SOURCE_DATE_EPOCH" not in build
    assert "-DGGML_NATIVE=ON -DGGML_OPENMP=OFF" in build["CMAKE_ARGS"]
    assert build["CMAKE_ARGS"].endswith(" -DGGML_OPENMP=ON"), "CMake takes the last, which must be the caller's"
    assert f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={tmp_path}/hook.cmake" in build["CMAKE_ARGS"]
    assert "LLAMA_BUILD_COMMON OFF" in plan.hook


@pytest.mark.parametrize(("header", "flags"), [(UNSOUND_HEADER, ["-mno-amx-int8"]), (SOUND_HEADER, []), ("", [])])
def test_amx_is_used_only_where_the_compiler_is_sound(tmp_path: Path, header: str, flags: list[str]):
    add_compiler(tmp_path, header=header)
    here = machine(tmp_path, CFLAGS="-g")
    plan = make_plan(here)
    assert list(plan.flags) == flags
    assert list(plan.unsound_modules) == ["sapphirerapids"] * len(flags)
    if flags:
        assert plan.environment(here.environ, None)["CFLAGS"] == "-g -mno-amx-int8"
    assert list(make_plan(machine(tmp_path, processor="aarch64")).flags) == []
    portable = make_portable_plan(here)
    assert (portable.flags, portable.unsound_modules) == ({}, plan.unsound_modules), (
        "each module has flags of its own there"
    )


def test_a_compiler_that_does_not_know_the_flag_against_amx_is_spared(tmp_path: Path):
    unknown = "c++: error: unrecognized command-line option '-mno-amx-int8'"
    add_compiler(tmp_path, header=UNSOUND_HEADER, fails_with=unknown, when="*-mno-amx-int8*")
    plan = make_plan(machine(tmp_path))
    assert (plan.flags, plan.problems) == ({}, [])


def test_gits_shell_on_windows_is_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    uname = tmp_path / "uname"
    uname.write_text("#!/bin/sh\necho MINGW64_NT-10.0-22631\n", encoding="utf-8")
    uname.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    monkeypatch.setattr(platform, "machine", lambda: "AMD64")
    here = Machine()
    assert (here.system, here.is_x86) == ("Windows", True)
    assert says(only_problem(here, "cpu"), "no C++ compiler", "winget install", "VC.Tools.x86.x64", "--wheels")
    installer = tmp_path / "Microsoft Visual Studio/Installer"
    installer.mkdir(parents=True)
    (installer / "vswhere.exe").write_text('#!/bin/sh\ncase "$*" in *VC.Tools.ARM64*) echo C:/VS ;; esac\n')
    (installer / "vswhere.exe").chmod(0o755)
    monkeypatch.setenv("ProgramFiles(x86)", str(tmp_path))
    assert len(make_plan(Machine(), "cpu").problems) == 1, "the tools for another processor"
    monkeypatch.setattr(platform, "machine", lambda: "ARM64")
    assert make_plan(Machine(), "cpu").problems == []


@pytest.mark.parametrize(("name", "is_sound"), [("clang++-16", True), ("g++-12", False)])
def test_real_compilers_are_judged_by_what_they_do(name: str, is_sound: bool):
    path = shutil.which(name)
    if path is None or os.uname().machine != "x86_64":
        pytest.skip(f"needs {name} on x86")
    compiler = Compiler((path,), "c++", dict(os.environ))
    if not is_sound and "12.2.0" not in compiler.banner:
        pytest.skip("later ones are mended")
    assert compiler.amx == ("sound" if is_sound else "unsound")


def test_a_mac_without_metal_is_told_so_behind_llama_cpp_pythons_back(tmp_path: Path):
    add_compiler(tmp_path)
    assert "GGML_METAL OFF" in make_plan(machine(tmp_path, system="Darwin"), "cpu").hook
    assert "GGML_METAL" not in make_plan(machine(tmp_path)).hook


def test_a_mac_builds_for_its_own_processor_whatever_cmake_is_for(tmp_path: Path):
    add_compiler(tmp_path)
    plan = make_plan(machine(tmp_path, system="Darwin", processor="arm64"), "cpu")
    assert "-DCMAKE_OSX_ARCHITECTURES=arm64" in plan.options
    assert not any("OSX" in option for option in make_plan(machine(tmp_path)).options)


def test_a_gcc_before_10_for_arm_is_refused_with_a_newer_one(tmp_path: Path):
    said = "probe.cpp:5:60: error: 'vld1q_s8_x4' was not declared in this scope"
    add_compiler(tmp_path, fails_with=said, when="*-O3*")
    here = machine(tmp_path, processor="aarch64")
    here.__dict__["cpus"] = cpu_facts(by_name("orin").cpuinfo)
    assert says(only_problem(here), "vld1q_s8_x4", "a newer compiler", "CXX=clang++")


# --- ARM: what GCC 12 makes of processors that it knows, and of those that it does not ---

_TAGS = {feature.tag: feature.macro for feature in ARM if feature.tag}
_REFUSED = "arm_neon.h:1: error: inlining failed in call to always_inline 'vfmaq_f16': target specific option mismatch"


def arm_machine(folder: Path, arm: ArmMachine, *, knows: Sequence[str] = tuple(_TAGS), **environ: str) -> Machine:
    """With a GCC that `knows` tags of -march, and takes the processor as GCC 12 does."""
    native = () if arm.native == "nothing" else arm.tags
    defines = "\n".join(f'[[ $* == *+{tag}* ]] && echo "#define {macro} 1"' for tag, macro in _TAGS.items())
    natives = "\n".join(f'echo "#define {_TAGS[tag]} 1"' for tag in native)
    unknown = "\n".join(f'[[ $* == *+{tag}* ]] && {{ echo "error: bad +{tag}" >&2; exit 1; }}' for tag in
                        (*_TAGS, "sme", "sve2") if tag not in knows)  # fmt: skip
    refused = f'[[ $* == *-mcpu=native* && $* != *-E* ]] && {{ echo "{_REFUSED}" >&2; exit 1; }}'
    script = (
        f"#!{shutil.which('bash')}\nPATH=/usr/bin:/bin\n[[ $* == --version ]] && {{ echo 'g++ (Test) 12.2'; exit; }}\n"
        f"{unknown}\n{refused if arm.native == 'refused' else ''}\n"
        f'[[ $* == *-dM* ]] || exit 0\necho "#define __ARM_NEON 1"\n'
        f"if [[ $* == *-mcpu=native* ]]; then\n:\n{natives}\nelse\n:\n{defines}\nfi\nexit 0\n"
    )
    for name in ("cc", "c++"):
        (folder / name).write_text(script, encoding="utf-8")
        (folder / name).chmod(0o755)
    made = machine(folder, processor="aarch64", **environ)
    made.__dict__["cpus"] = cpu_facts(arm.cpuinfo)
    return made


@pytest.mark.parametrize("arm", MACHINES, ids=lambda arm: arm.name)
def test_every_arm_is_built_with_all_that_it_has(tmp_path: Path, arm: ArmMachine):
    plan = make_plan(arm_machine(tmp_path, arm))
    assert (plan.problems, plan.notes) == ([], [])
    if arm.native == "right":
        assert "-DGGML_NATIVE=ON" in plan.options
        assert not any("ARM_ARCH" in option for option in plan.options)
    else:
        # CMake takes the last.
        assert list(plan.options).index("-DGGML_NATIVE=OFF") > list(plan.options).index("-DGGML_NATIVE=ON")
        (arch,) = (option for option in plan.options if "ARM_ARCH" in option)
        assert arch.partition("=")[2].split("+") == ["armv8.2-a", *arm.tags]


def by_name(name: str) -> ArmMachine:
    return next(arm for arm in MACHINES if arm.name == name)


def test_what_an_older_compiler_does_not_know_is_said(tmp_path: Path):
    knows = ("dotprod", "fp16")
    plan = make_plan(arm_machine(tmp_path, by_name("vm-on-a-mac"), knows=knows))
    assert "-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16" in plan.options
    assert plan.problems == []
    (note,) = plan.notes
    assert says(note, "without MATMUL_INT8", "g++ (Test) 12.2 does not know it", "GCC 10", "CXX=")


def test_a_compiler_that_takes_the_flag_for_sve_without_its_header_builds_without(tmp_path: Path):
    """As GCC 9."""
    here = arm_machine(tmp_path, by_name("dgx-spark"), knows=("dotprod", "fp16", "sve"))
    for name in ("cc", "c++"):
        path = tmp_path / name
        first, rest = path.read_text().split("\n", 1)
        lacks = '[[ $* == *+sve* ]] && grep -qs arm_sve.h -- "${@: -1}" && { echo "no arm_sve.h" >&2; exit 1; }'
        path.write_text(f"{first}\nPATH=/usr/bin:/bin\n{lacks}\n{rest}")
    plan = make_plan(here)
    assert "-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16" in plan.options
    assert [note.split(",")[0] for note in plan.notes] == ["built without MATMUL_INT8", "built without SVE"]
    assert "armv8.2_3" in make_portable_plan(here).unsound_modules


@pytest.mark.parametrize(
    ("knows", "left_out"),
    [
        ((*_TAGS, "sve2", "sme"), []),
        ((*_TAGS, "sve2"), ["armv9.2_1", "armv9.2_2"]),
        (
            ("dotprod", "fp16"),
            ["armv8.2_3", "armv8.6_0", "armv8.6_1", "armv8.6_2", "armv9.2_1", "armv9.2_2"],
        ),
    ],
)
def test_the_wheel_for_all_is_without_modules_that_the_compiler_does_not_know(
    tmp_path: Path, knows: tuple[str, ...], left_out: list[str]
):
    plan = make_portable_plan(arm_machine(tmp_path, by_name("vm-on-a-mac"), knows=knows))
    assert plan.problems == []
    assert list(plan.unsound_modules) == left_out
    assert "-DGGML_NATIVE=OFF" in plan.options
    assert not any("ARM_ARCH" in option for option in plan.options)


def test_what_an_older_compiler_does_not_know_is_said_on_x86_too(tmp_path: Path):
    add_compiler(tmp_path, header="#define __AVX2__ 1\n#define __AVX512F__ 1")
    here = machine(tmp_path)
    here.__dict__["cpus"] = [{"flags": "avx2 avx512f avx_vnni"}]
    (note,) = make_plan(here).notes
    assert says(note, "without AVX_VNNI", "GCC 11")


# --- What stands in the way ---


def only_problem(here: Machine, backend: str = "") -> str:
    problems = make_plan(here, backend).problems
    assert len(problems) == 1
    assert "\n" not in problems[0]
    return problems[0]


@pytest.mark.parametrize(
    ("manager", "command"),
    [("apt-get", "apt install g++"), ("dnf", "dnf install gcc-c++"), ("apk", "apk add build-base")],
)
def test_no_compiler(tmp_path: Path, manager: str, command: str):
    (tmp_path / manager).touch(mode=0o755)
    assert only_problem(machine(tmp_path)).startswith(f"no C++ compiler was found; type: {command}")
    assert make_plan(machine(tmp_path), is_ready=True).problems == [], "a ready wheel needs none"


def test_a_compiler_that_is_named_and_not_there(tmp_path: Path):
    add_compiler(tmp_path)
    assert only_problem(machine(tmp_path, CXX="g++-99")).startswith("g++-99 was not found; type: ")


@pytest.mark.parametrize(
    ("said", "when", "told", "way_out"),
    [
        ("undefined reference to `std::filesystem::status'", "*-std=c++17*", "too old for llama.cpp", "type: "),
        ("fatal error: stdio.h: No such file or directory", "*-std=c11*", "the C compiler", "type: "),
        ("/usr/bin/ld: cannot find crt1.o: error", "*-std=c++17*", "crt1.o", "--wheels"),
        (NO_NATIVE, "*-march=native*", "cc1plus: error: bad value", "CXX=clang++"),
        (OLD_ASSEMBLER, "*-march=native*", "no such instruction: `vpdpbusd", "newer binutils"),
        (NO_HEADERS, "*probe.cpp*", "C++ compiler", "type: "),
    ],
)
def test_a_compiler_that_refuses(tmp_path: Path, said: str, when: str, told: str, way_out: str):
    add_compiler(tmp_path, fails_with=said, when=when)
    problem = only_problem(machine(tmp_path))
    assert told in problem
    assert way_out in problem
    if when == "*-march=native*":
        assert "CMAKE_ARGS='-DGGML_NATIVE=OFF'" in problem
        assert make_plan(machine(tmp_path, CMAKE_ARGS="-DGGML_NATIVE=OFF")).problems == [], "the way out leads out"


def test_a_32_bit_program_is_refused_before_anything_is_compiled(tmp_path: Path):
    add_compiler(tmp_path)
    here = dataclasses.replace(machine(tmp_path, processor="aarch64"), is_64_bit=False)
    here.__dict__["cpus"] = []
    assert says(only_problem(here), "32-bit program", "64-bit", "PYTHON=")
    assert "32-bit" in make_plan(here, is_ready=True).problems[0]


@pytest.mark.parametrize("name", ["V3D 7.1.7.0", "Mali-G610 (Panfrost)", "llvmpipe (LLVM 15)", "PowerVR BXM-4-64"])
def test_a_gpu_on_which_llama_cpp_is_no_faster_is_not_chosen(tmp_path: Path, name: str):
    add_compiler(tmp_path)
    (tmp_path / "glslc").touch(mode=0o755)
    summary = f"\tdeviceType         = PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU\n\tdeviceName         = {name}\n"
    program = tmp_path / "vulkaninfo"
    program.write_text(f"#!{shutil.which('bash')}\nwhile read -r l; do echo \"$l\"; done <<'END'\n{summary}END\n")
    program.chmod(0o755)
    plan = make_plan(machine(tmp_path), "auto")
    assert plan.backend == "cpu"
    assert not any("vulkan" in note for note in plan.notes)
    program.write_text(program.read_text().replace(name, "Radeon"))
    assert make_plan(machine(tmp_path), "auto").backend == "vulkan"


@pytest.mark.parametrize("said", ["", "[N/A]"])
def test_nvidias_boards_are_known_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str):
    add_compiler(tmp_path)
    if said:
        (tmp_path / "nvidia-smi").write_text(f"#!{shutil.which('bash')}\necho '{said}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(build_machine, "device_tree", lambda _: "nvidia,p3737-0000+p3701-0000 nvidia,tegra234")
    (tmp_path / "nvcc").touch(mode=0o755)
    plan = make_plan(arm_machine(tmp_path, by_name("orin")), "auto")
    assert (plan.backend, plan.device) == ("cuda", "NVIDIA Orin")
    assert "-DCMAKE_CUDA_ARCHITECTURES=87" in plan.options


def test_cuda_without_its_toolkit(tmp_path: Path):
    add_compiler(tmp_path)
    here = machine(tmp_path, CUDA_HOME="/none")
    assert says(only_problem(here, "cuda"), "(nvcc) is missing", "NVIDIA")
    assert "--backend cpu" in only_problem(here, "cuda")


def test_an_x86_python_on_an_apple_processor(tmp_path: Path):
    add_compiler(tmp_path)
    sysctl = tmp_path / "sysctl"
    sysctl.write_text(f"#!{shutil.which('bash')}\n[ $2 = sysctl.proc_translated ] && echo 1\n")
    sysctl.chmod(0o755)
    assert "brew install python" in only_problem(machine(tmp_path, system="Darwin"))
    assert "Rosetta" in make_plan(machine(tmp_path, system="Darwin"), is_ready=True).problems[0]


def test_musl_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "apk").touch(mode=0o755)
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: "x86_64-alpine-linux-musl")
    plan = make_plan(machine(tmp_path))
    assert says(plan.notes[0], "musl", "glibc")
    assert "apk add build-base linux-headers" in plan.problems[0]


# --- Wheels ---


class FakePip:
    """Makes a wheel as CMake's install rules make it: every library twice, and headers."""

    def __init__(self) -> None:
        self.n_built = 0
        self.lock = threading.Lock()

    def __call__(
        self, environ: dict[str, str], folder: Path, python: Sequence[str], source: str = "", *, log: Path
    ) -> Path:
        with self.lock:
            self.n_built += 1
            content = str(self.n_built)
        path = folder / f"llama_cpp_python-{VERSION}-py3-none-any.whl"
        info = f"llama_cpp_python-{VERSION}.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("llama_cpp/lib/libllama.so", "lib/libllama.so", "include/llama.h"):
                archive.writestr(name, content)
            archive.writestr("llama_cpp/__init__.py", "from .llama_cache import Cache\n")
            uses = "class Cache:\n    def __init__(self):\n        self.cache = diskcache.Cache()\n"
            archive.writestr("llama_cpp/llama_cache.py", f"import sys\nimport diskcache\n\n{uses}")
            about = f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {VERSION}\n"
            archive.writestr(f"{info}/METADATA", about + "Requires-Dist: numpy\nRequires-Dist: diskcache>=5.6.1\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        return path


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(wheels, "compile_wheel", fake)
    return fake


def plan_of(processor: str = "A", backend: str = "cpu") -> Plan:
    return Plan(backend=backend, inputs={"processor": processor, "cxx": "g++ 1.0"})


def test_a_wheel_is_used_again_only_for_what_it_was_made_of(tmp_path: Path, pip: FakePip):
    here = machine(tmp_path)
    first = compiled_wheel(plan_of(), here, sys.executable)
    assert compiled_wheel(plan_of(), here, sys.executable) == first
    assert pip.n_built == 1
    others = [
        (plan_of("B"), here),
        (plan_of(backend="cuda"), here),
        (plan_of(), machine(tmp_path, CMAKE_ARGS="-DGGML_AVX512=OFF")),
        (plan_of(), machine(tmp_path, CXXFLAGS="-O2")),
    ]
    for n_before, (plan, other) in enumerate(others, start=1):
        assert compiled_wheel(plan, other, sys.executable) != first
        assert pip.n_built == n_before + 1
    assert compiled_wheel(plan_of(), machine(tmp_path, TERM="dumb"), sys.executable).parent.name
    compiled_wheel(plan_of(), here, sys.executable, anew=True)
    assert pip.n_built >= len(others) + 2, "asked for anew, it is compiled again"


def test_a_wheel_asks_for_no_package_that_localrun_does_not_use(tmp_path: Path, pip: FakePip):
    wheel = compiled_wheel(plan_of(), machine(tmp_path), sys.executable)
    with zipfile.ZipFile(wheel) as made:
        about = made.read(f"llama_cpp_python-{VERSION}.dist-info/METADATA").decode()
    assert re.findall(r"Requires-Dist: (\w+)", about) == ["numpy"]
    alone = "import sys; sys.path = [sys.argv[1], *sys.path]; import llama_cpp; llama_cpp.Cache()"
    tried = subprocess.run(
        [sys.executable, "-I", "-S", "-c", alone, str(wheel)], capture_output=True, text=True, check=False
    )
    assert tried.stderr.endswith("No module named 'diskcache'\n")
    assert "in __init__" in tried.stderr  # of the class, and not of the package


def test_what_is_kept_is_bounded_and_the_least_used_goes_first(tmp_path: Path, pip: FakePip):
    here = machine(tmp_path)
    folder = cache_folder(here.environ, "Linux")
    made = [compiled_wheel(plan_of(str(number)), here, sys.executable).parent for number in range(4)]
    for age, entry in enumerate(made):
        os.utime(entry, (1000 + age, 1000 + age))
    assert wheels.kept_wheel(folder, made[0].name) is not None  # used, so the newest
    compiled_wheel(plan_of("another"), here, sys.executable)
    assert [entry.exists() for entry in made] == [True, False, True, True]
    keep_newest(folder, 1)
    assert len([entry for entry in folder.iterdir() if entry.is_dir()]) == 1


def test_two_at_once_compile_once(tmp_path: Path, pip: FakePip):
    here = machine(tmp_path)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(compiled_wheel(plan_of(), here, sys.executable))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pip.n_built == 1
    assert len(found) == 4
    assert set(found) == {found[0]}
    assert zipfile.ZipFile(found[0]).testzip() is None


def test_a_kept_wheel_has_every_library_once_and_says_how_it_was_made(tmp_path: Path, pip: FakePip):
    wheel = compiled_wheel(plan_of(), machine(tmp_path), sys.executable)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        record = json.loads(archive.read(RECORD))
        listed = archive.read(f"llama_cpp_python-{VERSION}.dist-info/RECORD").decode().splitlines()
    assert [name for name in names if name.endswith(".so")] == ["llama_cpp/lib/libllama.so"]
    assert "include/llama.h" not in names
    assert sorted(line.partition(",")[0] for line in listed) == sorted(names)
    assert record["key"] == wheel.parent.name
    assert record["processor"] == "A"


def test_problems_end_it_before_anything_is_written(tmp_path: Path, pip: FakePip):
    plan = plan_of()
    plan.problems.append("no C++ compiler was found; type: apt install g++")
    with pytest.raises(BuildError, match="apt install"):
        compiled_wheel(plan, machine(tmp_path), sys.executable)
    assert pip.n_built == 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def environment(tmp_path: Path) -> str:
    """The interpreter of an environment without anything in it but pip, which is borrowed."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    borrowed = next(Path(entry) for entry in sys.path if (Path(entry) / "pip").is_dir())
    (site / "pip").symlink_to(borrowed / "pip")
    return str(folder / "bin" / "python")


def test_installing_again_does_nothing(
    tmp_path: Path, pip: FakePip, environment: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wheels, "make_plan", lambda *_, **__: plan_of())
    here = machine(tmp_path)
    install(here, "", "", environment, force=False)
    assert wheels.installed(environment)["processor"] == "A"
    capfd.readouterr()
    install(here, "", "", environment, force=False)
    assert "is installed already" in capfd.readouterr().err
    monkeypatch.setattr(wheels, "make_plan", lambda *_, **__: plan_of("B"))
    install(here, "", "", environment, force=False)
    assert wheels.installed(environment)["processor"] == "B", "the processor has changed"
    assert pip.n_built == 2


def test_a_ready_wheel_comes_first_and_compiling_after_it(
    tmp_path: Path, pip: FakePip, environment: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wheels, "make_plan", lambda *_, **__: plan_of())
    here, shelf = machine(tmp_path), tmp_path / "shelf"
    with pytest.raises(BuildError, match="there is no folder"):
        install(here, "", str(shelf), environment, force=False)
    shelf.mkdir()
    install(here, "", str(shelf), environment, force=False)
    assert "no wheel" in capfd.readouterr().err
    assert pip.n_built == 1
    damaged = shelf / f"llama_cpp_python-{VERSION}-py3-none-any.whl"
    damaged.write_bytes(b"half of a whe")
    with pytest.raises(BuildError, match=f"{damaged} is no whole wheel"):
        install(here, "", str(shelf), environment, force=False)
    with zipfile.ZipFile(damaged, "w", zipfile.ZIP_DEFLATED) as whole:
        whole.writestr("a", b"many zeros, once: " + bytes(10_000))
    content = bytearray(damaged.read_bytes())
    content[45:55] = b"\xff" * 10
    damaged.write_bytes(content)
    with pytest.raises(BuildError, match="is no whole wheel"):
        install(here, "", str(shelf), environment, force=False)
    damaged.unlink()
    assert pip.n_built == 1
    made = pip({}, tmp_path, [], log=tmp_path)
    record = json.dumps({"portable": True, "backend": "cpu", "key": "x"}).encode()
    wheels.rewrite_wheel(made, shelf, keep=wheels.is_needed, add={RECORD: record})
    install(here, "", str(shelf), environment, force=False)
    assert wheels.installed(environment)["portable"]
    assert pip.n_built == 2
    install(here, "", str(shelf), environment, force=False)
    assert "installed already" in capfd.readouterr().err
    # It is for the processor alone, which is not what is wanted now.
    monkeypatch.setattr(wheels, "make_plan", lambda *_, **__: plan_of(backend="cuda"))
    install(here, "cuda", str(shelf), environment, force=True)
    assert wheels.installed(environment)["backend"] == "cuda"
    assert pip.n_built == 3
    install(here, "cpu", str(shelf), environment, force=True)
    install(here, "cuda", str(shelf), environment, force=False)
    assert wheels.installed(environment)["backend"] == "cuda", "a ready wheel for the processor is not what is wanted"


def test_a_kept_wheel_that_is_damaged_is_compiled_anew(tmp_path: Path, pip: FakePip, capfd: pytest.CaptureFixture[str]):
    here = machine(tmp_path)
    kept = compiled_wheel(plan_of(), here, sys.executable)
    kept.write_bytes(kept.read_bytes()[:300])
    again = compiled_wheel(plan_of(), here, sys.executable)
    assert (pip.n_built, wheels.is_whole(again)) == (2, True)
    assert "damaged" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["install", "--python", "/no/python"], "--python: /no/python"),
        (["plan", "--wheels", "/no/folder"], "/no/folder"),
        (["wheel", "--out", __file__], "is no folder"),
    ],
)
def test_an_argument_that_cannot_be_is_one_line(arguments: list[str], said: str):
    ran = subprocess.run(
        [sys.executable, "-m", "localrun.native_build", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert said in line


def test_a_quotation_that_is_not_closed_is_named():
    environ = os.environ | {"CMAKE_ARGS": "-DX='a"}
    ran = subprocess.run(
        [sys.executable, "-m", "localrun.native_build", "plan"], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env=environ,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "CMAKE_ARGS is" in ran.stderr
