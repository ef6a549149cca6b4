from __future__ import annotations

import pytest
from msgspec.structs import replace

from localrun.engine.native.library import gpu_free_bytes, gpus, native
from localrun.engine.process import layers_that_fit
from tests.engine.test_process import OPEN

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free_bytes", "layers"),
    [(0, 0), (20 * GIB, 33), (int(2.5 * GIB / 0.85), 16)],
    ids=["no memory", "everything fits", "half fits"],
)
def test_layers_follow_the_free_memory(free_bytes, layers):
    opened = replace(OPEN, n_layers=32, weights_bytes=4 * GIB, kv_bytes=1 * GIB)
    assert layers_that_fit(opened, free_bytes) == layers


def test_the_device_functions_of_ggml_can_be_called():
    assert bool(gpus()) == bool(native.llama_supports_gpu_offload())
    assert (gpu_free_bytes() is None) == (not gpus())
