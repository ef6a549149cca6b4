"""Serve's router class by itself, with replicas that are names alone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from localrun.cluster.affinity import SLACK_TOKENS, Affinity, blocks

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

REPLICAS = ("a", "b", "c")
EQUAL = dict.fromkeys(REPLICAS, (100.0, 0))


def ranks(there: tuple[str, ...] = REPLICAS, **asked: Any) -> list[list[str]]:
    from localrun.cluster.on_ray.serve_app import PrefixRouter

    router = PrefixRouter.__new__(PrefixRouter)
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in there]
    found = asyncio.run(router.choose_replicas(replicas, SimpleNamespace(kwargs=asked)))
    return [[one.replica_id.unique_id for one in rank] for rank in found]


def test_it_chooses_as_a_door_does_and_names_the_others_next():
    door = Affinity()
    for number in range(60):
        prompt = blocks([f"prompt {number % 20}".encode() * 50])
        costs = door.costs(prompt, dict.fromkeys(REPLICAS, 0.0))
        (first,), others = ranks(first=prompt[0], costs=costs)
        assert first == door.choose(prompt, dict.fromkeys(REPLICAS, 0.0))
        assert sorted([first, *others]) == list(REPLICAS)
        door.note(prompt, first)


def test_only_what_the_door_reaches_and_serve_knows_is_chosen():
    firsts = {
        ranks(("a", "b"), first=b"%d" % number, costs={"b": (0.0, 0), "c": (0.0, 9)})[0][0] for number in range(20)
    }
    assert firsts == {"b"}


def test_work_that_waits_outweighs_a_known_beginning():
    assert ranks(first=b"x", costs=EQUAL | {"b": (100.0, 7)})[0] == ["b"]
    assert ranks(first=b"x", costs=EQUAL | {"b": (101.0 + SLACK_TOKENS, 7)})[0] != ["b"]


@pytest.mark.parametrize("asked", [{}, {"first": b"x", "costs": {}}, {"first": b"x", "costs": {"gone": (0.0, 0)}}])
def test_without_a_prompt_or_a_way_anybody_will_do(asked: dict[str, Any]):
    assert ranks(**asked) == [list(REPLICAS)]


def test_serve_takes_it_by_value():
    from ray.serve.config import RequestRouterConfig

    from localrun.cluster.on_ray.serve_app import PrefixRouter

    again = RequestRouterConfig(request_router_class=PrefixRouter).get_request_router_class()
    assert (again.__name__, again.__module__) == ("PrefixRouter", "localrun.cluster.on_ray.serve_app")
