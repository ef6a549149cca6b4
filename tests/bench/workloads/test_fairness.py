"""Hog and mouse."""

from __future__ import annotations

import asyncio
from collections import Counter

from localrun.bench.results import Options
from localrun.bench.streams import CUT_SHORT
from localrun.bench.workloads.fairness import HOG, MOUSE, N_HOG_STREAMS, WORKLOAD
from tests.bench.conftest import Asked, FakeServer, Reply

SHORT = Options(seed=1, seconds=0.1)


def paced(asked: Asked) -> Reply:
    return Reply([(0.002, "x")] * asked.body["max_tokens"])


def test_the_mouse_is_measured_alone_and_beside_the_hog(server: FakeServer) -> None:
    server.reply = paced
    result = asyncio.run(WORKLOAD.run(server.target, SHORT))
    assert Counter(record.group for record in result.records) == {"alone": 3, "hog": N_HOG_STREAMS, "beside": 1}
    clients = {asked.headers["X-Localrun-Client"] for asked in server.asked}
    assert {HOG, MOUSE} <= clients
    hog = [record for record in result.records if record.client == HOG]
    beside = next(record for record in result.records if record.group == "beside")
    assert any(len(record.arrivals_s) >= 8 and record.arrivals_s[7] <= beside.sent_at_s for record in hog)
    assert {record.problem for record in hog} == {CUT_SHORT}
    assert result.metrics["completion_ratio"] == 1.0
    assert 0 < result.metrics["mouse_service_share"] < 0.5
    assert set(WORKLOAD.shown(result.metrics)) == set(WORKLOAD.headline)


def test_a_hog_that_is_refused_waits_before_it_tries_again(server: FakeServer) -> None:
    def reply(asked: Asked) -> Reply:
        is_hog = asked.headers["X-Localrun-Client"] == HOG
        refused = is_hog and sum(each.headers["X-Localrun-Client"] == HOG for each in server.asked) > 2
        return Reply(status=429, headers={"Retry-After": "30"}) if refused else paced(asked)

    server.reply = reply
    result = asyncio.run(WORKLOAD.run(server.target, SHORT))
    assert result.metrics["refused_count"] == N_HOG_STREAMS - 2
    assert "mouse_latency_p50_s" in result.metrics
