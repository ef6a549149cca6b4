from __future__ import annotations

import numpy as np
import pytest

from localrun.bench import bandwidth


def test_every_thread_reads_every_byte_of_its_array(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, float]] = []
    original = np.bitwise_or.reduce

    class Recorded:
        @staticmethod
        def reduce(array: np.ndarray) -> int:
            seen.append((array.nbytes, float(original(array))))
            return 0

    monkeypatch.setattr(bandwidth.np, "bitwise_or", Recorded)
    rate = bandwidth.read_bandwidth_bytes_per_s(3, array_bytes=80_000, passes=2)
    assert seen == [(80_000, 1.0)] * 6
    assert rate > 0


def test_the_best_pass_counts(monkeypatch: pytest.MonkeyPatch):
    times = iter([0.5, 0.1, 0.2])
    monkeypatch.setattr(bandwidth, "_pass_s", lambda _: next(times))
    assert bandwidth.read_bandwidth_bytes_per_s(2, array_bytes=1000, passes=3) == pytest.approx(2 * 1000 / 0.1)
