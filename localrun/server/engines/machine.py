"""What this machine has: a llama.cpp, memory to load models into, GPUs, and the figures of the snapshot's system row.

Runs in the daemon. `MachineSampler` asks the system at most once in `SAMPLE_EVERY_S`, in a thread, and only when
somebody looks; `available_bytes` is a cheap read for the moment of loading. A short-lived process of the engine's says
which GPUs llama.cpp can use, since the daemon never loads the native library itself. NVML says how busy they are, where
`nvidia-ml-py` is installed (the extra `nvidia`) and a driver answers. Neither was ever run with a GPU present.
Does not: decide what fits (placement.py).
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

from localrun import __version__
from localrun.errors import DeviceLost
from localrun.hardware.memory import machine_memory
from localrun.models.fit import Gpu
from localrun.processes import HIDDEN, end_child, end_in_words, last_words
from localrun.snapshot import GpuRow, SystemRow

# Drivers take seconds for their first start, and a machine may be busy.
REPORT_TIMEOUT_S = 60.0

# Names of ggml's backend libraries that bring a GPU.
_GPU_LIBRARIES = (
    *("ggml-cuda", "ggml-metal", "ggml-vulkan", "ggml-hip", "ggml-sycl", "ggml-musa", "ggml-opencl", "ggml-rpc"),
)
_COMMAND = (sys.executable, "-P", "-m", "localrun.engine.tools.tasks", "build_report", "--gpus")
_log = logging.getLogger(__name__)


@cache
def llama_cpp_version() -> str:
    """Of the bindings, which is all that is known of the library without loading it; empty if that is nothing."""
    try:
        return metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        return ""


@cache
def build_name() -> str:
    """Begins with `b` as llama-server's does. It is another one wherever the same seed may give another answer, which
    is what OpenAI's clients read `system_fingerprint` for."""
    return f"b{llama_cpp_version()}-localrun-{__version__}"


def has_gpu_library(package: Path | None = None) -> bool:
    """Whether llama.cpp was installed with a GPU's library; `package` is its Python package's folder. Like that package
    this looks into `LLAMA_CPP_LIB_PATH` instead, if that is set."""
    own, folder = os.environ.get("LLAMA_CPP_LIB_PATH"), package or _package()
    libraries = Path(own) if own else folder / "lib" if folder is not None else None
    return libraries is not None and any(
        name in file.name for file in libraries.glob("*ggml-*") for name in _GPU_LIBRARIES
    )


async def gpus(command: Sequence[str] = _COMMAND, timeout_s: float = REPORT_TIMEOUT_S) -> tuple[Gpu, ...]:
    """The GPUs with their free memory at this moment. Raises DeviceLost where they cannot be asked."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        **HIDDEN,
    )  # fmt: skip
    said = b""
    try:
        report, said = await asyncio.wait_for(process.communicate(), timeout_s)
        return tuple(msgspec.json.decode(report, type=list[Gpu]))
    except TimeoutError:
        how = f"did not answer within {timeout_s:g} seconds"
    except msgspec.DecodeError:
        how = end_in_words(process.returncode) + last_words(said.decode(errors="replace"))
    finally:
        await end_child(process)
    raise DeviceLost(f"the process that lists the GPUs {how}")


async def installed_gpus() -> tuple[Gpu, ...]:
    """`gpus`, where the build can use any. Raises DeviceLost."""
    return await gpus() if has_gpu_library() else ()


async def answering_gpus() -> tuple[Gpu, ...]:
    """The same for those who only want to know what there is: none where they cannot be asked, which is logged."""
    try:
        return await installed_gpus()
    except DeviceLost as error:
        _log.warning("%s", error.message)
        return ()


def _package() -> Path | None:
    found = importlib.util.find_spec("llama_cpp")
    return Path(found.origin).parent if found and found.origin else None


class GpuLoad:
    """NVML is started by the first look, and never asked again once it was not there."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._is_known = False

    def rows(self) -> list[GpuRow]:
        """One row for each GPU, in the driver's order; none where there is nobody to ask."""
        if not self._is_known:
            self._is_known = True
            self._nvml = _started()
        if self._nvml is None:
            return []
        try:
            return [self._row(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        except self._nvml.NVMLError as error:
            _log.warning("the GPUs are no longer shown, because NVML failed: %s", error)
            self._nvml = None
            return []

    def _row(self, index: int) -> GpuRow:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._nvml.NVMLError_NotSupported:  # a GPU without memory of its own, as in DGX Spark and in Jetsons
            memory = psutil.virtual_memory()
        name = self._nvml.nvmlDeviceGetName(handle)
        return GpuRow(
            name=name.decode() if isinstance(name, bytes) else str(name),
            busy_percent=float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.total),
        )


def _started() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


SAMPLE_EVERY_S = 1.0


def oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """How many processes the kernel has killed for memory since it started; None where it does not say."""
    try:
        counts = dict(line.split() for line in vmstat.read_text("ascii").splitlines())
        return int(counts["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def private_bytes(pid: int) -> int:
    """Memory of a process that is not backed by a file: what it would give back by ending, mapped weights left out. A
    Mac counts what is mapped and in use as available only when the process has ended, hence with them there."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    private: int = getattr(memory, "private", memory.rss - getattr(memory, "shared", 0))
    return max(0, private)


class MachineSample(NamedTuple):
    """One look at the machine and at the processes of interest."""

    system: SystemRow
    rss_by_pid: dict[int, int]
    asked_pids: frozenset[int]
    taken_at_s: float

    def covers(self, pids: frozenset[int], now_s: float) -> bool:
        """Whether it is recent enough, and looked at these processes."""
        return now_s - self.taken_at_s < SAMPLE_EVERY_S and pids <= self.asked_pids


class MachineSampler:
    """Shares one sample among all who look within a second."""

    def __init__(self) -> None:
        self._cores = psutil.cpu_count() or 1
        self._gpu_load = GpuLoad()
        self._sample: MachineSample | None = None
        self._sampling: asyncio.Future[MachineSample] | None = None
        self.n_samples = 0

    async def sample(self, pids: Iterable[int]) -> MachineSample:
        """The current sample; a new one if the last is too old or did not look at `pids`, the processes of interest."""
        wanted = frozenset(pids)
        if self._sample is not None and self._sample.covers(wanted, time.monotonic()):
            return self._sample
        if self._sampling is None or self._sampling.done():
            self._sampling = asyncio.ensure_future(asyncio.to_thread(self._take, wanted))
        self._sample = await asyncio.shield(self._sampling)
        return self._sample

    def _take(self, pids: frozenset[int]) -> MachineSample:
        self.n_samples += 1
        memory = machine_memory()
        system = SystemRow(
            cpu_percent=_cpu_percent(),
            memory_total_bytes=memory.total_bytes,
            memory_available_bytes=memory.available_bytes,
            daemon_rss_bytes=rss_bytes(os.getpid()) or 0,
            cores=self._cores,
            gpus=self._gpu_load.rows(),
        )
        rss = {pid: size for pid in pids if (size := rss_bytes(pid)) is not None}
        return MachineSample(system, rss, pids, time.monotonic())


def _cpu_percent() -> float:
    try:
        percent: float = psutil.cpu_percent()
    except OSError:  # hidden, as on Android
        return 0.0
    return percent


def rss_bytes(pid: int) -> int | None:
    """What a process has in RAM; None when it is gone."""
    try:
        rss: int = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return None
    return rss
