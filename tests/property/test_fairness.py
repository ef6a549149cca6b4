"""Fairness between clients over random traces of the real engine on the fake backend.

The bound is that of the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024):
while two clients both have requests waiting, the service that they get over any interval differs by at most
2 * max(w_p * L_input, w_q * M), where w_p and w_q weigh prompt and output tokens, L_input is the longest prompt and M
the most tokens that the running batch can have.

Why it holds here. Let c be a client's counter: w_p times the uncached prompt when a request of it starts, and w_q for
each output token. Take the last start of a request of f before some moment. Then f had the least counter of all that
waited, so c_f <= c_g. Since then c_f grew by that prompt and by output of requests of f that ran at that start, which
together are tokens of one running batch: by w_q * M at most, for w_q >= w_p, or by w_p * L_input if that alone is more.
So c_f - c_g <= U = max(w_p * L_input, w_q * M) at every moment, and c_g - c_f likewise; over an interval the difference
of what was added to the two is at most 2 * U.

Assumed, as in the paper: one lane, and nobody starves; both clients wait all the time; whoever is next is not overtaken
for want of cells (a request that waits for another to compute their common beginning may be: prompts differ here).
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.schedule.policy import OUTPUT_WEIGHT, STARVED_S
from localrun.wire import Finish, Lane
from tests.depth import DEPTH
from tests.engine.harness import Harness, expected_output

N_STEPS = 100

clients = st.fixed_dictionaries(
    {"n_prompt": st.integers(1, 60), "n_output": st.integers(1, 40), "spread": st.floats(0.0, 1.0)}
)


class Backlog:
    """Keeps `n_waiting` requests of one client waiting, of random lengths up to its own limits."""

    def __init__(self, harness: Harness, name: str, shape: dict[str, float], *, n_waiting: int, seed: int) -> None:
        self.name = name
        self.ids: set[int] = set()
        self._harness, self._shape, self._n_waiting = harness, shape, n_waiting
        self._random = random.Random(seed)

    def refill(self) -> None:
        waiting = sum(request.client == self.name for request in self._harness.engine.scheduler.waiting)
        for _ in range(self._n_waiting - waiting):
            request_id = len(self._harness.asked)
            n_output = self._length(self._shape["n_output"])
            prompt = [self._random.randrange(256) for _ in range(self._length(self._shape["n_prompt"]))]
            self._harness.asked[request_id] = (self.name, len(prompt), n_output)
            self._harness.submit(request_id, prompt, n_predict=n_output, client=self.name, lane=Lane.INTERACTIVE)

    def _length(self, limit: float) -> int:
        return max(1, round(limit * (1 - self._shape["spread"] * self._random.random())))


class Measured(Harness):
    """Counts service from the published steps alone, whatever the scheduler counts."""

    def __init__(self, *, n_slots: int, n_batch: int) -> None:
        super().__init__(n_cells=4096, n_slots=n_slots, n_batch=n_batch, n_seqs=n_slots + 4, ram_cache_bytes=0)
        self.asked: dict[int, tuple[str, int, int]] = {}
        self.service: Counter[str] = Counter()
        self.batch_tokens = 0
        self._running: set[int] = set()

    def _clock(self) -> float:
        self.now_s += 1e-4  # nobody starves in these traces
        return self.now_s

    def check(self) -> None:
        """Other traces check the books; these are about service."""

    def measured_step(self) -> None:
        step = self.step()
        assert step is not None
        for started in step.started:
            self._running.add(started.id)
            self.service[self.asked[started.id][0]] += started.n_prompt - started.n_cached
        self.batch_tokens = max(self.batch_tokens, sum(sum(self.asked[one][1:]) for one in self._running))
        for delta in step.deltas:
            self.service[self.asked[delta.id][0]] += OUTPUT_WEIGHT * len(delta.tokens)
            if delta.finish is not None:
                self._running.discard(delta.id)


@given(clients, clients, st.integers(1, 6), st.sampled_from([32, 64]), st.integers(0, 2**32), st.integers(0, 3))
@settings(max_examples=30 * DEPTH)
def test_the_service_of_two_backlogged_clients_differs_by_no_more_than_the_bound(
    f_shape, g_shape, n_slots, n_batch, seed, n_others
):
    harness = Measured(n_slots=n_slots, n_batch=n_batch)
    # More than can start at once, so that neither is ever without a waiting request.
    backlogs = [
        Backlog(harness, "f", f_shape, n_waiting=n_slots + 1, seed=seed),
        Backlog(harness, "g", g_shape, n_waiting=n_slots + 1, seed=seed + 1),
    ]
    others = [Backlog(harness, f"other {n}", g_shape, n_waiting=1, seed=seed + 2 + n) for n in range(n_others)]
    least = most = 0
    for n_step in range(N_STEPS):
        for backlog in backlogs:
            backlog.refill()
        if n_step % 3 == 0:
            for other in others:
                other.refill()
        harness.measured_step()
        difference = harness.service["f"] - harness.service["g"]
        least, most = min(least, difference), max(most, difference)
    assert harness.now_s < STARVED_S
    longest = max(f_shape["n_prompt"], g_shape["n_prompt"])
    bound = 2 * max(longest, OUTPUT_WEIGHT * harness.batch_tokens)
    # The most that any interval of the trace saw.
    assert most - least <= bound


def test_a_mouse_beside_a_hog_waits_for_a_turn_and_not_for_the_hog():
    harness = Harness(n_cells=4096, n_slots=2, n_seqs=8, max_queue=256)
    for number in range(100):
        harness.submit(number, [number] * 20, n_predict=20, client="hog")
    for _ in range(30):
        harness.step()
    harness.submit(1000, [7, 8, 9], n_predict=5, client="mouse")
    n_before = sum(delta.finish is not None for delta in harness.finals.values())
    while 1000 not in harness.finals:
        harness.step()
    n_hog = len(harness.finals) - 1 - n_before
    assert n_hog <= 2, "the mouse was next as soon as a slot came free"


@pytest.mark.parametrize("n_hogs", [1, 3])
def test_a_mouse_s_place_in_the_queue_does_not_depend_on_how_much_the_hogs_have_waiting(n_hogs):
    harness = Harness(n_cells=4096, n_slots=1, n_seqs=8, max_queue=256)
    for number in range(60):
        harness.submit(number, [number] * 20, n_predict=20, client=f"hog {number % n_hogs}")
    harness.step()
    harness.submit(1000, [7, 8, 9], client="mouse")
    step = harness.step()
    assert step is not None
    assert step.queue is not None
    assert step.queue.index(1000) <= n_hogs


def test_batch_goes_on_below_a_flood_of_interactive_requests():
    """Every slot is wanted by higher lanes all the time; aging lets the batch request through."""
    harness = Harness(n_cells=1024, n_slots=2, n_seqs=8)
    harness.submit(0, [1, 2, 3], n_predict=30, client="job", lane=Lane.BATCH)
    number = 0
    while 0 not in harness.finals:
        while len(harness.engine.scheduler.waiting) < 3:
            number += 1
            harness.submit(number, [number % 256, 5], n_predict=4, client=f"chat {number % 3}", lane=Lane.INTERACTIVE)
        harness.step()
        harness.now_s += 1.0
        assert harness.now_s < 600, "starved"
    assert harness.tokens[0] == expected_output([1, 2, 3], 30)


def test_a_thousand_submits_with_random_cancels_leave_nothing_behind():
    chance = random.Random(1)
    harness = Harness(n_cells=512, n_slots=8, n_seqs=24, max_queue=1000, ram_cache_bytes=1 << 16)
    prompts = {number: [chance.randrange(256) for _ in range(chance.randrange(1, 40))] for number in range(1000)}
    for number, prompt in prompts.items():
        harness.submit(
            number,
            prompt,
            n_predict=chance.randrange(20),
            client=f"client {number % 7}",
            lane=chance.choice(list(Lane)),
        )
        if chance.random() < 0.3:
            harness.engine.cancel(chance.randrange(number + 1))
        if chance.random() < 0.1:
            harness.step()
    harness.run(max_steps=20_000)
    assert len(harness.finals) == 1000
    for number, final in harness.finals.items():
        whole = expected_output(prompts[number], len(harness.tokens.get(number, [])))
        assert harness.tokens.get(number, []) == whole
        assert final.finish in (Finish.LENGTH, Finish.CANCELLED)
    assert harness.backend.n_open_samplers == 0
    assert harness.backend.n_used == 0
    scheduler = harness.engine.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    assert not any(scheduler.policy.service(f"client {number}") for number in range(7))
