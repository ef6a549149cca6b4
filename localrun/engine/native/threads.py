"""How many threads compute: found out at work (`StepThreads`, `PromptThreads`), and when idle (`ThreadTrial`); and
whose turn it is (`ComputeLock`).

Owner: the engine's main thread, but for the lock. The clock is passed in.
Does not: set threads (`context.py`).
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from localrun.engine.backend import Batch
from localrun.hardware.processors import Processors
from localrun.hardware.thread_choice import MOST_OTHERS, ModelShape, SavedChoice, Threads, best, find, is_steady
from localrun.wire import Open

# Steps of a trial, after one that finds the threads asleep.
TRIAL_STEPS = 3
# Another number of threads must be quicker by this, or fewer would come and go with the noise.
LEAST_GAIN = 0.05
# Steps between two trials: at first, and at most. So trials are less than one step in a hundred, in the long run.
FIRST_PAUSE, LONGEST_PAUSE = 16, 256
# A step that takes so many times the usual ends a trial, and the next one comes much later. The first step of a trial
# may have to wake threads, and is given more time.
HOPELESS, HOPELESS_AT_FIRST = 1.25, 4.0
# Recent steps take so many times as long as before the last trial, or as little: others have come or gone.
CHANGED = 1.3
# A single step takes so many times the usual: threads wait for one that has lost its processor.
STUCK = 8.0
_N_RECENT = 5
# Processors are counted over at least so long; the clocks tick a hundred times a second.
WINDOW_S = 0.2
# While streams are computed, so often; that costs a tenth of a millisecond.
LOOK_EVERY_S = 0.5
# After so long in which we computed nothing, what others used meanwhile says nothing about now.
STALE_S = 1.0
# Nor if we used less than so much of a processor: most of what others used was while we were not there.
PRESENT = 0.75
# A processor is to be had if less than so much of it is missing. The daemon and its clients need some; and a program
# that computes all the time leaves 1.33 of two processors to two threads.
SPARE = 0.6
# A piece of a graph takes about this long: cutting costs some 20 us, and streams wait for half a piece on average.
PIECE_S = 0.004
PATIENCE_S = 2 * PIECE_S


class StepThreads:
    """How many threads compute the streams' steps: as few as are quickest, found out while the engine is at work.

    More threads are not always quicker. A step of one stream reads all weights for little work, and waits at some
    hundred barriers; beside the daemon, its clients and whatever else runs, each of these waits for a thread that
    another program keeps from its processor. Measured with a 135M model on two processors: one stream made 231 tokens/s
    with two threads on a quiet machine and 208 with one; beside one busy process 56 with two and 185 to 208 with one.

    Now and then some steps are computed with another number of threads, and the quicker number stays. Steps of similar
    numbers of rows are one `_StepKind`, whether the rows are streams or drafts: 8 rows of one stream compute four times
    as much as one, and two threads that do nothing for one row take 0.6 times as long as one thread for 8. A new kind
    begins with what is known of more rows, or else with all threads. A trial that changed nothing makes the next one
    come later. Steps that suddenly take much longer make a trial of fewer threads come at once, and steps
    that take much less one of more. More threads than there are processors to be had are not tried: one step of theirs
    took up to seven seconds, waiting for a thread that had lost its processor.

    `most` threads are used at first, and never more.

    Does not: read a clock, or set threads (`context.py`).
    """

    def __init__(self, most: int) -> None:
        self._counts = sorted({*(1 << power for power in range(most.bit_length())), most})
        self._counts = [count for count in self._counts if count <= most]
        self._kinds: dict[int, _StepKind] = {}

    def choose(self, n_rows: int, limit: int | None = None) -> int:
        """Threads for a step of so many rows. With more than `limit` no kind begins, and none is tried."""
        most = len(self._counts) - 1 if limit is None else max(0, bisect_right(self._counts, limit) - 1)
        return self._counts[self._kind(n_rows, most).choose(most)]

    def note(self, n_rows: int, seconds: float) -> None:
        """A step with the threads that `choose` said took so long."""
        self._kind(n_rows, 0).note(seconds)

    def _kind(self, n_rows: int, most: int) -> _StepKind:
        """1 row, 2, 3 to 4, 5 to 8, 9 to 16, ..."""
        number = (n_rows - 1).bit_length()
        kind = self._kinds.get(number)
        if kind is None:
            above = min((known for known in self._kinds if known > number), default=None)
            wanted = len(self._counts) - 1 if above is None else self._kinds[above].wanted
            kind = self._kinds[number] = _StepKind(len(self._counts), min(most, wanted), wanted)
        return kind


class _StepKind:
    """One kind of steps. Numbers of threads are indices here, from 0 to `n_counts` - 1."""

    def __init__(self, n_counts: int, current: int, wanted: int) -> None:
        self.current = current
        self.wanted = wanted  # it would have begun with so many, had there been the processors
        self._n_counts = n_counts
        self._recent: deque[float] = deque(maxlen=_N_RECENT)
        self._usual_s = 0.0
        self._trial: int | None = None
        self._trial_times: list[float] = []
        self._tries_fewer = False
        self._last_change = 0
        self._pause = FIRST_PAUSE
        self._n_until_trial = FIRST_PAUSE

    def choose(self, most: int) -> int:
        if self.current < self.wanted and most > self.current:
            # Whoever kept it from beginning with more is gone.
            self.current = min(most, self.wanted)
            self._recent.clear()
            self._trial, self._usual_s, self._n_until_trial = None, 0.0, self._pause
        if self._trial is not None and self._trial > max(most, self.current):
            self._trial, self._n_until_trial = None, self._pause
        return self.current if self._trial is None else self._trial

    def note(self, seconds: float) -> None:
        if self._trial is None:
            self._note_usual(seconds)
        else:
            self._note_trial(seconds)

    def _note_usual(self, seconds: float) -> None:
        if self._n_counts == 1:
            return
        usual_s = self._usual_s or min(self._recent, default=math.inf)
        self._recent.append(seconds)
        self._n_until_trial -= 1
        if seconds > STUCK * usual_s and self.current > 0:
            # Against this step, for what was usual is over; if it was a chance, the next trial says so soon.
            self._begin(self.current - 1, seconds)
            return
        if len(self._recent) < _N_RECENT:
            return
        recent_s = statistics.median(self._recent)
        if self._usual_s and recent_s > self._usual_s * CHANGED:
            self._change(-1, recent_s)
        elif recent_s < self._usual_s / CHANGED:
            self._change(1, recent_s)
        elif self._n_until_trial <= 0:
            self._begin(self._neighbour(), recent_s)

    def _change(self, direction: int, recent_s: float) -> None:
        """Others have come, so that fewer threads may be better, or gone."""
        to = self.current + direction
        if 0 <= to < self._n_counts:
            self._begin(to, recent_s)
        else:
            self._usual_s = recent_s

    def _begin(self, trial: int, usual_s: float) -> None:
        self._usual_s = usual_s
        self._trial, self._trial_times = trial, []

    def _neighbour(self) -> int:
        """Fewer threads and more in turn, as far as there are any."""
        if self.current in (0, self._n_counts - 1):
            return 1 if self.current == 0 else self._n_counts - 2
        self._tries_fewer = not self._tries_fewer
        return self.current + (-1 if self._tries_fewer else 1)

    def _note_trial(self, seconds: float) -> None:
        self._trial_times.append(seconds)
        is_hopeless = seconds > (HOPELESS_AT_FIRST if len(self._trial_times) == 1 else HOPELESS) * self._usual_s
        if len(self._trial_times) <= TRIAL_STEPS and not is_hopeless:
            return
        assert self._trial is not None
        if is_hopeless:
            self._pause = min(LONGEST_PAUSE, 4 * self._pause)
        elif statistics.median(self._trial_times[1:]) >= (1 - LEAST_GAIN) * self._usual_s:
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
        else:
            change = 1 if self._trial > self.current else -1
            trial_s = statistics.median(self._trial_times[1:])
            # To and fro is a close call, which is not worth many trials, unless it changes much: then others come and
            # go.
            is_close = change == -self._last_change and trial_s * CHANGED > self._usual_s
            self._pause = min(LONGEST_PAUSE, 2 * self._pause) if is_close else FIRST_PAUSE
            self._last_change = change
            self.current = self.wanted = self._trial
            self._usual_s = trial_s
            self._recent.clear()
        self._n_until_trial = self._pause
        self._trial = None


class Helpers:
    """The threads of this process that compute beside the steps just now, such as one that copies a state.

    Each of them needs one of the `n_processors`. A step with as many threads as there are processors would wait at its
    barriers for the thread that has lost its own: 64 to 180 ms instead of 11, on two processors. `with` this a thread
    is one of them; any thread may be.
    """

    def __init__(self, n_processors: int) -> None:
        self._n_processors = n_processors
        self._begun = itertools.count(1)
        self._busy: list[None] = []  # a list and a count change in one operation of the interpreter
        self.n_begun = 0

    @property
    def n_busy(self) -> int:
        return len(self._busy)

    def leave(self, n_threads: int) -> int:
        """How many of so many threads have a processor beside the helpers; at least one."""
        n_busy = self.n_busy
        return max(1, min(n_threads, self._n_processors - n_busy)) if n_busy else n_threads

    def __enter__(self) -> None:
        self._busy.append(None)
        self.n_begun = next(self._begun)

    def __exit__(self, *_: object) -> None:
        self._busy.pop()


class FewerThreads(NamedTuple):
    """What is known of this moment, for all contexts of a model. Two threads may ask at once; then a window of the
    clocks is shorter than it should be, and the next one is right again."""

    steps: StepThreads
    prompts: PromptThreads
    helpers: Helpers


class Usage(NamedTuple):
    """Three clocks: the time, how long the threads of this process have computed, and how long the processors of this
    machine were idle, both in all."""

    at_s: float
    own_s: float
    idle_s: float


class PromptThreads:
    """How many threads compute a batch of prompts, which is too long for trials: as many as there are processors to be
    had, which are those that this process used lately, and those that nobody used.

    When little of ours computed lately, what can be run this very moment is counted, until there is something better.
    Beside four busy processes on two processors, a prompt of 1,024 tokens was computed at 325 to 516 tokens/s by one
    thread, and at 143 to 284 by two.

    `read` tells what the clocks say, and `n_free` how many processors nobody else has work for at this moment, infinite
    where that cannot be told.
    """

    def __init__(self, read: Callable[[], Usage], n_free: Callable[[], float] = lambda: math.inf) -> None:
        self._read = read
        self._n_free = n_free
        self._before = Usage(0.0, 0.0, 0.0)
        self._computed_at_s = -math.inf
        self._n_available = math.inf
        self._is_guess = True

    def choose(self, most: int) -> int:
        """Threads for a batch of prompts, from 1 to `most`."""
        now = self._read()
        is_stale = now.at_s - self._computed_at_s > STALE_S
        if is_stale or now.own_s - self._before.own_s < PRESENT * (now.at_s - self._before.at_s):
            n_free = self._n_free()
            if is_stale or n_free < math.inf:
                self._n_available, self._before, self._is_guess = n_free, now, True
                return self.limit(most)
        self._look(now)
        return self.limit(most)

    def limit(self, most: int) -> int:
        """The same by what was known last."""
        return most if self._n_available + SPARE >= most else max(1, int(self._n_available + SPARE))

    def note_step(self, at_s: float) -> None:
        """A step of streams was computed."""
        is_known = at_s - self._computed_at_s <= STALE_S
        self._computed_at_s = at_s
        if not is_known:
            self._before = self._read()
        elif at_s - self._before.at_s > (WINDOW_S if self._is_guess else LOOK_EVERY_S):
            self._look(self._read())

    def note_batch(self, at_s: float) -> None:
        """The batch of prompts that `choose` was asked about was computed."""
        self._computed_at_s = at_s

    def _look(self, now: Usage) -> None:
        seconds = now.at_s - self._before.at_s
        if seconds >= WINDOW_S:
            self._n_available = (now.own_s - self._before.own_s + now.idle_s - self._before.idle_s) / seconds
            self._before, self._is_guess = now, False


class ComputeLock:
    """Whose graph is computed. A step waits for the piece at hand; after it whoever waits longest computes a piece.

    Some graphs are computed *beside* others, with threads of their own. They wait as all do before a piece. But one
    of their operations may take seconds, and nobody waits for it longer than `PATIENCE_S`: it goes on meanwhile.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: object = None
        self._is_beside = False  # a piece of a graph beside others is being computed
        self._n_steps = 0  # that wait
        self.ring: Callable[[], None] = lambda: None  # is told when a thread's job is over
        self._line: deque[object] = deque()

    @contextmanager
    def step(self) -> Iterator[bool]:
        """Nothing else begins inside of this. The value is whether nothing else is computed."""
        with self._changed:
            self._n_steps += 1
            self._changed.wait_for(lambda: self._holder is None)
            self._n_steps -= 1
            self._holder = self
            is_alone = self._wait_for_those_beside()
        try:
            yield is_alone
        finally:
            self.leave()

    def take(self, *, beside: bool = False) -> None:
        """Wait for a turn."""
        place = object()
        with self._changed:
            self._line.append(place)
            self._hand_on()
            self._changed.wait_for(lambda: self._holder is place)
            if not beside:
                self._wait_for_those_beside()
                return
            self._is_beside, self._holder = True, None
            self._hand_on()
            self._changed.notify_all()

    def leave(self, *, beside: bool = False) -> None:
        """The turn is over."""
        with self._changed:
            is_step = not beside and self._holder is self
            if beside:
                self._is_beside = False
            else:
                self._holder = None
            self._hand_on(is_after_step=is_step)
            self._changed.notify_all()

    def is_wanted(self, *, beside: bool = False) -> bool:
        """Whether somebody waits, or computes beside this one."""
        return bool(self._n_steps or self._line or (beside and self._holder is not None))

    def _hand_on(self, *, is_after_step: bool = False) -> None:
        """Not only free it: who is woken by that would find that the next step has overtaken it."""
        if self._holder is None and self._line and (is_after_step or not self._n_steps):
            self._holder = self._line.popleft()
            self._changed.notify_all()

    def _wait_for_those_beside(self) -> bool:
        return self._changed.wait_for(lambda: not self._is_beside, PATIENCE_S)


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
TRIAL_PIECE_S = 0.03
# What a context for this has to hold.
N_CELLS, N_SEQS, N_BATCH = 512, max(STREAMS), PROMPT_ROWS

Clock = Callable[[], float]


@dataclass(frozen=True)
class ThreadPlan:
    """The threads that an engine begins with, and the numbers that it then tries; none where nothing is to be found
    out. `kept` is the entry that a trial makes, but for the threads."""

    start: Threads
    candidates: tuple[int, ...] = ()
    kept: Callable[[Threads, float], SavedChoice] | None = None


def plan_threads(opened: Open, usable: Processors, build: Callable[[], str]) -> ThreadPlan:
    """What the daemon wants comes first, then what was measured. `build` names the library of llama.cpp."""
    if opened.n_threads > usable.n_machine:
        # Each would wait for the others at every barrier, and keep everybody else from the processors meanwhile.
        log.warning("%d threads were asked for; %d compute, one per processor", opened.n_threads, usable.n_machine)
    n_usual = min(opened.n_threads, usable.n_machine) or usable.usual_threads
    plan = ThreadPlan(Threads(n_usual, n_usual))
    if opened.n_threads or not opened.threads_file or not opened.weights_bytes:
        return plan
    shape, library = ModelShape(opened.n_layers, opened.weights_bytes), build()
    if not opened.use_extra_bufts:
        library += ", plain kernels"
    kept = find(Path(opened.threads_file), usable.identity, library, shape)
    if kept is not None:
        return ThreadPlan(kept)
    candidates = tuple(each.n_threads for each in usable.candidates())
    if len(candidates) == 1:
        return plan

    def entry(threads: Threads, at_s: float) -> SavedChoice:
        return SavedChoice(
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
    """Finds out while the engine is idle how many threads suit a model.

    A trial starts when nothing was asked for `QUIET_S`, computes in a small context of its own, so that no sequence of
    the engine is touched, and is done in pieces of a few decodes. Between two of them whoever asks for something is
    served, and the trial goes on when the engine is idle again. All of it takes about `LIMIT_S` of computing, once for
    a model on a machine: what it finds is kept (`localrun.hardware.thread_choice`).

    Owner: the engine's main thread. The clock is passed in.
    Does not: choose (`thread_choice.best`), or know which numbers of threads there are to try (`processors.py`).

    `open_context` makes what is computed in, and `use` takes the result; without one, because the
    model is too slow, the machine is busy or something failed, it is not called. `others_busy_s` is the processor time
    that other programs have taken so far.
    """

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
        while not seconds or (len(seconds) < N_STEPS and sum(seconds) + seconds[-1] < TRIAL_PIECE_S):
            seconds += step_s(context, self._clock, n_seqs=n_seqs, n_each=n_each)
        self._spent_s += self._clock() - began_s
        self._disturbed_s += self._others_busy_s() - others_s
        return [min(seconds)]
