"""What a comparison with a real daemon sends, before it starts one."""

from __future__ import annotations

import re

import pytest

from localrun.bench.arrivals import Session, built_in
from localrun.errors import BadRequest
from localrun.plan.check import LEAST_REQUESTS, asked_of
from tests.plan.made import turn, workload


@pytest.mark.parametrize(("rate_per_s", "seconds"), [(1e9, 1e9), (1e-6, 60.0), (400.0, 60.0)])
def test_nobody_waits_for_days(rate_per_s: float, seconds: float) -> None:
    with pytest.raises(
        BadRequest, match=rf"--rate {re.escape(f'{rate_per_s:g}')} for --seconds .* at most 20,000"
    ) as raised:
        asked_of(built_in()["chat"], rate_per_s, seconds, 1)
    assert raised.value.field == "rate"


def test_a_trace_has_no_more_than_it_has() -> None:
    sessions = [Session(float(at), (turn(f"r{at}", 10, 20),)) for at in range(100)]
    assert len(asked_of(workload(sessions)._replace(own_rate_per_s=1.0), 1e3, 1e3, 1)) == 100
    with pytest.raises(BadRequest, match="15 requests of made are too few to compare"):
        asked_of(workload(sessions[:15])._replace(own_rate_per_s=1.0), 1.0, 1.0, 1)
    assert len(asked_of(workload(sessions), 1.0, 1.0, 1)) >= LEAST_REQUESTS
