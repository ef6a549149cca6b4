"""GPU devices that this build of llama.cpp sees, and how many layers go there.

The Python bindings leave out the device functions of ggml; the libraries export them, so they are bound here.

Does not: import llama_cpp (`llama.py` hands over its library), or split layers over several GPUs by their sizes:
llama.cpp does that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

# Compute buffers, the CUDA context and other programs' surfaces come on top of weights and KV cells.
USABLE_FRACTION = 0.85
_INTEGRATED = 2  # GGML_BACKEND_DEVICE_TYPE_IGPU
_IS_GPU = (1, _INTEGRATED)


def gpu_free_bytes(library: ctypes.CDLL) -> int:
    """Free memory of all GPU devices together; 0 without one."""
    return sum(_memory(library, device)[0] for device, _ in _gpu_devices(library))


def gpus(library: ctypes.CDLL) -> list[tuple[str, int, bool, int]]:
    """Name, free bytes, whether it computes in the machine's own memory, and total bytes of each GPU device."""
    library.ggml_backend_dev_description.restype = ctypes.c_char_p
    library.ggml_backend_dev_description.argtypes = [ctypes.c_void_p]
    found = []
    for device, kind in _gpu_devices(library):
        free_bytes, total_bytes = _memory(library, device)
        name = library.ggml_backend_dev_description(device).decode(errors="replace")
        found.append((name, free_bytes, kind == _INTEGRATED, total_bytes))
    return found


def _gpu_devices(library: ctypes.CDLL) -> Iterator[tuple[int, int]]:
    """Handle and type of each GPU device."""
    library.ggml_backend_dev_count.restype = ctypes.c_size_t
    library.ggml_backend_dev_get.restype = ctypes.c_void_p
    library.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    library.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    for index in range(library.ggml_backend_dev_count()):
        device = library.ggml_backend_dev_get(index)
        kind = library.ggml_backend_dev_type(device)
        if kind in _IS_GPU:
            yield device, kind


def _memory(library: ctypes.CDLL, device: int) -> tuple[int, int]:
    """Free and total bytes of a device."""
    library.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p] + [ctypes.POINTER(ctypes.c_size_t)] * 2
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    library.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def layers_that_fit(*, n_layers: int, weights_bytes: int, kv_bytes: int, free_bytes: int) -> int:
    """Layers for the GPU, at most `n_layers` + 1 (the output counts as one), by an even share of weights and KV."""
    n_all = n_layers + 1
    per_layer = max(1, (weights_bytes + kv_bytes) // n_all)
    return min(n_all, int(free_bytes * USABLE_FRACTION) // per_layer)
