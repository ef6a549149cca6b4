"""The search and what it says: the highest rate, what is short, what would help."""

from __future__ import annotations

from functools import cache

import pytest

from localrun.bench.arrivals import Limits, Session, Workload
from localrun.bench.streams import arrivals_s
from localrun.errors import BadRequest
from localrun.plan.costs import Costs, StreamCosts
from localrun.plan.replica import Setup
from localrun.plan.search import BEYOND, Point, Search, WhatIf, what_if
from tests.plan.made import FREE, costs, setup, turn, workload

SERVICE_S = 0.2


def alike(n_prompt: int, n_output: int, n: int = 60, limits: Limits | None = None) -> Workload:
    times = arrivals_s(rate_per_s=1.0, seconds=n, seed=7)
    return workload([Session(at, (turn(f"r{i}", n_prompt, n_output),)) for i, at in enumerate(times)], limits)


def test_the_carried_rate_is_at_the_limit() -> None:
    """One slot that takes 200 ms, constantly: a twentieth waits for 2.4 times as long when it is busy for 0.41 of the
    time. The promise is kept there, and 5 % beyond no more."""
    own = setup(of=costs(streams=StreamCosts((1,), (0.040,), (0.0,)), beside=FREE, background=FREE), slots=1)
    search = Search(alike(1, 5, 300), Limits(ttft_limit_s=0.5, itl_limit_s=0.2))
    carried = search.carries(own)
    assert 0.35 / SERVICE_S < carried.rate_per_s < 0.5 / SERVICE_S
    assert carried.kept >= 0.95 > search.at(own, 1.05 * carried.rate_per_s).kept
    assert carried.users == pytest.approx(carried.rate_per_s * 30, rel=0.1)  # who think much longer than they wait


def test_limits_that_nobody_gets_say_which_and_by_how_much() -> None:
    slow = setup(of=costs(streams=StreamCosts((1,), (0.3,), (0.0,))))
    with pytest.raises(BadRequest, match=r"a token takes 0\.3 s for 95 of 100 .* 50% more than --itl-limit 0\.2"):
        Search(alike(50, 5), Limits()).carries(slow)
    prompts = setup(of=costs(beside=FREE, background=FREE).scaled(prompts=1.0))
    late = prompts._replace(costs=costs(request_s=3.0))
    with pytest.raises(BadRequest, match=r"the first token takes 3\.\d+ s .* --ttft-limit 2 allows"):
        Search(alike(10, 5), Limits()).carries(late)


def test_so_many_users_get_what_the_rate_of_their_questions_gives() -> None:
    own = setup()
    search = Search(alike(100, 20), Limits())
    point = search.for_users(own, 20.0)
    assert point.users == pytest.approx(20, rel=0.05)
    assert point.rate_per_s == pytest.approx(20 / 30, rel=0.1)
    with pytest.raises(BadRequest, match="no users"):
        Search(alike(100, 20)._replace(think_s=None), Limits()).for_users(own, 20.0)


ONE_SLOT = setup(of=costs(streams=StreamCosts((1,), (0.04,), (0.0,)), beside=FREE, background=FREE), slots=1)


class CountingSearch(Search):
    """Knows the machines of which it simulated a whole run."""

    def at(self, setup: Setup, rate_per_s: float, *, is_whole: bool = True) -> Point:
        if is_whole:
            self.machines = [*getattr(self, "machines", []), setup]
        return super().at(setup, rate_per_s, is_whole=is_whole)


@cache
def of_one_slot() -> tuple[Point, WhatIf, list[Setup]]:
    """What it carries, what would help it, and the machines that were tried for that."""
    search = CountingSearch(alike(2, 15), Limits())
    carried = search.carries(ONE_SLOT)
    return carried, what_if(search, ONE_SLOT, carried), search.machines


@pytest.mark.parametrize(
    ("n_prompt", "n_output", "of", "n_slots", "bottleneck"),
    [
        (800, 2, costs(streams=StreamCosts((1,), (0.001,), (0.0,))), 8, "prefill"),
        (2, 15, costs(streams=StreamCosts((1, 8), (0.01, 0.08), (0.0, 0.0)), beside=FREE), 8, "decode bandwidth"),
        (2, 15, costs(streams=StreamCosts((1,), (0.001,), (0.0,)), delta_s=0.04, beside=FREE), 8, "host"),
    ],
)
def test_what_is_short_is_named(n_prompt: int, n_output: int, of: Costs, n_slots: int, bottleneck: str) -> None:
    own = setup(of=of, slots=n_slots, n_cells=4096 * n_slots)
    search = Search(alike(n_prompt, n_output), Limits(itl_limit_s=1.0))
    carried = search.carries(own)
    found = what_if(search, own, carried)
    assert found.bottleneck == bottleneck
    check(found, carried)


def check(found: WhatIf, carried: Point) -> None:
    assert found.twice.carries is not None
    assert found.twice.carries.rate_per_s > 1.2 * carried.rate_per_s
    assert found.kept_beyond < 0.95


def test_more_slots_are_the_best_change_where_slots_are_short() -> None:
    carried, found, _ = of_one_slot()
    assert found.bottleneck in ("slots", "decode bandwidth")  # both halve the time that it is taken
    check(found, carried)
    assert found.best is not None
    assert found.best.words == "--slots 2"
    assert found.best.carries is not None
    assert found.best.carries.rate_per_s > 1.5 * carried.rate_per_s


def test_what_a_change_brings_is_what_the_changed_machine_carries() -> None:
    """Simulated once more by hand: half the time of a step, and a second slot."""
    carried, found, _ = of_one_slot()
    changed: Setup = {
        "decode bandwidth": ONE_SLOT._replace(costs=costs(streams=StreamCosts((1,), (0.02,), (0.0,)), beside=FREE,
                                                          background=FREE)),
        "slots": ONE_SLOT._replace(layout=ONE_SLOT.layout.with_slots(2).with_cells(2 * ONE_SLOT.layout.n_cells)),
    }[found.bottleneck]  # fmt: skip
    near = BEYOND * carried.rate_per_s
    assert found.twice.carries == Search(alike(2, 15), Limits()).carries(changed, near)
    assert found.best is not None
    slots = ONE_SLOT._replace(layout=ONE_SLOT.layout.with_slots(2))
    assert found.best.carries == Search(alike(2, 15), Limits()).carries(slots, near)


def test_each_machine_is_simulated_once() -> None:
    """Twice as many cells are a resource and a setting; and a host that takes no time is none the worse for half."""
    _, found, machines = of_one_slot()
    assert all(machines.index(each) == at for at, each in enumerate(machines))
    # Without itself, and without half of its prompts, and of its host, which take no time here.
    assert len(machines) == 1 + len(found.resources) + len(found.settings) - 3


@pytest.mark.parametrize("n", [8, 60])
def test_of_a_short_trace_a_quarter_warms_up(n: int) -> None:
    """Requests of 20 tokens that come every 2 s, far apart: 10 tokens a second, up to the end of the last answer."""
    own = setup()
    point = Search(workload([Session(float(at), (turn(f"r{at}", 10, 20),)) for at in range(n)]), Limits()).at(own, 0.5)
    n_counted = n - n // 4
    assert point.kept == 1.0
    assert point.tokens_per_s == pytest.approx(20 * n_counted / (2 * (n_counted - 1) + 0.2), rel=0.05)


def test_hardly_any_requests_are_refused() -> None:
    few = workload([Session(float(at), (turn(f"r{at}", 10, 20),)) for at in range(7)])
    with pytest.raises(BadRequest, match=r"7 requests are too few .* 8 are the least") as raised:
        Search(few, Limits())
    assert raised.value.field == "workload"
    trace = workload([Session(float(at), (turn(f"r{at}", 10, 20),)) for at in range(8)])._replace(own_rate_per_s=1.0)
    with pytest.raises(BadRequest, match="come at once"):
        Search(trace, Limits()).carries(setup(slots=8))


def of_lengths(n_long: int, n: int = 100) -> Workload:
    return workload([Session(float(at), (turn(f"r{at}", 5000 if at % 50 < n_long / 2 else 50, 5),)) for at in range(n)])


def test_requests_that_are_longer_than_the_context_are_counted() -> None:
    own = setup(n_cells=4096)
    point = Search(of_lengths(4), Limits()).at(own, 0.1)
    assert point.n_failed == 2  # the other two came while it warmed up
    assert "5000 tokens" in point.problem
    assert (point.n_refused, point.kept) == (0, pytest.approx(73 / 75))
    for ask in (Search(of_lengths(10), Limits()).carries, lambda own: Search(of_lengths(10), Limits()).at(own, 0.1)):
        with pytest.raises(BadRequest, match=r"10 of 100 requests of 'made' .* \(4096 tokens\): .*kv-cells=5120"):
            ask(own)
    with pytest.raises(BadRequest, match=r"\(4096 tokens\): a model with a longer one"):
        Search(of_lengths(10), Limits()).at(setup(n_ctx_train=4096), 0.1)


def test_rates_at_which_nothing_comes_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"1e-12 requests per second are too few: at least 1e-06") as raised:
        Search(of_lengths(0), Limits()).at(setup(), 1e-12)
    assert raised.value.field == "rate"
