"""Devices without a GPU: llama.cpp's RPC backend on loopback. To llama.cpp each server is a GPU of its own.

The backend is two C++ files of the source package, compiled here in seconds and kept beside that source, by version.
A server serves one connection at a time, but an engine and the process that lists devices may both be connected; so a
front gives every connection a server of its own.

    python -m tests.devices.rpc LIBRARY PORT    is such a front
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localrun.errors import LocalrunError
from tests.script_module import module_of

peer_build = module_of(Path(__file__).parents[2] / "packaging" / "bench" / "peer_build.py")

GROUPS = "LOCALRUN_TEST_GROUPS"
SITE = Path(__file__).parent / "site"
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-DGGML_BACKEND_DL", "-DGGML_BACKEND_BUILD", "-DGGML_BACKEND_SHARED",
          "-DGGML_SHARED")  # fmt: skip


class CannotBuild(Exception):
    """There is no compiler, or no source; the message says which."""


def library() -> Path:
    """`libggml-rpc.so` for the installed llama.cpp. Raises CannotBuild."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise CannotBuild("there is no C++ compiler")
    if sys.platform != "linux":
        raise CannotBuild("the devices of the tests are for Linux")
    folder = peer_build.build_folder()
    built = folder / "rpc" / "libggml-rpc.so"
    built.parent.mkdir(parents=True, exist_ok=True)
    if built.is_file():
        return built
    try:
        ggml = peer_build.llama_cpp_source(folder, lambda _: None) / "ggml"
    except LocalrunError as error:
        raise CannotBuild(str(error)) from error
    partial = built.with_suffix(f".{os.getpid()}")
    sources = [ggml / "src/ggml-rpc" / name for name in ("ggml-rpc.cpp", "transport.cpp")]
    command = [compiler, *_FLAGS, f"-I{ggml / 'include'}", f"-I{ggml / 'src'}", *map(str, sources)]
    command += ["-o", str(partial), f"-L{_installed()}", "-lggml-base", "-lggml"]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise CannotBuild(f"the RPC backend does not compile: {ran.stderr[-500:]}")
    return partial.rename(built)


def _installed() -> Path:
    """The folder of the installed libraries."""
    import llama_cpp.llama_cpp as bindings

    return Path(bindings._lib._name).parent


@contextlib.contextmanager
def beside_installed(backend: Path) -> Iterator[dict[str, str]]:
    """The environment of a build that has this backend's library beside the installed ones."""
    with tempfile.TemporaryDirectory() as folder:
        for path in (*_installed().glob("lib*.so*"), backend):
            Path(folder, path.name).symlink_to(path.resolve())
        yield {"PYTHONPATH": str(SITE), "LLAMA_CPP_LIB_PATH": folder}


@contextlib.contextmanager
def devices(n_devices: int) -> Iterator[dict[str, str]]:
    """So many devices on loopback: the environment of a daemon that has them. Raises CannotBuild."""
    path = library()
    ports = [_free_port() for _ in range(n_devices)]
    fronts = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.devices.rpc", str(path), str(port)],
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )
        for port in ports
    ]
    groups = {GROUPS: " ".join(str(front.pid) for front in fronts)}
    try:
        for port in ports:
            _connected(port).close()
        endpoints = ",".join(f"127.0.0.1:{port}" for port in ports)
        with beside_installed(path) as environment:
            yield environment | groups | {"LOCALRUN_TEST_RPC": f"{path}={endpoints}"}
    finally:
        lose(groups)
        for front in fronts:
            front.wait()


def lose(environment: dict[str, str]) -> None:
    """Ends the devices of this environment, for good."""
    for group in environment[GROUPS].split():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(group), signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _connected(port: int) -> socket.socket:
    for _ in range(600):
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port))
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens on port {port}")


def _front(path: str, port: int) -> None:
    import llama_cpp.llama_cpp as bindings

    library: Any = bindings._lib
    library.ggml_backend_reg_count()
    rpc = ctypes.CDLL(path)
    listening = socket.create_server(("127.0.0.1", port), backlog=64)
    while True:
        client, _ = listening.accept()
        own_port = _free_port()
        pid = os.fork()  # nothing was computed here yet, so no thread is lost
        if not pid:
            listening.close()
            client.close()
            _serve(library, rpc, own_port)
            os._exit(1)
        threading.Thread(target=_pass_on, args=(client, own_port, pid), daemon=True).start()


def _serve(library: Any, rpc: Any, port: int) -> None:
    library.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    device = (ctypes.c_void_p * 1)(library.ggml_backend_dev_by_type(0))
    start = rpc.ggml_backend_rpc_start_server
    start.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    ]
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    start(f"127.0.0.1:{port}".encode(), None, 1, 1, device)


def _pass_on(client: socket.socket, port: int, pid: int) -> None:
    try:
        server = _connected(port)
        for side in (client, server):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_pump, args=(server, client), daemon=True)
        back.start()
        _pump(client, server)
        back.join()
    finally:
        client.close()
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 20):
            target.sendall(data)
    for side in (source, target):
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    _front(sys.argv[1], int(sys.argv[2]))
