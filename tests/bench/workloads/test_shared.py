"""The shared system prompt."""

from __future__ import annotations

import asyncio

from localrun.bench.results import Options
from localrun.bench.workloads.shared import N_OWN, N_SYSTEM, WORKLOAD
from tests.bench.conftest import FakeServer


def test_all_share_the_beginning_and_nobody_the_end(server: FakeServer) -> None:
    result = asyncio.run(WORKLOAD.run(server.target, Options(seed=1)))
    assert [record.group for record in result.records] == ["cold"] * 8 + ["warm"] * 8
    prompts = [tuple(asked.body["prompt"]) for asked in server.asked[1:]]
    assert {len(prompt) for prompt in prompts} == {N_SYSTEM + N_OWN}
    assert len({prompt[:N_SYSTEM] for prompt in prompts}) == 1
    assert len({prompt[N_SYSTEM:] for prompt in prompts}) == 16
    assert WORKLOAD.shown(result.metrics) == list(WORKLOAD.headline)


def test_another_seed_is_cold_again(server: FakeServer) -> None:
    for seed in (1, 2):
        asyncio.run(WORKLOAD.run(server.target, Options(seed=seed)))
    assert server.asked[1].body["prompt"][:8] != server.asked[18].body["prompt"][:8]
