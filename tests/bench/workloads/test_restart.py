"""A prompt before and after a restart."""

from __future__ import annotations

import asyncio

import msgspec

from localrun.bench.results import Options, Target
from localrun.bench.workloads.restart import WORKLOAD
from tests.bench.conftest import FakeServer


def test_the_same_prompt_three_times_with_a_restart_before_the_last(server: FakeServer) -> None:
    n_before = []

    async def restart(target: Target) -> Target:
        n_before.append(len(server.asked))
        return msgspec.structs.replace(target, name="born again")

    result = asyncio.run(WORKLOAD.run(server.target, Options(seed=1, restart=restart)))
    assert n_before == [3]
    long = [asked.body["prompt"] for asked in server.asked if len(asked.body["prompt"]) == 1200]
    assert long[0] == long[1] == long[2]
    # What comes between loads the model, and must not be the start of the prompt.
    assert server.asked[3].body["prompt"][0] != long[0][0]
    assert result.target.name == "born again"
    assert set(WORKLOAD.headline) <= set(result.metrics)


def test_a_server_that_nobody_may_restart_is_measured_as_far_as_it_goes(server: FakeServer) -> None:
    result = asyncio.run(WORKLOAD.run(server.target, Options(seed=1)))
    assert "restarted_ttft_s" not in result.metrics
    assert "cached_ttft_s" in result.metrics
    assert "not ours to restart" in result.note
