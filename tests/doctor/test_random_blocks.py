"""Random blocks are valid, of the wanted size, and never the same for two rows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from localrun.doctor.probe_models import BlockPool
from localrun.models.gguf.tables import BY_NAME


@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_weights_have_mean_0_and_keep_activations_their_size(name: str) -> None:
    n_rows, fan_in = 512, 1024
    pool = BlockPool(BY_NAME[name], fan_in, n_rows, np.random.default_rng(0))
    size_bytes = n_rows * fan_in // BY_NAME[name].block_elements * BY_NAME[name].block_bytes
    raw = np.concatenate(list(pool.chunks(size_bytes)))
    assert raw.nbytes == size_bytes
    weights = gguf.quants.dequantize(
        raw.view(np.float16) if name == "F16" else raw, gguf.GGMLQuantizationType[name]
    ).reshape(n_rows, fan_in)
    assert np.isfinite(weights).all()
    assert weights.mean() == pytest.approx(0, abs=0.002)
    assert weights.std() * np.sqrt(fan_in) == pytest.approx(1, abs=0.05)
    assert len(np.unique(weights, axis=0)) == n_rows
    # An activation of size 1 stays of size 1.
    assert (weights @ np.ones(fan_in, np.float32)).std() == pytest.approx(1, abs=0.15)
