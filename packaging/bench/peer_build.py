"""Builds llama-server from the llama.cpp source inside the installed version's llama-cpp-python source package.

So both sides of a comparison have the same kernels: the same source, Release, native processor flags, and the GPU
backends that the installed package has. Everything lies in `<cache folder>/peer/<version>`: the package, the source,
the build tree, the logs. A step is skipped when its product is there, and a build that was cut short is taken up where
it stopped. `pip` does the download, with the user's own settings of where packages come from.

Does not: run the server (`servers.py`), or change anything outside of its folder.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from localrun import config
from localrun.errors import LocalrunError
from localrun.native_build.machine import Machine
from localrun.native_build.plan import make_plan

PACKAGE = "llama-cpp-python"
_SOURCE_IN_PACKAGE = ("vendor", "llama.cpp")
_OTHERWISE = "or name a llama-server that you have with --server PATH"

# Library in the installed package -> the switch that builds its backend.
_BACKENDS = {
    "blas": "GGML_BLAS", "cuda": "GGML_CUDA", "hip": "GGML_HIP", "metal": "GGML_METAL", "opencl": "GGML_OPENCL",
    "sycl": "GGML_SYCL", "vulkan": "GGML_VULKAN",
}  # fmt: skip

# The web page of the server would be fetched from the network during the build, and TLS is not spoken on loopback.
_CONFIGURATION = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
)  # fmt: skip

OnProgress = Callable[[str], None]


def build_folder() -> Path:
    """Where the server of the installed llama-cpp-python is built."""
    return config.folders().cache / "peer" / importlib.metadata.version(PACKAGE)


def build_llama_server(folder: Path, on_progress: OnProgress) -> Path:
    """The executable, built in `folder` if it is not there yet, by as many compilers at once as there are cores, or as
    CMAKE_BUILD_PARALLEL_LEVEL says.

    Raises LocalrunError that names the missing tool, or the step that failed with the end of the log.
    """
    done = folder / "built"
    if done.is_file() and (built := _executable(folder)) is not None:
        return built
    cmake = _cmake()
    folder.mkdir(parents=True, exist_ok=True)
    source = llama_cpp_source(folder, on_progress)
    log_path = folder / "build.log"
    on_progress(f"configuring llama.cpp, log in {log_path}")
    configure = [cmake, "-S", str(source), "-B", str(folder / "build")]
    configure += [*_CONFIGURATION, *_compiler_flags(), *_backend_flags()]
    _step("cmake could not configure llama.cpp", configure, log_path, on_progress)
    on_progress("compiling llama-server; this takes minutes")
    compile_ = [cmake, "--build", str(folder / "build"), "--config", "Release", "--target", "llama-server"]
    compile_ += ["--parallel", os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)]
    _step("llama-server could not be compiled", compile_, log_path, on_progress)
    built = _executable(folder)
    if built is None:
        raise LocalrunError(f"the build ended well but made no llama-server; the log is {log_path}")
    done.touch()
    return built


def llama_cpp_source(folder: Path, on_progress: OnProgress) -> Path:
    """The root of the llama.cpp source, downloaded and unpacked if need be. Raises LocalrunError if that fails."""
    source = folder / "source"
    if source.is_dir():
        return source
    package = _package(folder, on_progress)
    on_progress(f"unpacking llama.cpp from {package.name}")
    partial = folder / "source.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _unpack(package, partial)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise LocalrunError(f"{package} cannot be unpacked: {error}; remove it and try again") from error
    partial.rename(source)
    return source


def _unpack(package: Path, into: Path) -> None:
    """Only llama.cpp's own files, without the folders above it. tarfile's `data` filter refuses links and names that
    lead outside, devices, and odd permissions."""
    with tarfile.open(package, "r:gz") as archive:
        for member in archive:
            parts = Path(member.name).parts
            if parts[1:3] == _SOURCE_IN_PACKAGE and len(parts) > 3:
                archive.extract(member.replace(name=str(Path(*parts[3:]))), into, filter="data")
    if not (into / "CMakeLists.txt").is_file():
        raise LocalrunError(f"{package} holds no llama.cpp source; remove it and try again, {_OTHERWISE}")


def _package(folder: Path, on_progress: OnProgress) -> Path:
    """The source package; one that somebody has put into the folder by hand will do."""
    found = sorted(folder.glob("llama_cpp_python-*.tar.gz"))
    if found:
        return found[0]
    version = importlib.metadata.version(PACKAGE)
    on_progress(f"fetching the source package {PACKAGE} {version} with pip")
    partial = folder / "package.partial"
    shutil.rmtree(partial, ignore_errors=True)
    command = [*_pip(), "download", "--no-deps", "--no-binary", ":all:", "--dest", str(partial)]
    log_path = folder / "pip.log"
    failed = run_logged([*command, f"{PACKAGE}=={version}"], log_path, lambda _: None)
    fetched = sorted(partial.glob("llama_cpp_python-*.tar.gz"))
    if failed or not fetched:
        raise LocalrunError(
            f"pip could not fetch the source package of {PACKAGE} {version}: {failed or 'no package came'}; check the "
            f"network and pip's settings, or put llama_cpp_python-{version}.tar.gz into {folder}, {_OTHERWISE}"
        )
    return fetched[0].rename(folder / fetched[0].name)


def _step(what: str, command: list[str], log_path: Path, on_progress: OnProgress) -> None:
    failed = run_logged(command, log_path, on_progress)
    if failed:
        raise LocalrunError(f"{what}: {failed}")


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise LocalrunError(f"fetching llama.cpp's source needs pip, which is not installed; install it, {_OTHERWISE}")
    return [found]


def _cmake() -> str:
    """Beside this interpreter too, where `pip install cmake` puts it."""
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    cmake = shutil.which("cmake", path=places)
    if cmake is None:
        raise LocalrunError(f"building llama-server needs cmake, which is not installed; install it, {_OTHERWISE}")
    compilers = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    # On Windows cmake finds the compiler by itself, outside of PATH.
    if sys.platform != "win32" and not any(shutil.which(name) for name in compilers if name):
        raise LocalrunError(f"building llama-server needs a C++ compiler (g++ or clang++); install one, {_OTHERWISE}")
    return cmake


def _compiler_flags() -> list[str]:
    """What the package's own build tells the compiler, which may be wrong about a part of this processor."""
    flags = make_plan(Machine()).flags
    given = {"C": os.environ.get("CFLAGS", ""), "CXX": os.environ.get("CXXFLAGS", "")}
    return [f"-DCMAKE_{language}_FLAGS={' '.join([own, *flags]).strip()}" for language, own in given.items() if flags]


def _backend_flags() -> list[str]:
    """The backends that the installed package was built with, and what CMAKE_ARGS asks for, as its own build reads."""
    spec = importlib.util.find_spec("llama_cpp")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    libraries = " ".join(path.name for place in places for path in Path(place, "lib").glob("*ggml-*"))
    flags = [f"-D{switch}=ON" for backend, switch in _BACKENDS.items() if f"ggml-{backend}." in libraries]
    return flags + shlex.split(os.environ.get("CMAKE_ARGS", ""))


def _executable(folder: Path) -> Path | None:
    """Multi-configuration generators put it one folder deeper."""
    name = "llama-server.exe" if sys.platform == "win32" else "llama-server"
    places = [folder / "build" / "bin" / name, folder / "build" / "bin" / "Release" / name]
    return next((path for path in places if path.is_file()), None)


LOG_TAIL_LINES = 15

# `[ 12%] Building ...` of make, `[12/193] Building ...` of ninja.
_PROGRESS = re.compile(r"^\[\s*(?:(\d+)%|(\d+)/(\d+))\]")


def run_logged(command: list[str], log_path: Path, on_progress: Callable[[str], None]) -> str:
    """Empty when the command ended well; else what happened, with the end of its output.

    `on_progress` is called each time a build has got ten percent further. The output is appended to `log_path`.
    """
    tail: list[str] = []
    reported_percent = 0
    with log_path.open("a", encoding="utf-8") as log:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, encoding="utf-8", errors="replace",
            )  # fmt: skip
        except OSError as error:
            return f"{command[0]} cannot be started: {error}"
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                tail = [*tail, line.rstrip()][-LOG_TAIL_LINES:]
                percent = percent_done(line)
                if percent is not None and percent // 10 > reported_percent // 10:
                    reported_percent = percent
                    on_progress(f"{percent} % done")
    if process.returncode == 0:
        return ""
    shown = "".join(f"\n  {line}" for line in tail)
    return f"status {process.returncode}; the end of {log_path}:{shown}"


def percent_done(line: str) -> int | None:
    """How far a build is, by a line of its output; None for a line that does not say."""
    found = _PROGRESS.match(line)
    if found is None:
        return None
    percent, done, total = found.groups()
    return int(percent) if percent else 100 * int(done) // max(1, int(total))
