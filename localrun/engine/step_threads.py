"""How many threads compute: as few as are quickest, found out while the engine is at work. Pure.

More threads are not always quicker. A step of one stream reads all weights for little work, and waits at some hundred
barriers; beside the daemon, its clients and whatever else runs, each of these waits for a thread that another program
keeps from its processor. Measured with a 135M model on two processors: one stream made 231 tokens/s with two threads
on a quiet machine and 208 with one; beside one busy process 56 with two and 185 to 208 with one.

`StepThreads`: now and then some steps of streams are computed with another number of threads, and the quicker number
stays. Steps of similar numbers of rows are one `_Kind`. A trial that changed nothing makes the next one come later;
steps that suddenly take much longer, or much less, make it come at once.

`PromptThreads`: a batch of prompts is too long for trials. It gets as many threads as there are processors to be had:
those that this process used lately, and those that nobody used. Beside four busy processes on two processors, a prompt
of 1,024 tokens was computed at 325 to 516 tokens/s by one thread, and at 143 to 284 by two.

Does not: read a clock, or set threads (`llama_context.py`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

# Steps of a trial, after one that finds the threads asleep.
TRIAL_STEPS = 3
# Another number of threads must be quicker by this, or fewer would come and go with the noise.
LEAST_GAIN = 0.03
# Steps between two trials: at first, and at most. So trials are less than one step in a hundred, in the long run.
FIRST_PAUSE, LONGEST_PAUSE = 16, 256
# A step, but for the first, that takes so many times the usual ends a trial, and the next one comes much later.
HOPELESS = 1.25
# Recent steps take so many times as long as before the last trial, or as little: others have come or gone.
CHANGED = 1.3
_N_RECENT = 7
# Processors are counted over at least so long; the clocks tick a hundred times a second.
WINDOW_S = 0.2
# After so long without a prompt, what others used meanwhile says nothing about now.
STALE_S = 1.0
# A processor is to be had if less than so much of it is missing. The daemon and its clients need some; and a program
# that computes all the time leaves 1.33 of two processors to two threads.
SPARE = 0.6


class StepThreads:
    """See the module. `most` threads are used at first, and never more."""

    def __init__(self, most: int) -> None:
        self._counts = sorted({*(1 << power for power in range(most.bit_length())), most})
        self._counts = [count for count in self._counts if count <= most]
        self._kinds: dict[int, _Kind] = {}

    def choose(self, n_rows: int) -> int:
        """Threads for a step of so many rows."""
        return self._counts[self._kind(n_rows).choose()]

    def note(self, n_rows: int, seconds: float) -> None:
        """A step with the threads that `choose` said took so long."""
        self._kind(n_rows).note(seconds)

    def _kind(self, n_rows: int) -> _Kind:
        """1 row, 2, 3 to 4, 5 to 8, 9 to 16, ..."""
        number = (n_rows - 1).bit_length()
        kind = self._kinds.get(number)
        if kind is None:
            kind = self._kinds[number] = _Kind(len(self._counts))
        return kind


class _Kind:
    """One kind of steps. Numbers of threads are indices here, from 0 to `n_counts` - 1."""

    def __init__(self, n_counts: int) -> None:
        self._n_counts = n_counts
        self._current = n_counts - 1
        self._recent: deque[float] = deque(maxlen=_N_RECENT)
        self._usual_s = 0.0
        self._trial: int | None = None
        self._trial_times: list[float] = []
        self._tries_fewer = True
        self._pause = FIRST_PAUSE
        self._n_until_trial = FIRST_PAUSE

    def choose(self) -> int:
        return self._current if self._trial is None else self._trial

    def note(self, seconds: float) -> None:
        if self._trial is None:
            self._note_usual(seconds)
        else:
            self._note_trial(seconds)

    def _note_usual(self, seconds: float) -> None:
        self._recent.append(seconds)
        self._n_until_trial -= 1
        if len(self._recent) < _N_RECENT or self._n_counts == 1:
            return
        recent_s = statistics.median(self._recent)
        has_changed = not self._usual_s / CHANGED < recent_s < self._usual_s * CHANGED
        if has_changed and self._pause > FIRST_PAUSE:
            self._pause, self._n_until_trial = FIRST_PAUSE, 0
        if self._n_until_trial <= 0:
            self._usual_s = recent_s
            self._trial, self._trial_times = self._neighbour(), []

    def _neighbour(self) -> int:
        """Fewer threads and more in turn, as far as there are any."""
        if self._current in (0, self._n_counts - 1):
            return 1 if self._current == 0 else self._n_counts - 2
        self._tries_fewer = not self._tries_fewer
        return self._current + (-1 if self._tries_fewer else 1)

    def _note_trial(self, seconds: float) -> None:
        self._trial_times.append(seconds)
        # The first step may have to wake threads, and says nothing.
        is_hopeless = len(self._trial_times) > 1 and seconds > HOPELESS * self._usual_s
        if len(self._trial_times) <= TRIAL_STEPS and not is_hopeless:
            return
        assert self._trial is not None
        if is_hopeless:
            self._pause = min(LONGEST_PAUSE, 4 * self._pause)
        elif statistics.median(self._trial_times[1:]) >= (1 - LEAST_GAIN) * self._usual_s:
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
        else:
            self._current = self._trial
            self._recent.clear()
            self._pause = FIRST_PAUSE
        self._n_until_trial = self._pause
        self._trial = None


class Usage(NamedTuple):
    """Three clocks: the time, how long the threads of this process have computed, and how long the processors of this
    machine were idle, both in all."""

    at_s: float
    own_s: float
    idle_s: float


class PromptThreads:
    """See the module. `read` tells what the clocks say."""

    def __init__(self, read: Callable[[], Usage]) -> None:
        self._read = read
        self._before = Usage(0.0, 0.0, 0.0)
        self._ended_at_s = -math.inf
        self._n_available = math.inf

    def choose(self, most: int) -> int:
        """Threads for a batch of prompts, from 1 to `most`."""
        now = self._read()
        seconds = now.at_s - self._before.at_s
        if now.at_s - self._ended_at_s > STALE_S:
            self._n_available, self._before = math.inf, now
        elif seconds >= WINDOW_S:
            self._n_available = (now.own_s - self._before.own_s + now.idle_s - self._before.idle_s) / seconds
            self._before = now
        return most if self._n_available + SPARE >= most else max(1, int(self._n_available + SPARE))

    def note_end(self, at_s: float) -> None:
        """The batch that `choose` was asked about has been computed."""
        self._ended_at_s = at_s
