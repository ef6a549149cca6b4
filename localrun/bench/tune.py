"""What `localrun bench tune` measures: a model with each number of threads that may suit it, and which is best.

The measuring is an engine's (`localrun.engine.tools.tasks`, a process of its own), the rule the one that engines
use (`localrun.hardware.thread_choice`). Does not: print, or keep anything unless told to.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from localrun.errors import EngineFailed
from localrun.hardware import thread_choice
from localrun.hardware.processors import Processors
from localrun.hardware.thread_choice import ModelShape, SavedChoice, Threads
from localrun.models.storage.model import Model

STREAMS = (1, 4, 8)
# Parts of the usual number that are tried besides what an engine tries by itself.
PARTS = (1, 2, 4, 8)


class StepTiming(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the engine's side. `seconds` is of one step, which has `rows` rows for each of `streams` streams."""

    threads: int
    streams: int
    rows: int
    seconds: float


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """What came out. `build` names the library that was measured, `others` is how many processors other programs took
    meanwhile."""

    model: str
    shape: ModelShape
    processors: Processors
    build: str
    measured: list[StepTiming]
    best: Threads
    others: float

    @property
    def is_disturbed(self) -> bool:
        """Whether the numbers mean little."""
        return self.others > thread_choice.MOST_OTHERS

    def tokens_per_s(self, n_threads: int, streams: int, *, is_prompt: bool = False) -> float:
        """The median over the rounds, of all streams together."""
        rows = [m for m in self.measured if (m.threads, m.streams, m.rows > 1) == (n_threads, streams, is_prompt)]
        return streams * rows[0].rows / statistics.median(m.seconds for m in rows)

    def keep(self, path: Path, now_s: float) -> None:
        """For engines that open a model of this shape from now on. Raises OSError."""
        tried = tuple(sorted({m.threads for m in self.measured}))
        thread_choice.keep(
            path,
            SavedChoice(
                processors=self.processors.identity, build=self.build, shape=self.shape, threads=self.best,
                model=self.model, n_tried=tried, at_s=now_s,
            ),
        )  # fmt: skip


class _RunHeader(msgspec.Struct):
    """The first and the last line."""

    build: str = ""
    others: float = 0.0


def counts_to_try(processors: Processors) -> list[int]:
    """What an engine would try, some smaller numbers, and under a quota such as 1.5 also 2: whether it pays although
    all are stopped for a part of each period shows in a second of computing, not in the moments that an engine tries.
    """
    usual = processors.usual_threads
    counts = {each.n_threads for each in processors.candidates()} | {max(1, usual // part) for part in PARTS}
    if processors.quota is not None:
        counts.add(max(1, min(math.ceil(processors.quota), processors.n_allowed)))
    return sorted(counts)


def tune(
    model: Model, processors: Processors, counts: Sequence[int], *, rounds: int,
    on_measured: Callable[[StepTiming], None],
) -> Tuning:  # fmt: skip
    """Runs the engine's side to its end. Raises EngineFailed when that does not go well."""
    command = [sys.executable, "-P", "-m", "localrun.engine.tools.tasks", "thread_rates", str(model.path), str(rounds)]
    command += [",".join(map(str, numbers)) for numbers in (STREAMS, counts)]
    measured: list[StepTiming] = []
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            first = line = child.stdout.readline()
            for line in child.stdout:
                if line.startswith(b'{"others"'):
                    break
                measured.append(msgspec.json.decode(line, type=StepTiming))
                on_measured(measured[-1])
        except BaseException:
            child.terminate()
            raise
    if child.returncode != 0 or not measured:
        raise EngineFailed(f"{model.name} cannot be measured: its process ended with status {child.returncode}")
    return Tuning(
        model=model.name,
        shape=ModelShape(model.header.n_layers, model.header.weights_bytes),
        processors=processors,
        build=msgspec.json.decode(first, type=_RunHeader).build,
        others=msgspec.json.decode(line, type=_RunHeader).others,
        measured=measured,
        best=Threads(decode=thread_choice.best(_samples(measured, is_prompt=False)),
                     prompt=thread_choice.best(_samples(measured, is_prompt=True))),
    )  # fmt: skip


def _samples(measured: Sequence[StepTiming], *, is_prompt: bool) -> Mapping[int, Mapping[int, Sequence[float]]]:
    samples: dict[int, dict[int, list[float]]] = {}
    for each in measured:
        if (each.rows > 1) == is_prompt:
            samples.setdefault(each.threads, {}).setdefault(each.streams, []).append(each.seconds)
    return samples
