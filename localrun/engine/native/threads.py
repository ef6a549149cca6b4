"""Finds out while the engine is idle how many threads suit a model: `ThreadTrial`.

A trial starts when nothing was asked for `QUIET_S`, computes in a small context of its own, so that no sequence of the
engine is touched, and is done in pieces of a few decodes. Between two of them whoever asks for something is served, and
the trial goes on when the engine is idle again. All of it takes about `LIMIT_S` of computing, once for a model on a
machine: what it finds is kept (`localrun.thread_choice`).

Owner: the engine's main thread. The clock is passed in.
Does not: choose (`thread_choice.best`), or know which numbers of threads there are to try (`localrun.processors`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from localrun.engine.backend import Batch
from localrun.processors import Processors
from localrun.thread_choice import MOST_OTHERS, Kept, Shape, Threads, best, find, is_steady
from localrun.wire import Open

log = logging.getLogger("localrun.engine")

QUIET_S = 0.3
LIMIT_S = 1.5
# A first round through all candidates may take so long, or there is no trial: a step of the model takes too long.
ROUND_LIMIT_S = 5.0
MAX_ROUNDS = 7
# Rows of the steps that stand for streams: one, and several at once.
STREAMS = (1, 4)
# Rows of the prompt, and of the prompt of a model whose steps take longer than `SLOW_STEP_S`.
PROMPT_ROWS, SLOW_PROMPT_ROWS = 64, 16
SLOW_STEP_S = 0.05
# Steps of a piece, as long as they take no longer than this together.
N_STEPS = 3
PIECE_S = 0.03
# What a context for this has to hold.
N_CELLS, N_SEQS, N_BATCH = 512, max(STREAMS), PROMPT_ROWS

Clock = Callable[[], float]


@dataclass(frozen=True)
class ThreadPlan:
    """The threads that an engine begins with, and the numbers that it then tries; none where nothing is to be found
    out. `kept` is the entry that a trial makes, but for the threads."""

    start: Threads
    candidates: tuple[int, ...] = ()
    kept: Callable[[Threads, float], Kept] | None = None


def plan_threads(opened: Open, usable: Processors, build: Callable[[], str]) -> ThreadPlan:
    """What the daemon wants comes first, then what was measured. `build` names the library of llama.cpp."""
    if opened.n_threads > usable.n_machine:
        # Each would wait for the others at every barrier, and keep everybody else from the processors meanwhile.
        log.warning("%d threads were asked for; %d compute, one per processor", opened.n_threads, usable.n_machine)
    n_usual = min(opened.n_threads, usable.n_machine) or usable.usual_threads
    plan = ThreadPlan(Threads(n_usual, n_usual))
    if opened.n_threads or not opened.threads_file or not opened.weights_bytes:
        return plan
    shape, library = Shape(opened.n_layers, opened.weights_bytes), build()
    if not opened.use_extra_bufts:
        library += ", plain kernels"
    kept = find(Path(opened.threads_file), usable.identity, library, shape)
    if kept is not None:
        return ThreadPlan(kept)
    candidates = tuple(each.n_threads for each in usable.candidates())
    if len(candidates) == 1:
        return plan

    def entry(threads: Threads, at_s: float) -> Kept:
        return Kept(
            processors=usable.identity, build=library, shape=shape, threads=threads, model=opened.model,
            n_tried=tuple(sorted(candidates)), at_s=at_s,
        )  # fmt: skip

    return ThreadPlan(plan.start, candidates, entry)


class MeasuredContext(Protocol):
    """A context with nothing in it."""

    batch: Batch

    def set_threads(self, threads: Threads) -> None:
        """For the decodes from now on."""

    def decode(self, n_rows: int) -> None:
        """As `Backend.decode`."""

    def seq_remove(self, seq: int, start: int, end: int = -1) -> bool:
        """As `Backend.seq_remove`."""


def step_s(context: MeasuredContext, clock: Clock, *, n_seqs: int, n_each: int, n_steps: int = 1) -> list[float]:
    """Seconds of each of so many steps of `n_each` rows for each of `n_seqs` sequences, which are empty before and
    after."""
    n_rows, seconds = n_seqs * n_each, []
    batch = context.batch
    batch.seq[:n_rows] = [row // n_each for row in range(n_rows)]
    batch.token[:n_rows] = [row * 17 % 251 for row in range(n_rows)]
    batch.wants_logits[:n_rows] = [row % n_each == n_each - 1 for row in range(n_rows)]
    for step in range(n_steps):
        batch.pos[:n_rows] = [step * n_each + row % n_each for row in range(n_rows)]
        began_s = clock()
        context.decode(n_rows)
        seconds.append(clock() - began_s)
    for seq in range(n_seqs):
        context.seq_remove(seq, 0)
    return seconds


class ThreadTrial:
    """See the module. `open_context` makes what is computed in, and `use` takes the result; without one, because the
    model is too slow, the machine is busy or something failed, it is not called. `others_busy_s` is the processor time
    that other programs have taken so far."""

    def __init__(
        self,
        candidates: Sequence[int],
        open_context: Callable[[], AbstractContextManager[MeasuredContext]],
        use: Callable[[Threads], None],
        clock: Clock,
        others_busy_s: Clock = lambda: 0.0,
    ) -> None:
        self._candidates = candidates
        self._open_context = open_context
        self._use = use
        self._clock = clock
        self._others_busy_s = others_busy_s
        self._begins_at_s: float | None = None
        self._pieces: Generator[None] | None = self._measure()
        self._spent_s = self._disturbed_s = 0.0
        self._of_streams: dict[int, dict[int, list[float]]] = {n: {rows: [] for rows in STREAMS} for n in candidates}
        self._of_prompt: dict[int, dict[int, list[float]]] = {n: {PROMPT_ROWS: []} for n in candidates}

    @property
    def is_over(self) -> bool:
        return self._pieces is None

    def __call__(self, is_idle: bool) -> float | None:
        """After every step: do a piece if it is time. Returns how long to wait for requests before the next call, None
        for as long as it takes."""
        if not is_idle or self._pieces is None:
            self._begins_at_s = None
            return None
        now_s = self._clock()
        if self._begins_at_s is None:
            self._begins_at_s = now_s + QUIET_S
        if now_s < self._begins_at_s:
            return self._begins_at_s - now_s
        try:
            next(self._pieces)
        except StopIteration:
            self._pieces = None
        except Exception:
            # The engine serves without; the next load tries again.
            log.exception("the trial of threads failed")
            self._pieces = None
        return None if self._pieces is None else 0.0

    def close(self) -> None:
        """Give it up, and free what it holds."""
        if self._pieces is not None:
            self._pieces.close()
            self._pieces = None

    def _measure(self) -> Generator[None]:
        """The whole trial; after each piece it yields. Every other round goes backwards, so that a machine that slows
        down or warms up favours nobody."""
        with self._open_context() as context:
            yield
            for index in range(MAX_ROUNDS):
                for n_threads in self._candidates[:: -1 if index % 2 else 1]:
                    yield from self._measure_one(context, n_threads)
                    if index == 0 and self._spent_s * len(self._candidates) > ROUND_LIMIT_S:
                        log.info("steps of this model are too long to try numbers of threads")
                        return
                if self._spent_s * (index + 2) / (index + 1) > LIMIT_S:
                    break
        is_quiet = self._disturbed_s <= MOST_OTHERS * self._spent_s
        if is_quiet and is_steady(self._of_streams) and is_steady(self._of_prompt):
            self._use(Threads(decode=best(self._of_streams), prompt=best(self._of_prompt)))
        else:
            log.info("this machine is too busy to tell how many threads are best")

    def _measure_one(self, context: MeasuredContext, n_threads: int) -> Iterator[None]:
        """Everything once with so many threads."""
        context.set_threads(Threads(n_threads, n_threads))
        for rows in STREAMS:
            self._of_streams[n_threads][rows] += self._piece(context, n_seqs=rows, n_each=1)
            yield
        is_slow = self._of_streams[self._candidates[0]][1][0] > SLOW_STEP_S
        n_each = SLOW_PROMPT_ROWS if is_slow else PROMPT_ROWS
        self._of_prompt[n_threads][PROMPT_ROWS] += self._piece(context, n_seqs=1, n_each=n_each)
        yield

    def _piece(self, context: MeasuredContext, *, n_seqs: int, n_each: int) -> list[float]:
        """Seconds of some steps, after one of a single row that wakes the threads."""
        began_s, others_s = self._clock(), self._others_busy_s()
        step_s(context, self._clock, n_seqs=1, n_each=1)
        seconds: list[float] = []
        while not seconds or (len(seconds) < N_STEPS and sum(seconds) + seconds[-1] < PIECE_S):
            seconds += step_s(context, self._clock, n_seqs=n_seqs, n_each=n_each)
        self._spent_s += self._clock() - began_s
        self._disturbed_s += self._others_busy_s() - others_s
        return [min(seconds)]
