"""Conversations that come back."""

from __future__ import annotations

import asyncio

import pytest

from localrun.bench.results import Options
from localrun.bench.workloads.returning import N_OUTPUT, WORKLOAD
from tests.bench.conftest import FakeServer


@pytest.mark.parametrize(("kv_cells", "context_tokens", "n_conversations"), [(1200, 4096, 12), (4096, 512, 24)])
def test_every_turn_sends_the_whole_conversation(
    server: FakeServer, kv_cells: int, context_tokens: int, n_conversations: int
) -> None:
    options = Options(seed=1, kv_cells=kv_cells, context_tokens=context_tokens)
    result = asyncio.run(WORKLOAD.run(server.target, options))
    prompts = [asked.body["prompt"] for asked in server.asked[1:]]
    assert len(prompts) == 3 * n_conversations
    for index in range(n_conversations):
        first, second, third = prompts[index::n_conversations]
        assert second[: len(first)] == first
        assert third[: len(second)] == second
        assert len(first) == len(second) - len(first) - N_OUTPUT
        assert len(third) + N_OUTPUT < context_tokens
    total_tokens = sum(len(prompt) + N_OUTPUT for prompt in prompts[-n_conversations:])
    assert total_tokens == pytest.approx(3 * kv_cells, rel=0.05)
    assert WORKLOAD.shown(result.metrics)[:3] == ["round1_ttft_p50_s", "round2_ttft_p50_s", "round3_ttft_p50_s"]
