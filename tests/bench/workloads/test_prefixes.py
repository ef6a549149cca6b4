"""Prompts that begin as others did."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from localrun.bench.results import Options, Target
from localrun.bench.workloads.prompts import N_OWN, N_RETURNING_OUT, N_SYSTEM, RESTART, RETURNING, SHARED
from tests.bench.conftest import FakeServer


def test_all_share_the_beginning_and_nobody_the_end(server: FakeServer) -> None:
    result = asyncio.run(SHARED.run(server.target, Options(seed=1)))
    assert [record.group for record in result.records] == ["cold"] * 8 + ["warm"] * 8
    prompts = [tuple(asked.body["prompt"]) for asked in server.asked[1:]]
    assert {len(prompt) for prompt in prompts} == {N_SYSTEM + N_OWN}
    assert len({prompt[:N_SYSTEM] for prompt in prompts}) == 1
    assert len({prompt[N_SYSTEM:] for prompt in prompts}) == 16
    assert SHARED.shown(result.metrics) == list(SHARED.headline)


def test_another_seed_is_cold_again(server: FakeServer) -> None:
    for seed in (1, 2):
        asyncio.run(SHARED.run(server.target, Options(seed=seed)))
    assert server.asked[1].body["prompt"][:8] != server.asked[18].body["prompt"][:8]


@pytest.mark.parametrize(("kv_cells", "context_tokens", "n_conversations"), [(1200, 4096, 12), (4096, 512, 24)])
def test_every_turn_sends_the_whole_conversation(
    server: FakeServer, kv_cells: int, context_tokens: int, n_conversations: int
) -> None:
    options = Options(seed=1, kv_cells=kv_cells, context_tokens=context_tokens)
    result = asyncio.run(RETURNING.run(server.target, options))
    prompts = [asked.body["prompt"] for asked in server.asked[1:]]
    assert len(prompts) == 3 * n_conversations
    for index in range(n_conversations):
        first, second, third = prompts[index::n_conversations]
        assert second[: len(first)] == first
        assert third[: len(second)] == second
        assert len(first) == len(second) - len(first) - N_RETURNING_OUT
        assert len(third) + N_RETURNING_OUT < context_tokens
    total_tokens = sum(len(prompt) + N_RETURNING_OUT for prompt in prompts[-n_conversations:])
    assert total_tokens == pytest.approx(3 * kv_cells, rel=0.05)
    assert RETURNING.shown(result.metrics)[:3] == ["round1_ttft_p50_s", "round2_ttft_p50_s", "round3_ttft_p50_s"]


def test_the_same_prompt_three_times_with_a_restart_before_the_last(server: FakeServer) -> None:
    n_before = []

    async def restart(target: Target) -> Target:
        n_before.append(len(server.asked))
        return msgspec.structs.replace(target, name="born again")

    result = asyncio.run(RESTART.run(server.target, Options(seed=1, restart=restart)))
    assert n_before == [3]
    long = [asked.body["prompt"] for asked in server.asked if len(asked.body["prompt"]) == 1200]
    assert long[0] == long[1] == long[2]
    # What comes between loads the model, and must not be the start of the prompt.
    assert server.asked[3].body["prompt"][0] != long[0][0]
    assert result.target.name == "born again"
    assert set(RESTART.headline) <= set(result.metrics)


def test_a_server_that_nobody_may_restart_is_measured_as_far_as_it_goes(server: FakeServer) -> None:
    result = asyncio.run(RESTART.run(server.target, Options(seed=1)))
    assert "restarted_ttft_s" not in result.metrics
    assert "cached_ttft_s" in result.metrics
    assert "not ours to restart" in result.note
