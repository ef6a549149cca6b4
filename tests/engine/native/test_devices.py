from __future__ import annotations

import llama_cpp.llama_cpp as native
import pytest

from localrun.engine.native import devices

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free_bytes", "layers"),
    [(0, 0), (20 * GIB, 33), (int(2.5 * GIB / 0.85), 16)],
    ids=["no memory", "everything fits", "half fits"],
)
def test_layers_follow_the_free_memory(free_bytes, layers):
    fit = devices.layers_that_fit(n_layers=32, weights_bytes=4 * GIB, kv_bytes=1 * GIB, free_bytes=free_bytes)
    assert fit == layers


def test_the_device_functions_of_ggml_can_be_called():
    free_bytes = devices.gpu_free_bytes(native._lib)
    assert (free_bytes > 0) == bool(native.llama_supports_gpu_offload())
