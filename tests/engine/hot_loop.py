"""What a step costs in Python, over a backend that computes nothing: `python -m tests.engine.hot_loop [SLOTS ...]`.

Prints the median time of a steady step with its message, once with one pool of cells and once with split streams. With
`--profile` also where it goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from localrun import framing
from localrun.engine import pipes
from localrun.engine.backend import Sampler
from localrun.engine.engine import Engine, Limits
from localrun.engine.report import Beside, at_once
from localrun.wire import KvRun, Sampling, Submit
from tests.fakes.backend import FakeBackend

N_CELLS = 1 << 17
N_STEPS, N_ROUNDS = 300, 5


class NoBackend(FakeBackend):
    """Decodes nothing, and its tokens are random letters, which nobody drafts."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        self._random = random.Random(1)

    def decode(self, n_rows: int) -> None:
        pass

    def is_finite(self, row: int) -> bool:
        return True

    def sample(self, wanted: Sequence[tuple[Sampler, int]]) -> list[int]:
        return self._random.choices(range(97, 123), k=len(wanted))


class HotLoop:
    """An engine whose slots are all taken by streams that never end, each behind a prompt of `n_prompt` tokens."""

    def __init__(
        self,
        n_slots: int,
        *,
        is_split: bool,
        n_cells: int = N_CELLS,
        n_prompt: int = 50,
        n_batch: int = 512,
        clock: Callable[[], float] = time.monotonic,
        beside: Beside[list[KvRun]] = at_once,
    ) -> None:
        self.backend = NoBackend(n_cells=n_cells, n_seqs=n_slots, n_batch=n_batch, n_slots=n_slots if is_split else 0)
        self.engine = Engine(self.backend, Limits(n_slots, 256, 0.14, 1 << 29), clock, beside=beside)
        sampling = Sampling(temperature=0)
        for index in range(n_slots):
            submit = Submit(id=index + 1, sampling=sampling, n_predict=n_cells, ignore_eos=True)
            self.engine.submit(submit, [(at * 17 + index * 131) % 200 + 3 for at in range(n_prompt)])
        while any(request.is_prefilling for request in self.engine.scheduler.running) or self.engine.scheduler.waiting:
            self.step()
        for _ in range(10):
            self.step()

    def step(self) -> None:
        """A step, and its message encoded."""
        step = self.engine.step()
        if step is not None:
            framing.encode(step)

    def times_s(self, n_steps: int, clock: Callable[[], float]) -> list[float]:
        """How long each of so many steps took, by this clock."""
        times = []
        for _ in range(n_steps):
            began_s = clock()
            self.step()
            times.append(clock() - began_s)
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("slots", nargs="*", type=int, default=[8, 64])
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    for n_slots in asked.slots:
        for is_split in (False, True):
            loop = HotLoop(n_slots, is_split=is_split, beside=pipes.in_thread("map"))
            rounds = [loop.times_s(N_STEPS, time.perf_counter) for _ in range(N_ROUNDS)]
            medians = " ".join(f"{1e3 * statistics.median(times):.3f}" for times in rounds)
            longest = 1e3 * max(map(max, rounds))
            print(f"{n_slots} slots, {'split' if is_split else 'one pool'}: {medians} ms, longest {longest:.1f}")
            if asked.profile:
                profile = cProfile.Profile()
                profile.runcall(loop.times_s, N_STEPS, time.perf_counter)
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
