"""Numbers of threads that were measured to be best: the rule that chooses them, and the file that keeps them.

Steps of a few rows (`decode`) read all weights for little work, so threads beyond what memory feeds only wait; prompts
(`prompt`) compute, and hyperthreads and slow cores help there or not. What was chosen holds for a set of processors, a
build of llama.cpp and a shape of model: `threads.json` in the cache folder has an entry for each, written by an engine
after its first load (`localrun.engine.native.threads`) or by `localrun bench tune`.

Any process may write at any time; of two at once one entry may be lost, and is then measured again.
Does not: measure.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from localrun import stored

FILE_NAME = "threads.json"
# More threads, or other kinds of them, must gain so much; measuring is not more exact than that.
LEAST_GAIN = 0.04
# So much when it was measured less than three times.
LEAST_GAIN_ONCE = 0.10
# On a quiet machine a median is no further above the quickest time than this, and others take no more processors.
MOST_SPREAD = 1.3
MOST_OTHERS = 0.15
MAX_ENTRIES = 100

Samples = Mapping[int, Mapping[int, Sequence[float]]]


class Threads(msgspec.Struct, frozen=True):
    """Threads for steps of a few rows, and for prompts."""

    decode: int
    prompt: int

    @property
    def most(self) -> int:
        return max(self.decode, self.prompt)


class ModelShape(msgspec.Struct, frozen=True):
    """What of a model decides how many threads are good for it: models of one shape share what was measured."""

    n_layers: int
    weights_bytes: int


class SavedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """An entry. `processors` is a `Processors.identity`, `build` names the library, `model` is for people: the first
    that had this shape. `n_tried` are the numbers that were measured, `at_s` is Unix time."""

    processors: str
    build: str
    shape: ModelShape
    threads: Threads
    model: str
    n_tried: tuple[int, ...]
    at_s: float

    def holds_for(self, processors: str, build: str, shape: ModelShape) -> bool:
        return (self.processors, self.build, self.shape) == (processors, build, shape)


def best(samples: Samples) -> int:
    """The number of threads to use, out of `{threads: {rows of a step: seconds of each time}}`.

    Its cost is the mean, over the numbers of rows, of how much its median is above the lowest one. The fewest threads
    win that cost no more than `LEAST_GAIN` above the best.
    """
    kinds = list(next(iter(samples.values())))
    medians = {n: {rows: statistics.median(times[rows]) for rows in kinds} for n, times in samples.items()}
    lowest = {rows: min(of_n[rows] for of_n in medians.values()) for rows in kinds}
    costs = {n: statistics.mean(of_n[rows] / lowest[rows] for rows in kinds) for n, of_n in medians.items()}
    n_times = min(len(times[rows]) for times in samples.values() for rows in kinds)
    gain = LEAST_GAIN if n_times >= 3 else LEAST_GAIN_ONCE
    return min(n for n, cost in costs.items() if cost <= min(costs.values()) * (1 + gain))


def is_steady(samples: Samples) -> bool:
    """Whether nothing else took the processors so often that what was measured means little."""
    every = [seconds for times in samples.values() for seconds in times.values()]
    return all(statistics.median(seconds) <= MOST_SPREAD * min(seconds) for seconds in every)


def read(path: Path) -> list[SavedChoice]:
    """What is kept, oldest first; nothing of a file that is damaged or is not there."""
    return stored.read(path, _entries) or []


def find(path: Path, processors: str, build: str, shape: ModelShape) -> Threads | None:
    """What was measured for this; None if nothing was."""
    found = [kept.threads for kept in read(path) if kept.holds_for(processors, build, shape)]
    return found[-1] if found else None


def keep(path: Path, kept: SavedChoice) -> None:
    """Add an entry, in place of an older one for the same. Raises OSError, also for a file of a newer localrun."""
    found = stored.read(path, _anything)  # all of this version are lists
    if isinstance(found, dict) and "version" in found:
        raise FileExistsError(f"{path} was written by a newer localrun and stays")
    others = [other for other in read(path) if not other.holds_for(kept.processors, kept.build, kept.shape)]
    stored.write(path, [*others, kept][-MAX_ENTRIES:])


_entries = msgspec.json.Decoder(list[SavedChoice])
_anything = msgspec.json.Decoder(object)
