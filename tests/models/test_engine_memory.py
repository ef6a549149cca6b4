"""The estimate beside what real engine processes take: of two models that compute little, and when it goes deep of all
those of the table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.models.engine_memory import CASES, Case, measure

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]


LITTLE = (
    Case("135m", "Q4_K", n_slots=1, n_kv_cells=768),
    Case("mamba-130m", "Q8_0", n_kv_cells=1024),
)


@pytest.mark.parametrize(
    "case",
    [*LITTLE, *(pytest.param(case, marks=pytest.mark.deep) for case in CASES)],
    ids=lambda case: f"{case.shape}-{case.file_type}-{case.n_slots}x{case.n_kv_cells}-{case.kv_type}",
)
def test_the_estimate_is_within_a_tenth_of_what_an_engine_takes(case: Case, tmp_path: Path) -> None:
    seen = measure(case, tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    assert abs(seen.error) < 0.1, f"estimate {seen.estimate}, measured {seen.peak_bytes}"
    # What nobody can take away again, from the first moment on, is most of it.
    assert seen.ready_bytes <= seen.peak_bytes
