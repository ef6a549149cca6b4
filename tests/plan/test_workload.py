from __future__ import annotations

from pathlib import Path

import pytest

from localrun.bench.arrivals import ANSWER, built_in
from localrun.errors import BadRequest
from localrun.plan.replica import prompt_tokens
from localrun.plan.traces import named

TEAM = """
name = "our team"
[promise]
ttft_limit_s = 1
share = 0.9
[[source]]
name = "agent"
weight = 3
think_s = { kind = "lognormal", median = 3, p95 = 20 }
turns = { kind = "geometric", mean = 4 }
prefix = [{ name = "repository", tokens = 900, groups = 5, skew = 1.1 }]
prompt_tokens = { kind = "histogram", edges = [1, 50, 200], weights = [1, 1] }
output_tokens = 30
latency = "interactive"
[[source]]
name = "batch"
prompt_tokens = { kind = "uniform", least = 10, most = 20 }
output_tokens = { kind = "lognormal", median = 20, p95 = 40, most = 50 }
lane = "batch"
"""


def test_chats_are_short() -> None:
    turns = [session.turns for session in built_in()["chat"].sessions(2000, 1)]
    lengths = [(turn.n_prompt, turn.n_output) for (turn,) in turns]
    assert (min(n for n, _ in lengths), max(n for n, _ in lengths)) == (50, 350)
    assert (min(n for _, n in lengths), max(n for _, n in lengths)) == (16, 112)


@pytest.mark.parametrize("name", ["chat", "agent", "rag", "autocomplete", "batch"])
def test_about_as_many_requests_come_as_were_asked_for(name: str) -> None:
    sessions = built_in()[name].sessions(3000, 1)
    assert 2400 < sum(len(session.turns) for session in sessions) < 3600
    assert [session.at for session in sessions] == sorted(session.at for session in sessions)
    assert sessions == built_in()[name].sessions(3000, 1)
    assert sessions != built_in()[name].sessions(3000, 2)


def test_a_conversation_repeats_what_was_said() -> None:
    session, other, *_ = built_in()["agent"].sessions(100, 1)
    first, second = session.turns[0], session.turns[1]
    assert second.parts[: len(first.parts)] == first.parts
    assert second.parts[len(first.parts)] == (first.parts[-1][0] + ANSWER, first.n_output)
    assert prompt_tokens(second)[: first.n_prompt] == prompt_tokens(first)
    assert prompt_tokens(other.turns[0])[:3000] == prompt_tokens(first)[:3000]
    assert prompt_tokens(other.turns[0])[3000:] != prompt_tokens(first)[3000:]


def test_a_file_describes_people(tmp_path: Path) -> None:
    path = tmp_path / "team.toml"
    path.write_text(TEAM)
    found = named(str(path))
    assert (found.name, found.limits.ttft_limit_s, found.limits.share) == ("our team", 1.0, 0.9)
    turns = [turn for session in found.sessions(4000, 1) for turn in session.turns]
    by_lane = sum(turn.lane == "batch" for turn in turns) / len(turns)
    assert 0.2 < by_lane < 0.3
    agents = [turn for turn in turns if turn.lane != "batch"]
    assert {turn.target_itl_s for turn in agents} == {0.045}
    groups = [sum(turn.parts[0] == (f"repository/{group}", 900) for turn in agents) for group in range(5)]
    assert sum(groups) == len(agents)
    assert groups[0] > 2 * groups[4] > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("turns = [", "turns = ["),
        ('lane = "batch"\n', 'lane = "bulk"\n'),
        ("output_tokens = 30", "output_tokens = -1"),
        ('latency = "interactive"', 'latency = "quick"'),
        ("edges = [1, 50, 200]", "edges = [50, 1, 200]"),
        ("weight = 3", "wieght = 3"),
        ("least = 10, most = 20", "least = 20, most = 10"),
        ("median = 3, p95 = 20", "median = 20, p95 = 3"),
        ('turns = { kind = "geometric", mean = 4 }', "turns = 1000000"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, change: str, words: str) -> None:
    path = tmp_path / "team.toml"
    text = TEAM.replace("turns = {", words) if change == "turns = [" else TEAM.replace(change, words)
    assert text != TEAM
    path.write_text(text)
    with pytest.raises(BadRequest) as raised:
        named(str(path))
    assert str(path) in raised.value.message


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(BadRequest, match="did you mean 'agent'"):
        named("agnet")
