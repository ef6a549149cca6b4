"""`packaging/native_wheel.py`: what goes into the wheel, and a wheel that is there on processors that are not.

LOCALRUN_TEST_WHEEL names a wheel, or a folder with one, as `make native-wheel` makes it. The emulated processors take
about 20 seconds on two cores.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from localrun.native_build.plan import VERSION
from localrun.native_build.wheels import RECORD, BuildError
from tests.packaging.machine import PACKAGING, ROOT
from tests.script_module import module_of

TINY = ROOT / "models" / "builtin" / "tiny.gguf"
MB = 1_000_000
# Processors that qemu can be, and the module that suits each best. qemu has AVX2, but no AVX-512.
EMULATED = {"qemu64": "x64", "Nehalem": "sse42", "SandyBridge": "sandybridge", "IvyBridge": "ivybridge",
            "Haswell": "haswell", "EPYC": "haswell"}  # fmt: skip


@pytest.fixture(scope="module")
def native_wheel() -> ModuleType:
    return module_of(PACKAGING / "native_wheel.py")


@pytest.fixture(scope="module")
def wheel() -> Path:
    named = Path(os.environ.get("LOCALRUN_TEST_WHEEL", "/none"))
    found = sorted(named.glob("llama_cpp_python-*.whl")) if named.is_dir() else [named]
    if not found or not found[-1].is_file():
        pytest.skip("LOCALRUN_TEST_WHEEL names no wheel; `make native-wheel` makes one")
    return found[-1]


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def decoded(folder: Path, *emulator: str) -> dict[str, Any]:
    command = [*emulator, os.path.realpath(sys.executable), str(PACKAGING / "decode_few.py"), str(TINY)]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


# --- Making one ---


def test_each_library_goes_in_once_and_without_what_only_compilers_need(native_wheel: ModuleType):
    wanted = ("llama_cpp/lib/libllama.so", "llama_cpp/lib/libggml-cpu-zen4.so", "llama_cpp/lib/libmtmd.so",
              "llama_cpp/llama_cpp.py", "llama_cpp_python-1.dist-info/METADATA")  # fmt: skip
    unwanted = ("lib/libllama.so", "include/llama.h", "bin/convert.py", "llama_cpp/lib/libllama.so.0",
                "llama_cpp/lib/libggml.so.0.25.3", "lib/cmake/ggml/ggml-config.cmake")  # fmt: skip
    assert [path for path in (*wanted, *unwanted) if native_wheel.is_wanted(path)] == list(wanted)


def test_modules_that_a_compiler_cannot_make_are_left_out_and_one_is_added(native_wheel: ModuleType, tmp_path: Path):
    lists = tmp_path / "src" / "CMakeLists.txt"
    lists.parent.mkdir(parents=True)
    lines = [
        f"        ggml_add_cpu_backend_variant({name} AVX2 FMA)\n" for name in ("zen4", "sapphirerapids", "armv8.6_1")
    ]
    lists.write_text("".join(lines))
    native_wheel.edit_variants(tmp_path, leave_out=("sapphirerapids",))
    added = "        ggml_add_cpu_backend_variant(armv8.6_0    DOTPROD FP16_VECTOR_ARITHMETIC MATMUL_INT8)\n"
    assert lists.read_text() == lines[0] + lines[2] + added
    with pytest.raises(BuildError, match="0 times"):
        native_wheel.edit_variants(tmp_path, leave_out=("sapphirerapids",))
    lists.write_text("".join(lines))
    native_wheel.edit_variants(tmp_path, leave_out=("armv8.6_0", "armv8.6_1"))
    assert lists.read_text() == lines[0] + lines[1]


@pytest.mark.skipif(shutil.which("readelf") is None or sys.platform != "linux", reason="needs binutils and ELF")
def test_a_library_that_needs_what_not_every_system_has_is_refused(native_wheel: ModuleType, tmp_path: Path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    alone, tied, lost = (tmp_path / f"lib{name}.so" for name in ("alone", "tied", "lost"))
    shared = [compiler, "-shared", "-fPIC", "-x", "c", os.devnull, "-Wl,--no-as-needed"]
    here = "-Wl,--enable-new-dtags,-rpath,$ORIGIN"
    subprocess.run([*shared, here, f"-Wl,-soname,{alone.name}", "-o", alone], check=True)
    subprocess.run([*shared, here, "-o", tied, "-x", "none", alone], check=True)
    subprocess.run([*shared, "-o", lost], check=True)
    tag = native_wheel.platform_tag([alone, tied], "x86_64")
    assert re.fullmatch(r"py3-none-manylinux_2_\d+_x86_64", tag)
    with pytest.raises(BuildError, match=r"libtied.so needs libalone.so"):
        native_wheel.platform_tag([tied], "x86_64")
    with pytest.raises(BuildError, match=r"liblost.so does not look"):
        native_wheel.platform_tag([lost], "x86_64")


# --- One that is there ---


def test_a_wheel_says_truly_what_is_in_it(wheel: Path):
    assert wheel.name.startswith(f"llama_cpp_python-{VERSION}-py3-none-manylinux_")
    assert wheel.stat().st_size < 12 * MB
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        assert len(names) == len(set(names))
        info = next(name.partition("/")[0] for name in names if name.endswith("/RECORD"))
        lines = list(csv.reader(archive.read(f"{info}/RECORD").decode().splitlines()))
        assert sorted(line[0] for line in lines) == sorted(names)
        for name, digest, size in lines:
            if name != f"{info}/RECORD":
                data = archive.read(name)
                expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                assert (digest, int(size)) == (f"sha256={expected}", len(data))
        tag = "-".join(wheel.stem.split("-")[2:])
        assert f"Tag: {tag}" in archive.read(f"{info}/WHEEL").decode().splitlines()
        assert b"MIT License" in archive.read(f"{info}/licenses/llama.cpp.txt")
        record = json.loads(archive.read(RECORD))
    modules = sorted(Path(name).name for name in names if name.startswith("llama_cpp/lib/libggml-cpu-"))
    assert record["modules"] == modules
    assert record["portable"]
    assert "llama_cpp/lib/libmtmd.so" in names
    assert not [name for name in names if name.endswith(".h") or name.startswith(("lib/", "include/", "bin/"))]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="the modules are those for x86")
def test_every_processor_gets_its_module_and_the_same_tokens(unpacked: Path):
    emulator = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if emulator is None:
        pytest.skip("needs qemu-user")
    here = decoded(unpacked)
    assert here["module"]
    assert len(set(here["tokens"])) > 3
    for processor, module in EMULATED.items():
        assert decoded(unpacked, emulator, "-cpu", processor) == {"module": module, "tokens": here["tokens"]}, processor
