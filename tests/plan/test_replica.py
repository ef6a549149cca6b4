"""The driver: time adds up, queues are as long as theory has it, equal seeds give equal runs."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from localrun.bench.arrivals import ANSWER, Session, Turn
from localrun.bench.streams import arrivals_s
from localrun.plan.backend import SimBackend
from localrun.plan.costs import Account, StreamCosts, VirtualClock, WaitCosts
from localrun.plan.replica import Replica, simulate
from tests.plan.made import FREE, costs, setup, turn


def test_the_accounts_add_up_to_the_time_that_passed() -> None:
    sessions = [Session(at / 4, (turn(f"p{at}", 30 + 40 * at % 900, 20),)) for at in range(60)]
    outcome = simulate(
        setup(of=costs(copy_s=1e-4, host_s=1e-4, delta_s=1e-4, sigma=0.2, waits=WaitCosts((0.1,), ((0.0, 0.004),)))),
        sessions,
        2.0,
    )
    assert math.fsum(outcome.spent_s.values()) == pytest.approx(outcome.seconds)
    assert all(seconds > 0 for account, seconds in outcome.spent_s.items() if account is not Account.IDLE)
    assert len(outcome.records) == 60
    assert all(record.is_complete and record.n_output == 20 for record in outcome.records)


def test_a_clock_does_not_go_back() -> None:
    clock = VirtualClock()
    clock.spend(2.0, Account.DECODE)
    clock.sleep_until(1.0, Account.IDLE)
    assert clock() == 2.0
    assert clock.spent_s[Account.IDLE] == 0


def mean_wait_s(n_outputs: list[int], load: float, seed: int) -> float:
    """Of requests to one slot, whose tokens take 40 ms each and whose prompts take nothing."""
    own = setup(of=costs(streams=StreamCosts((1,), (0.040,), (0.0,)), beside=FREE, background=FREE), slots=1)
    rate_per_s = load / (0.040 * statistics.mean(n_outputs))
    times = arrivals_s(rate_per_s=1.0, seconds=len(n_outputs), seed=seed)
    sessions = [Session(at, (turn(f"q{n}", 1, n_outputs[n % len(n_outputs)]),)) for n, at in enumerate(times)]
    own = own._replace(max_queue=10**6)
    records = simulate(own, sessions, rate_per_s).records[200:]
    return statistics.mean(record.latency_s - 0.040 * record.n_output for record in records)


def test_waits_are_those_of_theory() -> None:
    """One server with constant service (M/D/1): rho / (2 mu (1 - rho)). With exponential service (M/M/1) twice that."""
    service_s, load = 0.2, 0.6
    constant = mean_wait_s([5] * 1500, load, seed=3)
    assert constant == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.25)
    chance = random.Random(5)
    exponential = mean_wait_s([max(1, round(chance.expovariate(1 / 5))) for _ in range(1500)], load, seed=3)
    assert exponential == pytest.approx(load * service_s / (1 - load), rel=0.4)


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    sessions = [Session(at / 2, (turn(f"p{at}", 200, 15),)) for at in range(30)]
    own = setup(of=costs(sigma=0.2))
    first, again, other = (simulate(own, sessions, 1.0, seed=seed).records for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_one_that_waits_for_others_sleeps_as_long_as_by_itself() -> None:
    """As a fleet drives it, whose replicas wake only when everybody has come so far."""
    sessions = [Session(at / 2, (turn(f"p{at}", 900, 15),)) for at in range(30)]
    own = setup(of=costs(sigma=0.2))
    clock = VirtualClock()
    replica = Replica(own, SimBackend(own.layout, own.costs, clock, 1), clock, sessions, 1.0)
    while replica.is_busy:
        replica.advance(replica.next_s)
    alone = simulate(own, sessions, 1.0)
    assert replica.outcome() == alone._replace(blocked_s=replica.outcome().blocked_s)


def test_a_second_turn_finds_what_the_first_one_left() -> None:
    first = Turn((("system", 300), ("a", 50)), 40)
    second = Turn((*first.parts, (f"a{ANSWER}", 40), ("b", 30)), 10, think_s=5.0)
    records = simulate(setup(), [Session(0.0, (first, second))], 1.0).records
    assert records[1].intended_at_s == pytest.approx(records[0].ended_at_s + 5.0)
    assert records[0].n_cached == 0
    assert records[1].n_cached >= 380  # all but the last token of the answer, whose cell was never computed


def test_a_full_queue_refuses() -> None:
    sessions = [Session(0.0, (turn(f"p{at}", 100, 50),)) for at in range(20)]
    records = simulate(setup(slots=2)._replace(max_queue=4), sessions, 1.0).records
    assert sum(record.status == 429 for record in records) == 14
    assert sum(record.is_complete for record in records) == 6


def test_a_prompt_that_is_too_long_is_a_problem_of_its_own() -> None:
    records = simulate(setup(n_cells=4096), [Session(0.0, (turn("long", 5000, 5),))], 1.0).records
    assert "5000 tokens" in records[0].problem


def test_cells_are_short_before_slots_are() -> None:
    """In one pool with room for two, the others wait although slots are free."""
    own = setup(is_split=False, mixes_rows=True, n_cells=2048, slots=8, n_spare_seqs=8)
    sessions = [Session(0.0, (turn(f"p{at}", 700, 200),)) for at in range(8)]
    outcome = simulate(own, sessions, 1.0)
    assert outcome.blocked_s > 0 or outcome.n_preempted > 0
    assert all(record.is_complete for record in outcome.records)


def returning(disk_cache_bytes: int) -> int:
    """Cached tokens of conversations that come back when memory has long been full of others, 400 tokens of each."""
    talks = [Turn(((f"talk{each}", 400),), 10) for each in range(40)]
    sessions = [Session(2.0 * at, (turn,)) for at, turn in enumerate([*talks, *talks])]
    own = setup(n_cells=4096)._replace(ram_cache_bytes=2000 * 1024, disk_cache_bytes=disk_cache_bytes)
    return sum(record.n_cached for record in simulate(own, sessions, 1.0).records)


def test_what_memory_forgets_is_found_on_disk_as_far_as_that_reaches() -> None:
    everything = 40 * 400
    assert returning(0) < 0.3 * everything
    assert returning(1 << 30) > 0.9 * everything
    # Less than half of it: who comes in a circle finds what was there last gone.
    assert returning(7000 * 1024) < 0.3 * everything


def test_reading_from_disk_takes_time() -> None:
    first, again = Turn((("talk", 2000),), 10), Turn((("talk", 2000), ("more", 10)), 10, 60.0)
    others = [Session(10.0 + at, (turn(f"other{at}", 2000, 10),)) for at in range(6)]
    own = setup(of=costs(disk_byte_s=1e-7))._replace(ram_cache_bytes=2500 * 1024, disk_cache_bytes=1 << 30)
    of_disk, of_memory = (
        next(each for each in simulate(one, [Session(0.0, (first, again)), *others], 1.0).records if each.n_cached)
        for one in (own, own._replace(ram_cache_bytes=1 << 30))
    )
    assert of_disk.n_cached == of_memory.n_cached > 1900
    assert of_disk.ttft_s - of_memory.ttft_s == pytest.approx(1024 * 2000 * 1e-7, rel=0.1)


def test_a_long_pause_does_not_stop_the_clock() -> None:
    """At 1e16 s a step of 10 ms is less than the next number is away."""
    sessions = [Session(at * 1e16, (turn(f"p{at}", 600, 5),)) for at in range(3)]
    records = simulate(setup(), sessions, 1.0).records
    assert [record.n_output for record in records] == [5, 5, 5]
    clock = VirtualClock()
    clock.sleep_until(1e16, Account.IDLE)
    clock.spend(0.01, Account.DECODE)
    assert clock() > 1e16
