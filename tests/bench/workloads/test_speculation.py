"""What drafts gain, against a server that says what it drafted."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from localrun.bench.results import Options, RunResult, Workload
from localrun.bench.workloads import WORKLOADS
from localrun.bench.workloads.speculation import N_OUTPUT, N_RECORDS, N_WARM_UP, listing, records, repeated, source_file
from tests.bench.conftest import Asked, FakeServer, Reply

NAMES = ("edit", "list", "json", "prose")
OPTIONS = Options(seed=1, streams=(1, 3))


def drafting(asked: Asked) -> Reply:
    """An answer that came in half as many pieces, each with a drafted token; a quarter more was drafted in vain."""
    n_output = asked.body["max_tokens"]
    if asked.body.get("speculation") is False:
        return Reply([(0.001, "x ")] * n_output)
    pieces = [(0.001, "x x ")] * (n_output // 2)
    return Reply(pieces, n_output=n_output, n_drafted=n_output * 3 // 4, n_accepted=n_output // 2)


def run(workload: Workload, server: FakeServer, *, can_switch: bool) -> RunResult:
    target = msgspec.structs.replace(server.target, can_switch=can_switch)
    return asyncio.run(workload.run(target, OPTIONS))


def asked(server: FakeServer) -> list[dict[str, Any]]:
    """What was asked for and measured."""
    return [each.body for each in server.asked if each.body["max_tokens"] == N_OUTPUT]


@pytest.mark.parametrize("name", NAMES)
def test_a_server_that_can_do_without_drafts_does_so_in_between(server: FakeServer, name: str) -> None:
    server.reply = drafting
    result = run(WORKLOADS[name], server, can_switch=True)
    assert [body.get("speculation") for body in asked(server)][:4] == [None, False, False, None]
    groups = [record.group for record in result.records]
    assert groups == [
        each for n in (1, 3) for each in [f"c{n}_warm-up"] * n + [f"c{n}"] * n + [f"c{n}_plain"] * 2 * n + [f"c{n}"] * n
    ]
    for group in ("c1", "c3"):
        rates = result.metrics[f"{group}_tokens_per_s"], result.metrics[f"{group}_plain_tokens_per_s"]
        assert result.metrics[f"{group}_gain_ratio"] == pytest.approx(rates[0] / rates[1])
        assert result.metrics[f"{group}_acceptance_ratio"] == pytest.approx(2 / 3)
        assert result.metrics[f"{group}_drafted_share"] == 0.5
        assert result.metrics[f"{group}_same_text_ratio"] == 1.0
    assert result.metrics["c1_gain_ratio"] > 1.2
    assert WORKLOADS[name].shown(result.metrics)[0] == "c1_gain_ratio"


def test_another_server_is_asked_once_and_nothing_that_it_does_not_know(server: FakeServer) -> None:
    result = run(WORKLOADS["list"], server, can_switch=False)
    assert len(asked(server)) == 1 + 3
    assert not any("speculation" in body for body in asked(server))
    assert "c1_tokens_per_s" in result.metrics
    assert not any("plain" in name or "gain" in name or "acceptance" in name for name in result.metrics)


def test_prompts_are_computed_before_they_are_measured_and_none_comes_twice(server: FakeServer) -> None:
    run(WORKLOADS["edit"], server, can_switch=False)
    asyncio.run(WORKLOADS["edit"].run(server.target, replace(OPTIONS, seed=2)))
    short = [each.body["prompt"] for each in server.asked if each.body["max_tokens"] == N_WARM_UP]
    measured = [body["prompt"] for body in asked(server)]
    assert sorted(short) == sorted(measured)
    assert len(set(measured)) == 8


def test_one_that_fails_leaves_its_level_without_numbers(server: FakeServer) -> None:
    def reply(asked: Asked) -> Reply:
        return Reply([(0.0, "x")], breaks=True) if len(server.asked) == 7 else drafting(asked)

    server.reply = reply
    result = run(WORKLOADS["prose"], server, can_switch=False)
    assert "c1_tokens_per_s" in result.metrics
    assert "c3_tokens_per_s" not in result.metrics
    assert result.metrics["failed_count"] == 1


def test_only_prose_is_drawn_at_random(server: FakeServer) -> None:
    for name in NAMES:
        run(WORKLOADS[name], server, can_switch=False)
    bodies = asked(server)
    assert [body["temperature"] for body in bodies] == [0] * 12 + [1.0] * 4
    assert len({body["seed"] for body in bodies[-4:]}) == 4
    assert ["messages" in body for body in bodies] == [False] * 12 + [True] * 4
    assert ["json_schema" in body for body in bodies] == [False] * 8 + [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    ("source", "answer", "share"),
    [
        ("one two three four five six", "one two three four five six", 8 / 11),
        ("", "a b a b a b a b", 8 / 15),
        ("one two three", "four five six", 0.0),
        ("one", "", 0.0),
    ],
)
def test_words_are_repeated_that_follow_the_same_three(source: str, answer: str, share: float) -> None:
    assert repeated(source, answer) == pytest.approx(share)


def test_texts_follow_from_their_seed() -> None:
    file = source_file(random.Random(1))
    assert file == source_file(random.Random(1)) != source_file(random.Random(2))
    assert 150 <= len(file.text.splitlines()) <= 300
    assert file.text.startswith(file.head)
    compile(file.text, "report.py", "exec")
    assert all(file.text.count(f" {name}(") == 1 for name in file.names)
    lines = listing(random.Random(1)).splitlines()
    assert len(lines) == len(set(lines)) > 20
    text, schema = records(random.Random(1))
    assert len(text.splitlines()) == schema["minItems"] == N_RECORDS
