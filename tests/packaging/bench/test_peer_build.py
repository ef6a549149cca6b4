"""With a pip and a cmake that write down how they are called, and do what the real ones would as far as it matters."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import sys
import tarfile
from pathlib import Path

import pytest

from bench import peer_build
from bench.peer_build import build_folder, build_llama_server, percent_done, run_logged
from localrun.errors import LocalrunError
from localrun.native_build.plan import Plan

VERSION = importlib.metadata.version("llama-cpp-python")
PACKAGE = f"llama_cpp_python-{VERSION}"

FAKE_PIP = """
import json, os, pathlib, shutil, sys
pathlib.Path(os.environ["CALLS"]).open("a").write(json.dumps(["pip", *sys.argv[1:]]) + "\\n")
if not os.environ["SDIST"]:
    sys.exit("no matching distribution")
dest = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
dest.mkdir()
shutil.copy(os.environ["SDIST"], dest)
"""

FAKE_CMAKE = """
import json, os, pathlib, sys
pathlib.Path(os.environ["CALLS"]).open("a").write(json.dumps(["cmake", *sys.argv[1:]]) + "\\n")
if "--build" in sys.argv:
    for percent in (4, 11, 57, 100):
        print(f"[{percent:3}%] Building")
    if os.environ.get("CMAKE_FAILS"):
        print("internal compiler error")
        sys.exit(2)
    bin = pathlib.Path(sys.argv[sys.argv.index("--build") + 1], "bin")
    bin.mkdir(parents=True)
    (bin / "llama-server").touch()
elif not pathlib.Path(sys.argv[sys.argv.index("-S") + 1], "CMakeLists.txt").is_file():
    sys.exit("no CMakeLists.txt")
"""


def sdist(folder: Path, *members: str) -> Path:
    path = folder / f"{PACKAGE}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            info = tarfile.TarInfo(f"{PACKAGE}/{member}")
            info.size = len(member)
            archive.addfile(info, io.BytesIO(member.encode()))
    return path


class Bench:
    """Where the build happens, and what was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "peer"
        self.tools = folder / "tools"
        self.progress: list[str] = []
        self._calls = folder / "calls"

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()] if self._calls.exists() else []

    def build(self) -> Path:
        return build_llama_server(self.folder, self.progress.append)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench(tmp_path)
    bench.tools.mkdir()
    for name, program in {"cmake": FAKE_CMAKE, "c++": ""}.items():
        (bench.tools / name).write_text(f"#!{sys.executable}\n{program}")
        (bench.tools / name).chmod(0o755)
    pip = tmp_path / "modules" / "pip"
    pip.mkdir(parents=True)
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text(FAKE_PIP)
    package = sdist(tmp_path, "README.md", "vendor/llama.cpp/CMakeLists.txt", "vendor/llama.cpp/src/llama.cpp")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    os.symlink(os.path.realpath(sys._base_executable), tmp_path / "python")  # type: ignore[attr-defined]
    for name, value in {"PATH": str(bench.tools), "PYTHONPATH": str(pip.parent), "SDIST": str(package)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "3")
    for name in ("CXX", "CMAKE_ARGS", "CMAKE_FAILS"):
        monkeypatch.delenv(name, raising=False)
    return bench


def test_the_source_package_of_the_installed_version_is_fetched_unpacked_configured_and_compiled(bench: Bench):
    built = bench.build()
    assert built == bench.folder / "build" / "bin" / "llama-server"
    assert built.is_file()
    pip, configure, compile_ = bench.calls
    assert pip[:2] == ["pip", "download"]
    assert {"--no-deps", "--no-binary", ":all:", f"llama-cpp-python=={VERSION}"} <= set(pip)
    assert configure[1:5] == ["-S", str(bench.folder / "source"), "-B", str(bench.folder / "build")]
    expected = ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "LLAMA_BUILD_UI=OFF", "LLAMA_BUILD_TESTS=OFF"]
    assert {f"-D{flag}" for flag in expected} <= set(configure)
    assert compile_[1:3] == ["--build", str(bench.folder / "build")]
    assert compile_[-4:] == ["--target", "llama-server", "--parallel", "3"]
    assert (bench.folder / "source" / "src" / "llama.cpp").is_file()
    assert not (bench.folder / "source" / "README.md").exists()


def test_what_the_compiler_makes_wrongly_is_left_out_as_in_the_package_s_own_build(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    plan = Plan(backend="cpu", flags={"-mno-amx-int8": "crashes"})
    monkeypatch.setattr(peer_build, "make_plan", lambda machine: plan)
    monkeypatch.setenv("CFLAGS", "-pipe")
    monkeypatch.delenv("CXXFLAGS", raising=False)
    bench.build()
    assert {"-DCMAKE_C_FLAGS=-pipe -mno-amx-int8", "-DCMAKE_CXX_FLAGS=-mno-amx-int8"} <= set(bench.calls[1])


def test_progress_is_told_from_step_to_step_and_every_tenth_of_the_build(bench: Bench):
    bench.build()
    assert [line.split()[0] for line in bench.progress] == [
        "fetching", "unpacking", "configuring", "compiling", "11", "57", "100",
    ]  # fmt: skip
    assert "[ 57%] Building" in (bench.folder / "build.log").read_text()


def test_what_is_built_is_not_built_again(bench: Bench):
    first = bench.build()
    n_calls = len(bench.calls)
    assert bench.build() == first
    assert len(bench.calls) == n_calls


def test_a_build_that_failed_says_why_and_goes_on_where_it_stopped(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CMAKE_FAILS", "1")
    with pytest.raises(LocalrunError, match=r"(?s)status 2.*internal compiler error"):
        bench.build()
    monkeypatch.delenv("CMAKE_FAILS")
    assert bench.build().is_file()
    assert [call[0] for call in bench.calls] == ["pip", "cmake", "cmake", "cmake", "cmake"]


def test_an_executable_of_a_build_that_did_not_end_is_not_trusted(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    half = bench.folder / "build" / "bin" / "llama-server"
    half.parent.mkdir(parents=True)
    half.touch()
    monkeypatch.setenv("CMAKE_FAILS", "1")
    with pytest.raises(LocalrunError):
        bench.build()


def test_a_package_that_lies_there_is_used(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    bench.folder.mkdir()
    os.rename(os.environ["SDIST"], bench.folder / f"{PACKAGE}.tar.gz")
    monkeypatch.setenv("SDIST", "")
    assert bench.build().is_file()
    assert "pip" not in {call[0] for call in bench.calls}


def test_without_a_package_the_error_says_what_to_do(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SDIST", "")
    with pytest.raises(LocalrunError, match="no matching distribution") as failed:
        bench.build()
    for way_out in ("network", f"{PACKAGE}.tar.gz", str(bench.folder), "--server PATH"):
        assert way_out in failed.value.message


@pytest.mark.parametrize(("tool", "said"), [("cmake", "needs cmake"), ("c++", r"needs a C\+\+ compiler")])
def test_a_missing_tool_is_named_before_anything_is_fetched(bench: Bench, tool: str, said: str):
    (bench.tools / tool).unlink()
    with pytest.raises(LocalrunError, match=said):
        bench.build()
    assert bench.calls == []


@pytest.mark.parametrize("name", ["../../../../escaped", "../../escaped"])
def test_a_package_that_would_write_elsewhere_is_refused(bench: Bench, name: str, tmp_path: Path):
    sdist(tmp_path, "vendor/llama.cpp/CMakeLists.txt", f"vendor/llama.cpp/{name}")
    with pytest.raises(LocalrunError, match="cannot be unpacked"):
        bench.build()
    assert list(tmp_path.rglob("escaped")) == []
    assert not (bench.folder / "source").exists()


def test_a_link_that_leads_outside_is_refused(bench: Bench, tmp_path: Path):
    with tarfile.open(tmp_path / f"{PACKAGE}.tar.gz", "w:gz") as archive:
        link = tarfile.TarInfo(f"{PACKAGE}/vendor/llama.cpp/CMakeLists.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(LocalrunError, match="cannot be unpacked"):
        bench.build()


def test_a_package_without_the_source_is_refused(bench: Bench, tmp_path: Path):
    sdist(tmp_path, "README.md")
    with pytest.raises(LocalrunError, match="holds no llama"):
        bench.build()


def test_a_damaged_package_is_refused(bench: Bench, tmp_path: Path):
    names = [f"vendor/llama.cpp/{os.urandom(16).hex()}" for _ in range(500)]
    path = sdist(tmp_path, "vendor/llama.cpp/CMakeLists.txt", *names)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(LocalrunError, match="remove it and try again"):
        bench.build()


def test_it_is_built_as_the_installed_package_was(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    libraries = tmp_path / "installed" / "llama_cpp" / "lib"
    libraries.mkdir(parents=True)
    (libraries.parent / "__init__.py").touch()
    for name in ("libggml-base.so", "libggml-cpu.so", "libggml-cuda.so", "libllama.so"):
        (libraries / name).touch()
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.syspath_prepend(libraries.parents[1])
    monkeypatch.setenv("CMAKE_ARGS", "-DCMAKE_CUDA_ARCHITECTURES=90 -DGGML_LTO=ON")
    bench.build()
    configure = bench.calls[1]
    assert configure[-3:] == ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90", "-DGGML_LTO=ON"]
    assert not any("VULKAN" in flag or "METAL" in flag for flag in configure)


def test_the_folder_is_in_the_cache_and_named_after_the_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path))
    assert build_folder() == tmp_path / "cache" / "peer" / VERSION


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        ("[  0%] Building C object a.o", 0), ("[ 57%] Linking", 57), ("[100%] Built target", 100),
        ("[12/48] Building", 25), ("[48/48] Linking", 100), ("[0/0] Re-checking", 0),
        ("-- Configuring done", None), ("warning: [57%]", None), ("", None),
    ],
)  # fmt: skip
def test_how_far_a_build_is(line: str, percent: int | None):
    assert percent_done(line) == percent


def run(program: str, log: Path) -> str:
    return run_logged([sys.executable, "-c", program], log, lambda _: None)


def test_all_output_is_in_the_log_and_a_second_command_adds_to_it(tmp_path: Path):
    log = tmp_path / "log"
    assert run("import sys; print('out'); print('err', file=sys.stderr)", log) == ""
    assert run("print('again')", log) == ""
    assert sorted(log.read_text().split()) == ["again", "err", "out"]


def test_a_failure_has_its_status_and_the_end_of_its_own_output(tmp_path: Path):
    run("print('of another command')", tmp_path / "log")
    failed = run("for n in range(100): print('line', n)\nraise SystemExit(7)", tmp_path / "log")
    assert failed.startswith("status 7; ")
    assert failed.endswith("line 99")
    assert "line 50" not in failed
    assert "another command" not in failed


def test_a_command_that_does_not_exist_is_a_failure(tmp_path: Path):
    assert "nowhere cannot be started" in run_logged(["/nowhere"], tmp_path / "log", lambda _: None)
