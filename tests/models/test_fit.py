"""The rough guess that is made before a file is here, beside the estimate that its header would give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.models.fit import ROUGH_CELLS, rough_bytes
from localrun.models.memory import estimate
from tests.models.test_fit_choice import HEADER

sizes = st.integers(0, 1000 * 1024**3)


def test_it_is_within_a_third_of_the_estimate_for_a_common_model() -> None:
    needed = estimate(HEADER, n_kv_cells=ROUGH_CELLS, n_slots=1, n_ubatch=512, kv_type="f16")
    assert rough_bytes(HEADER.weights_bytes) == pytest.approx(needed.total_bytes, rel=1 / 3)


@given(weights=sizes, more=sizes)
def test_larger_models_take_more(weights: int, more: int) -> None:
    assert weights < rough_bytes(weights) <= rough_bytes(weights + more)
