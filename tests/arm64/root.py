"""A root folder of arm64 Linux on a machine of another kind: Debian 12 with Python 3.11, the dependencies of localrun
as wheels, and llama.cpp cross-compiled in four modules. QEMU runs its programs.

    python -m tests.arm64.root        makes it, if need be

What was made lies in `~/.cache/localrun-arm64` and is used again: about a quarter of an hour the first time on two
cores, nothing later. Needs root, since the folder is a chroot and the kernel has to be told of the emulator.

Two tricks are not localrun's: a library ends on a border of 64 KB, since an emulator with larger pages than its host's
cannot map what lies behind the end of a file; and Python's byte code is written by the host's interpreter of the same
version, because the emulated one is slow.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from localrun.errors import LocalrunError
from tests.script_module import module_of

REPOSITORY = Path(__file__).parents[2]
peer_build = module_of(REPOSITORY / "packaging" / "bench" / "peer_build.py")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "localrun-arm64")
ROOT = CACHE / "root"
LIBRARIES = ROOT / "site/llama_cpp/lib"
# Nothing but NEON; what a Raspberry Pi 5 has; a virtual machine on an M2, or a Snapdragon X; a Graviton 3.
MODULES = ("armv8.0_1", "armv8.2_2", "armv8.6_0", "armv8.6_1")
_NOT_MADE = ("armv8.2_1", "armv8.2_3", "armv8.6_2", "armv9.2_1", "armv9.2_2")
PROGRAMS = {"qemu-aarch64-static": "qemu-user-static", "debootstrap": "debootstrap", "cmake": "cmake",
            "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "ninja": "ninja-build"}  # fmt: skip
# The Debian of the root, and its Python.
RELEASE, PYTHON = "bookworm", "3.11"
_BINFMT = Path("/proc/sys/fs/binfmt_misc")
_GLIBCS = (17, 24, 26, 27, 28, 31, 34, 35, 36)
_PAGE = 65_536
_OPTIONS = ("-DGGML_NATIVE=OFF", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON", "-DGGML_OPENMP=OFF",
            "-DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_COMMON=OFF",
            "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
            "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_CURL=OFF", "-DCMAKE_BUILD_TYPE=Release",
            "-DCMAKE_INSTALL_RPATH=$ORIGIN", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DCMAKE_SYSTEM_NAME=Linux",
            "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc",
            "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++")  # fmt: skip


class CannotMake(Exception):
    """Why there is no such root here, and what to type."""


def make() -> None:
    """Whatever is missing of it. Raises CannotMake."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise CannotMake("an arm64 root is made by root, on Linux")
    if missing := [package for program, package in PROGRAMS.items() if shutil.which(program) is None]:
        raise CannotMake(f"type: apt install {' '.join(missing)}")
    CACHE.mkdir(parents=True, exist_ok=True)
    _register()
    _once("system", ROOT, _make_system)
    _once("packages", ROOT / "site", _add_packages)
    _once("llama.cpp", CACHE / "build", _compile)
    _install_libraries()
    _link_package()


def is_made() -> bool:
    return all(_stamp(what).exists() for what in ("system", "packages", "llama.cpp"))


def _stamp(what: str) -> Path:
    return CACHE / f"{what}.made"


def _once(what: str, folder: Path, step: Callable[[], None]) -> None:
    """A step that was broken off is done anew."""
    if _stamp(what).exists():
        return
    print(f"arm64: making {what}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    step()
    _stamp(what).touch()


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, errors="replace", check=False)
    if ended.returncode:
        raise CannotMake(f"{command[0]} failed: {(ended.stderr or ended.stdout)[-1500:]}")


def _register() -> None:
    """The kernel runs arm64 programs with QEMU."""
    if any(_BINFMT.glob("qemu-aarch64*")):
        return
    if not (_BINFMT / "register").exists():
        _run("mount", "-t", "binfmt_misc", "binfmt_misc", _BINFMT)
    # The magic number of an arm64 program; O and C keep the program's file open and its rights, F opens QEMU now.
    magic = r"\x7f\x45\x4c\x46\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    mask = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
    qemu = shutil.which("qemu-aarch64-static")
    with contextlib.suppress(FileExistsError):
        (_BINFMT / "register").write_text(f":qemu-aarch64:M::{magic}:{mask}:{qemu}:OCF", encoding="ascii")


def _make_system() -> None:
    packages = "python3,ca-certificates,procps,libstdc++6,g++"
    _run("debootstrap", "--arch=arm64", "--variant=minbase", f"--include={packages}", RELEASE, ROOT)


def _add_packages() -> None:
    """Every dependency but llama.cpp is a wheel. Of llama-cpp-python the bindings are taken from this environment."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = ("pytest", "pytest-asyncio", "hypothesis")
    tests = [line for line in project["optional-dependencies"]["dev"] if re.match(r"[\w-]+", line)[0] in names]  # type: ignore[index]
    wanted = [line for line in project["dependencies"] if not line.startswith("llama-cpp-python")] + tests
    platforms = [f"--platform=manylinux_2_{glibc}_aarch64" for glibc in _GLIBCS] + ["--platform=manylinux2014_aarch64"]
    _run(
        sys.executable, "-m", "pip", "install", "--quiet", "--target", ROOT / "site", "--only-binary=:all:",
        "--implementation=cp", "--abi=cp311", "--abi=abi3", "--abi=none", f"--python-version={PYTHON}", *platforms,
        "--constraint", REPOSITORY / "packaging/constraints.txt", "--no-compile", *wanted, "diskcache",
    )  # fmt: skip
    bindings = Path(_installed_bindings())
    ignored = shutil.ignore_patterns("*.so*", "__pycache__", "build.json")
    shutil.copytree(bindings, ROOT / "site/llama_cpp", ignore=ignored)
    info = next(bindings.parent.glob("llama_cpp_python-*.dist-info"))
    shutil.copytree(info, ROOT / "site" / info.name)
    if sys.version_info[:2] == (3, 11):
        _run(sys.executable, "-m", "compileall", "-q", "-s", ROOT, "-p", "/", ROOT / "site")


def _installed_bindings() -> str:
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.submodule_search_locations
    return str(spec.submodule_search_locations[0])


def _compile() -> None:
    """libllama without optimization: it only builds graphs, and takes most of the compiler's time."""
    try:
        given = peer_build.llama_cpp_source(peer_build.build_folder(), lambda line: print(f"arm64: {line}"))
    except LocalrunError as error:
        raise CannotMake(str(error)) from error
    source, build = CACHE / "source", CACHE / "build"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(given, source, symlinks=True)
    native_wheel().edit_variants(source / "ggml", leave_out=_NOT_MADE)
    _run("cmake", "-G", "Ninja", "-S", source, "-B", build, *_OPTIONS)
    rules = build / "build.ninja"
    text = rules.read_text(encoding="utf-8")
    parts = re.split(r"(?m)(?=^build src/CMakeFiles/llama\.dir/)", text)
    rules.write_text(parts[0] + "".join(part.replace("-O3", "-O0", 1) for part in parts[1:]), encoding="utf-8")
    _run("nice", "-n", "15", "ninja", "-C", build, "llama", *(f"ggml-cpu-{module}" for module in MODULES))


def native_wheel() -> ModuleType:
    return module_of(REPOSITORY / "packaging/native_wheel.py")


def _install_libraries() -> None:
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    for name in ("llama", "ggml", "ggml-base", *(f"ggml-cpu-{module}" for module in MODULES)):
        library = CACHE / f"build/bin/lib{name}.so"
        target = LIBRARIES / library.name
        if not target.exists():
            shutil.copy2(library, target)
            os.truncate(target, -(-target.stat().st_size // _PAGE) * _PAGE)


def _link_package() -> None:
    """`localrun.models` and `localrun.tui` lie beside `localrun` in the checkout, and below it when installed."""
    package = ROOT / "site/localrun"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir()
    inside = {path.name: f"localrun/{path.name}" for path in (REPOSITORY / "localrun").iterdir()}
    for name, target in (inside | {"models": "models", "tui": "tui"}).items():
        (package / name).symlink_to(f"/checkout/{target}")


# In a mount namespace of its own, so that nothing is left and each program has the processor it is told.
_ENTER = """
set -e; root=$1; checkout=$2; cpuinfo=$3; shared=$4; shift 4
mkdir -p "$root/checkout" "$root$shared" "$root/sys"
mount -t proc proc "$root/proc"; mount --rbind /sys "$root/sys"; mount --rbind /dev "$root/dev"
mount --bind "$checkout" "$root/checkout"; mount --bind "$shared" "$root$shared"
if [ -n "$cpuinfo" ]; then mount --bind "$cpuinfo" "$root/proc/cpuinfo"; fi
exec chroot "$root" "$@"
"""


def command(
    shared: Path, *arguments: str, cpu: str = "cortex-a76", page_bytes: int = 4096, cpuinfo: Path | None = None,
    **environ: str,
) -> tuple[list[str], dict[str, str]]:  # fmt: skip
    """A program of the root as `subprocess` runs it, with its environment. `shared` is a folder that has the same name
    inside; `cpuinfo` is what the program reads as /proc/cpuinfo."""
    mine = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "PYTHONPATH": "/site", "HOME": str(shared)}
    mine |= {"LOCALRUN_HOME": str(shared / "localrun"), "QEMU_CPU": cpu, "QEMU_PAGESIZE": str(page_bytes)} | environ
    enter = ["unshare", "-m", "sh", "-c", _ENTER, "sh", str(ROOT), str(REPOSITORY), str(cpuinfo or ""), str(shared)]
    return [*enter, *arguments], mine


if __name__ == "__main__":
    try:
        make()
    except CannotMake as error:
        sys.exit(f"arm64: {error}")
    print(ROOT)
