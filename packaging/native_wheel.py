#!/usr/bin/env python3
"""Makes a wheel of llama-cpp-python that runs on every processor of this architecture: `packaging/native_wheel.py --out
FOLDER`. Then `make run WHEELS=FOLDER` and `packaging/install.sh --index FOLDER` need no compiler.

ggml's CPU backend lies in it once for each generation of processors, and the engine opens the one that suits. Every
library lies in it once (CMake installs each six times), without headers, and with the licences of what was compiled.

Invariants: the tag promises no older glibc than the libraries need, by their own symbols; the module with AMX is in it
only if the compiler is sound. Needs a C++ compiler, binutils, and Python with pip; Linux only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from localrun.native_build.machine import Machine  # noqa: E402
from localrun.native_build.plan import VERSION, make_portable_plan  # noqa: E402
from localrun.native_build.wheels import (  # noqa: E402
    PACKAGE,
    RECORD,
    BuildError,
    builder,
    compile_wheel,
    rewrite_wheel,
    tell,
    write_hook,
)

LIBRARIES = "llama_cpp/lib/"
# What pictures and sound need.
MEDIA_LIBRARY = "libmtmd.so"
# What every glibc system has. Linking libstdc++ into ours would need a newer glibc than the libstdc++ of older systems.
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "libstdc++.so.6", "libgcc_s.so.1"}
OLDEST_GLIBC = (2, 17)
# The newest symbols of libstdc++ that a system with that glibc has for sure, as auditwheel's policies have them.
GLIBCXX = {(2, 17): 19, (2, 27): 24, (2, 31): 28, (2, 34): 29, (2, 35): 30, (2, 39): 33}
# Modules that ggml's list lacks: one for processors with i8mm and without SVE, as in virtual machines on Macs and in
# Snapdragon X; and the line that it goes behind.
MORE_VARIANTS = {"armv8.6_0    DOTPROD FP16_VECTOR_ARITHMETIC MATMUL_INT8": "armv8.6_1"}


def unpack_source(python: list[str], folder: Path, source: Path | None) -> Path:
    """The source package's folder; it is downloaded if none is given. Raises BuildError."""
    if source is None:
        command = [*python, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE, "--dest", str(folder)]
        if subprocess.run([*command, f"{PACKAGE}=={VERSION}"], stdout=sys.stderr, check=False).returncode:
            raise BuildError(f"{PACKAGE} {VERSION} could not be downloaded; give its source package: --source FILE")
        source = next(folder.glob("*.tar.gz"))
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir() and (path / "CMakeLists.txt").exists())


def edit_variants(ggml: Path, *, leave_out: Sequence[str] = ()) -> None:
    """ggml's list of modules with ours, and without those that the compiler cannot make. A processor that one of these
    was for takes the next by score, which has the rest of it. Raises BuildError where the list is another one."""
    lists = ggml / "src" / "CMakeLists.txt"
    text = lists.read_text(encoding="utf-8")
    more = [(known, rf"\g<0>\g<1>{variant})\n") for variant, known in MORE_VARIANTS.items()]
    for name, edit in (*more, *((name, "") for name in leave_out)):
        line = rf"(?m)^( *ggml_add_cpu_backend_variant\(){re.escape(name)} .*\n"
        text, n_found = re.subn(line, edit, text)
        if n_found != 1:
            raise BuildError(
                f"{lists} names the module {name} {n_found} times, not once; see packaging/native_wheel.py"
            )
    lists.write_text(text, encoding="utf-8")


def licences(source: Path) -> dict[str, bytes]:
    """Those of what llama-cpp-python, whose own is in the wheel already, contains: where they go, and what they say."""
    llama = source / "vendor" / "llama.cpp"
    found = {"llama.cpp": llama / "LICENSE"}
    found |= {path.name.removeprefix("LICENSE-"): path for path in sorted((llama / "licenses").glob("LICENSE-*"))}
    found |= {path.parent.name: path for path in sorted((llama / "vendor" / "hash").rglob("LICENSE*"))}
    folder = f"llama_cpp_python-{VERSION}.dist-info/licenses"
    return {f"{folder}/{name}.txt": path.read_bytes() for name, path in found.items()}


def is_wanted(path: str) -> bool:
    """The bindings and each library once; no type of header, archive or program."""
    if path.startswith(LIBRARIES):
        return path.endswith(".so")
    return path.startswith("llama_cpp/") or ".dist-info/" in path


def platform_tag(libraries: list[Path], processor: str) -> str:
    """The tag of the oldest glibc that has all that the libraries ask for. Raises BuildError if they ask for more."""
    needed = OLDEST_GLIBC
    names = {path.name for path in libraries}
    for path in libraries:
        text = subprocess.run(["readelf", "-dVW", str(path)], capture_output=True, text=True, check=True).stdout
        foreign = set(re.findall(r"\(NEEDED\).*\[(.+)\]", text)) - names - SYSTEM_LIBRARIES
        foreign = {name for name in foreign if not name.startswith("ld-linux")}
        if foreign:
            raise BuildError(f"{path.name} needs {', '.join(sorted(foreign))}, which is not on every system")
        if re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.+)\]", text) != ["$ORIGIN"]:
            raise BuildError(f"{path.name} does not look for the other libraries beside itself")
        versions = re.findall(r"Name: GLIBC_(\d+)\.(\d+)", text)
        needed = max([needed, *((int(major), int(minor)) for major, minor in versions)])
        cxx = max([0, *map(int, re.findall(r"Name: GLIBCXX_3\.4\.(\d+)", text))])
        # Beyond the table: a system as new as this one.
        needed = max(needed, next((glibc for glibc, newest in GLIBCXX.items() if cxx <= newest), _own_glibc()))
    return f"py3-none-manylinux_{needed[0]}_{needed[1]}_{processor}"


def _own_glibc() -> tuple[int, int]:
    major, minor = platform.libc_ver()[1].split(".")[:2]
    return int(major), int(minor)


def make(out: Path, source: Path | None, machine: Machine) -> Path:
    """Compile, and put the wheel into the folder. Raises BuildError."""
    if machine.system != "Linux":
        raise BuildError("wheels with all variants are made on Linux; here: python3 -m localrun.native_build wheel")
    plan = make_portable_plan(machine)
    if plan.problems:
        raise BuildError("\n".join(plan.problems))
    with tempfile.TemporaryDirectory(prefix="localrun-wheel-") as name:
        work = Path(name)
        for part in ("source", "made", "libraries"):
            (work / part).mkdir()
        python = builder(sys.executable, work)
        unpacked = unpack_source(python, work / "source", source)
        for name, why in plan.unsound_modules.items():
            tell(f"the module {name} is left out: {why}")
        edit_variants(unpacked / "vendor" / "llama.cpp" / "ggml", leave_out=tuple(plan.unsound_modules))
        environ = plan.environment(machine.environ, write_hook(plan, work))
        log = Path(tempfile.gettempdir(), "localrun-wheel.log")
        made = compile_wheel(environ, work / "made", python, str(unpacked), log=log)
        libraries = extract(made, work / "libraries")
        modules = sorted(path.name for path in libraries if path.name.startswith("libggml-cpu-"))
        if not modules or not any(path.name == MEDIA_LIBRARY for path in libraries):
            raise BuildError(f"the wheel lacks CPU backends or {MEDIA_LIBRARY}: its install rules have changed")
        key = hashlib.sha256(b"".join(path.read_bytes() for path in libraries)).hexdigest()[:24]
        record = {"version": VERSION, "backend": "cpu", "portable": True, "modules": modules, "key": key}
        add = licences(unpacked) | {RECORD: json.dumps(record, indent=1).encode()}
        out.mkdir(parents=True, exist_ok=True)
        return rewrite_wheel(made, out, keep=is_wanted, add=add, tag=platform_tag(libraries, machine.processor))


def extract(wheel: Path, folder: Path) -> list[Path]:
    """The libraries that go into the wheel, as files."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(LIBRARIES) and is_wanted(name)]
        for name in names:
            (folder / Path(name).name).write_bytes(archive.read(name))
    return sorted(folder.iterdir())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "wheels", help="where the wheel goes")
    parser.add_argument("--source", type=Path, help="the source package of llama-cpp-python; else it is downloaded")
    args = parser.parse_args()
    try:
        wheel = make(args.out, args.source, Machine())
    except (BuildError, OSError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 1
    print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
