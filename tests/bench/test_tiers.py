"""What `localrun bench tiers` sends and adds up."""

from __future__ import annotations

import random
from typing import Any

from localrun.bench.tiers import COST_HEADER, TierAnswer, TierRun, cost_rows, mix, share_rows
from localrun.cli.text import columns

TIER: dict[str, Any] = {"name": "smart", "small": "s", "large": "l", "reasoning_effort": {"low": "small"}}


def answered(kind: str, asked: str, model: str, seconds: float, **more: Any) -> TierAnswer:
    return TierAnswer(kind=kind, asked=asked, model=model, seconds=seconds, prompt_tokens=10, output_tokens=5, **more)


def test_the_mix_has_every_kind_and_efforts_only_where_there_is_a_rule() -> None:
    kinds = [kind for kind, _ in mix(TIER, 2, random.Random(1))]
    assert set(kinds) == {"short", "long", "tools", "schema", "effort low"}
    assert "effort low" not in [kind for kind, _ in mix({}, 1, random.Random(1))]
    starts = [body["messages"][0]["content"][:30] for _, body in mix(TIER, 2, random.Random(1))]
    assert len(set(starts)) == 2
    assert [body for _, body in mix(TIER, 1, random.Random(1))] == [body for _, body in mix(TIER, 1, random.Random(1))]


def test_shares_and_costs() -> None:
    run = TierRun(
        tier=TIER,
        answers=[
            *(answered("short", "smart", "s", 1.5, rule="sure", probe_tokens=4), answered("short", "s", "s", 1.0)),
            *(answered("short", "l", "l", 4.0), answered("tools", "smart", "l", 4.5, rule="tools")),
            *(answered("tools", "s", "s", 1.0), answered("tools", "l", "l", 4.0)),
            *(TierAnswer(kind="schema", asked="smart", problem="no"), answered("schema", "s", "s", 99)),
            answered("schema", "l", "l", 99),
        ],
    )
    assert share_rows(run) == [("short", "1", "1", "0", "sure 1"), ("tools", "1", "0", "1", "tools 1")]
    rows = cost_rows(run, price_per_hour=3600)
    assert rows[0] == ("smart", "2", "100%", "20", "0", "10", "4", "6.00", "75%", "6.000000")
    assert [row[:3] for row in rows[1:3]] == [("  by small", "1", "50%"), ("  by large", "1", "50%")]
    assert [(row[0], row[7], row[8]) for row in rows[3:]] == [
        ("small alone", "2.00", "25%"),
        ("large alone", "8.00", "100%"),
    ]
    assert len(columns(COST_HEADER, cost_rows(run)).splitlines()[0]) <= 80
    assert run.problems == ["smart, schema: no"]
