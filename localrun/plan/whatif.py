"""What breaks first, and what a change would bring: by simulating it, never by a rule.

What is short is what helps most when there is twice as much of it, just beyond the rate that a machine carries. Of the
changes that a person can make the one that helps most there is tried in full.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from localrun.config import latency_target_s
from localrun.plan.replica import Setup
from localrun.plan.search import Point, Search

# Of the rate that is carried: so far beyond it something is certainly short.
BEYOND = 1.25
# Less more of kept promises is no help.
_LEAST_HELP = 0.02


class Change(NamedTuple):
    """In words, and the machine after it."""

    words: str
    setup: Setup


class Tried(msgspec.Struct, frozen=True):
    """A change, how many requests keep the promise with it beyond the rate that is carried now, and what the machine
    carries then, where that was simulated."""

    words: str
    kept_beyond: float
    carries: Point | None = None


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """`bottleneck` is what is short; `twice` is what the machine with twice as much of it carries. `best` is the change
    of a setting that helps most, None if none does."""

    bottleneck: str
    kept_beyond: float
    twice: Tried
    best: Tried | None
    resources: list[Tried]
    settings: list[Tried]


def resources(setup: Setup) -> dict[str, Change]:
    """Twice as much of everything that can be short."""
    layout, costs = setup.layout, setup.costs

    def costing(**factors: float) -> Setup:
        return setup._replace(costs=costs.scaled(**factors))

    return {
        "prefill": Change("a machine that computes prompts twice as fast", costing(prompts=0.5)),
        "decode bandwidth": Change("a machine that decodes twice as fast", costing(decode=0.5)),
        "host": Change("a host that is twice as fast", costing(host=0.5)),
        "slots": Change(
            "twice as many slots, each with as many cells",
            setup._replace(layout=layout.with_slots(2 * layout.slots).with_cells(2 * layout.n_cells)),
        ),
        "KV cells": Change("twice as many KV cells", setup._replace(layout=layout.with_cells(2 * layout.n_cells))),
    }


def settings(setup: Setup) -> list[Change]:
    """What a person can change without another machine."""
    layout = setup.layout
    found = [
        Change(f"--slots {n_slots}", setup._replace(layout=layout.with_slots(n_slots)))
        for n_slots in (layout.slots // 2, 2 * layout.slots)
        if 1 <= n_slots <= layout.n_batch
    ]
    found += [
        Change(f"--latency {mode}", setup._replace(target_itl_s=latency_target_s(mode)))
        for mode in ("interactive", "balanced", "throughput")
        if latency_target_s(mode) != setup.target_itl_s
    ]
    more_bytes = max(4 * setup.ram_cache_bytes, 1 << 30)
    found.append(Change(f"--ram-cache-bytes {more_bytes}", setup._replace(ram_cache_bytes=more_bytes)))
    cells = layout.with_cells(2 * layout.n_cells)
    return [*found, Change(f"--kv-cells {cells.n_cells}", setup._replace(layout=cells))]


def what_if(search: Search, setup: Setup, carried: Point) -> WhatIf:
    """About five runs for what is short, six for the settings, and two searches."""
    rate_per_s = BEYOND * carried.rate_per_s
    base = search.at(setup, rate_per_s)

    def tried(change: Change) -> Tried:
        return Tried(change.words, search.at(change.setup, rate_per_s).kept)

    short = resources(setup)
    by_resource = {name: tried(change) for name, change in short.items()}
    # Of two that help alike, the one on which more time is spent; they are in that order.
    bottleneck = max(by_resource, key=lambda name: round(by_resource[name].kept_beyond, 2))
    twice = msgspec.structs.replace(
        by_resource[bottleneck], carries=search.carries(short[bottleneck].setup, rate_per_s)
    )
    changes = settings(setup)
    by_setting = [tried(change) for change in changes]
    at = max(range(len(changes)), key=lambda index: by_setting[index].kept_beyond)
    best = None
    if by_setting[at].kept_beyond >= base.kept + _LEAST_HELP:
        carries = search.carries(changes[at].setup, rate_per_s)
        if carries.rate_per_s > carried.rate_per_s:
            best = msgspec.structs.replace(by_setting[at], carries=carries)
    return WhatIf(
        bottleneck=bottleneck,
        kept_beyond=base.kept,
        twice=twice,
        best=best,
        resources=list(by_resource.values()),
        settings=by_setting,
    )


def with_costs(setup: Setup, factor: float) -> Setup:
    """The same where everything takes so many times as long."""
    return setup._replace(costs=setup.costs.scaled(prompts=factor, decode=factor, host=factor))
