"""How many threads compute a step of streams: as few as are quickest, found out while steps are computed. Pure.

More threads are not always quicker. A step of one stream reads all weights for little work, and waits at some hundred
barriers; beside the daemon, its clients and whatever else runs, each of these waits for a thread that another program
keeps from its processor. Measured with a 135M model on two processors: one stream made 231 tokens/s with two threads
on a quiet machine and 208 with one; beside one busy process 56 with two and 185 to 208 with one.

So now and then some steps are computed with another number of threads, and the quicker number stays. Steps of similar
numbers of rows are one `_Kind`. A trial that changed nothing makes the next one come later; steps that suddenly take
much longer make it come at once.

Does not: measure time, or set threads (`llama.py`); decide about prompts, whose operations are long and barriers few.
"""

from __future__ import annotations

import statistics
from collections import deque

# Steps of a trial, after one that finds the threads asleep.
TRIAL_STEPS = 3
# Another number of threads must be quicker by this, or fewer would come and go with the noise.
LEAST_GAIN = 0.03
# Steps between two trials: at first, and at most. So trials are at most one step in a hundred, in the long run.
FIRST_PAUSE, LONGEST_PAUSE = 16, 512
# A first step that takes so many times the usual ends a trial.
HOPELESS = 2.0
# Recent steps that take so many times as long as those at the last trial did: something has changed.
CHANGED = 1.3
_N_RECENT = 7


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
        if self._usual_s and recent_s > CHANGED * self._usual_s and self._pause > FIRST_PAUSE:
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
        is_hopeless = seconds > HOPELESS * self._usual_s
        if len(self._trial_times) <= TRIAL_STEPS and not is_hopeless:
            return
        assert self._trial is not None
        if not is_hopeless and statistics.median(self._trial_times[1:]) < (1 - LEAST_GAIN) * self._usual_s:
            self._current = self._trial
            self._recent.clear()
            self._pause = FIRST_PAUSE
        else:
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
        self._n_until_trial = self._pause
        self._trial = None
