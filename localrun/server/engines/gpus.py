"""Which GPUs the engines' build of llama.cpp sees, and what is free on them.

Runs in the daemon, which never loads the native library itself: a short-lived process of the engine's asks it. Without
a GPU library beside llama.cpp's others nobody is asked, and there are none.

Does not: decide what goes there (`models.fit`). Never run with a GPU present.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from localrun.models.fit import Gpu

REPORT_TIMEOUT_S = 20.0

# Names of ggml's backend libraries that bring a GPU.
_GPU_LIBRARIES = ("ggml-cuda", "ggml-metal", "ggml-vulkan", "ggml-hip", "ggml-sycl", "ggml-musa", "ggml-opencl")
_COMMAND = (sys.executable, "-P", "-m", "localrun.engine.tools.build_report", "--gpus")
_log = logging.getLogger(__name__)


def has_gpu_library(package: Path | None = None) -> bool:
    """Whether llama.cpp was installed with a GPU's library; `package` is its Python package's folder."""
    folder = package or _package()
    return folder is not None and any(
        name in file.name for file in (folder / "lib").glob("*ggml-*") for name in _GPU_LIBRARIES
    )


async def gpus(command: Sequence[str] = _COMMAND) -> tuple[Gpu, ...]:
    """The GPUs with their free memory at this moment; none when they cannot be asked, which is logged."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        report, _ = await asyncio.wait_for(process.communicate(), REPORT_TIMEOUT_S)
        return tuple(msgspec.json.decode(report, type=list[Gpu]))
    except (TimeoutError, msgspec.DecodeError) as error:
        _log.warning("the GPUs cannot be asked for their memory: %r", error)
        return ()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def installed_gpus() -> tuple[Gpu, ...]:
    """`gpus`, where the build can use any."""
    return await gpus() if has_gpu_library() else ()


def _package() -> Path | None:
    found = importlib.util.find_spec("llama_cpp")
    return Path(found.origin).parent if found and found.origin else None
