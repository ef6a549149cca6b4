from __future__ import annotations

import statistics

import pytest

from localrun.bench.arrivals import ANSWER, Limits, Session, Turn, built_in
from localrun.errors import BadRequest
from localrun.plan.fleet import MOST_EXACT, MOST_LOOKED_AT, ROUTERS, CoarseReplica, FleetSearch, fleet
from localrun.plan.replica import Arrival, simulate
from tests.plan.made import costs, setup, workload

QUESTION, ANSWERED = 200, 20


def talks(n_sessions: int, n_turns: int = 4) -> list[Session]:
    """Conversations under one system prompt, each turn of which repeats those before it."""
    found = []
    for number in range(n_sessions):
        parts: list[tuple[str, int]] = [("system", 400)]
        turns = []
        for turn in range(n_turns):
            parts.append((f"{number}/{turn}", QUESTION))
            turns.append(Turn(tuple(parts), ANSWERED, 1.0, f"{number}"))
            parts.append((f"{number}/{turn}{ANSWER}", ANSWERED))
        found.append(Session(float(number * n_turns), tuple(turns)))
    return found


@pytest.mark.parametrize("router", ROUTERS)
def test_a_fleet_of_one_is_the_replica_by_itself(router: str):
    sessions = talks(20)
    alone = simulate(setup(), sessions, 4.0, seed=3).records
    found = fleet(setup(), sessions, 4.0, n_replicas=1, router=router, seed=3)
    assert [(each.arrivals_s, each.n_cached) for each in found.records] == [
        (each.arrivals_s, each.n_cached) for each in alone
    ]
    assert (found.share, found.fullest, found.coarse_error) == (1.0, 1.0, None)


def test_conversations_that_stay_where_they_are_find_their_prefix():
    found = {router: fleet(setup(), talks(30), 8.0, n_replicas=4, router=router) for router in ROUTERS}
    cached = {router: sum(each.n_cached for each in one.records) for router, one in found.items()}
    assert all(len(one.records) == 120 for one in found.values())
    assert cached["prefix"] > 0.9 * cached["session"]
    assert cached["round-robin"] < 0.8 * cached["prefix"]
    assert found["round-robin"].fullest < 1.1
    assert found["prefix"].fullest < 1.5


def test_the_fewest_replicas_that_keep_a_promise():
    # One slot-bound request takes 0.1 + 0.2 s; a promise of half a second holds until a replica is nearly full.
    sessions = [Session(float(number), (Turn(((f"q{number}", QUESTION),), ANSWERED),)) for number in range(100)]
    search = FleetSearch(setup(), workload(sessions, Limits(ttft_limit_s=0.5)), Limits(ttft_limit_s=0.5), 20.0)
    least = search.least("two-choices", 9)
    assert least.point.kept >= 0.95
    assert search.of(least.n_replicas - 1, "two-choices").point.kept < 0.95
    assert search.least("two-choices", 1).n_replicas == least.n_replicas


def test_many_replicas_are_told_by_those_that_were_simulated_exactly():
    sessions = talks(30 * (MOST_EXACT + 1), 1)
    found = fleet(setup(), sessions, 3.0 * (MOST_EXACT + 1), n_replicas=MOST_EXACT + 1, router="two-choices")
    assert found.coarse_error is not None
    assert abs(found.coarse_error) < 0.15
    assert len(found.records) == pytest.approx(found.share * len(sessions), rel=0.25)


@pytest.mark.parametrize("rate_per_s", [1.0, 4.0])
def test_a_coarse_replica_is_about_as_quick_as_an_exact_one(rate_per_s: float):
    sessions = built_in()["chat"].sessions(200, 1)
    exact = fleet(setup(), sessions, rate_per_s, n_replicas=1, router="session").records
    replica = CoarseReplica(setup())
    for number, session in enumerate(sessions):
        for turn in session.turns:
            arrival = Arrival(session.at / rate_per_s, number, Session(0.0, (turn,)), 0)
            while replica.next_s <= arrival.at_s:
                replica.advance(arrival.at_s)
            replica.arrive(arrival)
    while replica.is_busy:
        replica.advance(float("inf"))
    medians = [
        [statistics.median(each.ttft_s for each in records), statistics.median(each.tpot_s or 0.0 for each in records)]
        for records in (exact, replica.records)
    ]
    assert medians[1] == pytest.approx(medians[0], rel=0.2)


def test_a_router_that_looks_at_all_of_thousands_is_refused():
    with pytest.raises(BadRequest, match="session or two-choices"):
        fleet(setup(of=costs()), talks(1), 1.0, n_replicas=MOST_LOOKED_AT + 1, router="prefix")


def test_more_replicas_than_are_simulated_are_refused_before_requests_are_made():
    def none_are_made(_n: int, _seed: int) -> list[Session]:
        raise AssertionError

    search = FleetSearch(setup(), workload([])._replace(sessions=none_are_made), Limits(), 1e9)
    with pytest.raises(BadRequest, match="about 250,000,000 replicas would be needed, and at most 10,000"):
        search.least("session", 250_000_000)
