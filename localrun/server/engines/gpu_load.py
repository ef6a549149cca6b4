"""How busy the NVIDIA GPUs are and what lies in their memory, for the snapshot's system row.

Asked through NVML, when `nvidia-ml-py` is installed (the extra `nvidia`) and a driver answers; without either there is
nothing to show. Called in the sampler's thread, once a second at most.

Does not: say what llama.cpp can use (`gpus.py` asks its own build). Never run with a GPU present; its calls are those
of NVML's documentation.
"""

from __future__ import annotations

import logging
from typing import Any

from localrun.snapshot import GpuRow

_log = logging.getLogger(__name__)


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
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
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
