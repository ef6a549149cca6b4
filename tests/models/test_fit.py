"""The rough guess that is made before a file is here, beside the estimate that its header would give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.models.fit import ROUGH_CELLS, USABLE_FRACTION, fits_roughly, rough_bytes
from localrun.models.memory import estimate
from tests.models.test_fit_choice import HEADER

GIB = 1024**3
sizes = st.integers(0, 1000 * GIB)


@pytest.mark.parametrize("n_layers", [None, 32])
def test_it_is_within_a_third_of_the_estimate_for_a_common_model(n_layers: int | None) -> None:
    needed = estimate(HEADER, n_kv_cells=ROUGH_CELLS, n_slots=1, n_ubatch=512, kv_type="f16")
    assert rough_bytes(HEADER.weights_bytes, n_layers=n_layers) == pytest.approx(needed.total_bytes, rel=1 / 3)


@given(weights=sizes, more=sizes, n_layers=st.none() | st.integers(1, 200), n_cells=st.integers(256, 200_000))
def test_larger_models_and_contexts_take_more(weights: int, more: int, n_layers: int | None, n_cells: int) -> None:
    least = rough_bytes(weights, n_layers=n_layers, n_cells=n_cells)
    assert weights < least <= rough_bytes(weights + more, n_layers=n_layers, n_cells=n_cells)
    assert least <= rough_bytes(weights, n_layers=n_layers, n_cells=n_cells + 256)


@given(weights=sizes, free=sizes, n_layers=st.none() | st.integers(1, 200))
def test_what_fits_leaves_memory_to_others(weights: int, free: int, n_layers: int | None) -> None:
    fits = fits_roughly(weights, free, n_layers=n_layers)
    assert fits == (rough_bytes(weights, n_layers=n_layers) <= free * USABLE_FRACTION)
    if fits:
        assert weights < free
