"""How long steps, prompts and copies take, with the layout that an engine would have.

`python -m localrun.engine.tools.step_costs --seconds 40`, with the frame `wire.Open` as JSON on stdin: what `localrun
plan calibrate` runs. stdout has JSON lines. The first is `{"layout": ...}`, what a scheduler sees of the backend; then
come `{"phase", "rows", "tokens", "seconds", "spread"}`, medians with the spread of their logarithms, and at the
end `{"others"}`, how many processors other programs took meanwhile. The phases:

    streams     a step of `rows` streams with `tokens` of context together, sampling included
    background  a batch of `rows` of one prompt, `tokens` deep, where prompts are computed
    beside      the same among the streams
    drafts, alone_drafts  a step of `rows` of all streams, or of one, with drafts, `tokens` deep, sampling included
    waits       a batch of `rows` of the background by itself; `quantiles`, from the least to the most, of by how much a
                step takes longer beside it
    batch       that batch, interrupted by these steps
    copy        a copy of `tokens` from cells to cells
    save, restore  the same into memory of the cache, and from there
    disk        `tokens` bytes that were kept on disk are read and verified
    rebuild     new KV cells

Each phase goes from coarse to fine and stops when its share of the time is over, but has its first lines.

Does not: fit anything.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import msgspec
import numpy as np

from localrun import wire
from localrun.engine.backend import Backend, Batch, State
from localrun.engine.cache.copies import BLOCK_TOKENS
from localrun.engine.cache.disk import KvDisk
from localrun.engine.cache.disk_files import library_build
from localrun.engine.cache.tree import DiskRecord, block_key
from localrun.engine.native.library import library_folder
from localrun.engine.process import LLAMA, n_spare_sequences
from localrun.engine.tools import own_stdout, say
from localrun.errors import LocalrunError
from localrun.hardware.processors import others_busy_s
from localrun.kv_folders import About

DEPTHS = (64, 512, 1024, 2048, 4096)
BATCHES = (64, 512, 256, 128)
FEW_ROWS = (64, 16, 8, 32, 2, 48)
# Up to here each number of streams is measured, and beyond it powers of two: kernels take four rows together, and those
# that are left one by one. With 0.5B in Q4_0 7 streams took 60 ms, and 8 took 41.
EACH_STREAM = 8
COPIES = (256, 2048)
DISK_BYTES = 1 << 24
# Of each stream, and as many as are verified at once.
DRAFTED = (1, 3, 7, 15)
DRAFTED_ALONE = (1, 7, 3, 15, 63)
REPEATS = 6
# Of a normal distribution, by its median absolute deviation. A standard deviation would be that of the few steps with
# which an engine tries other numbers of threads.
SIGMAS = 1.4826
# Of all seconds.
_PARTS = {"background": 0.3, "beside": 0.1, "streams": 0.3, "drafts": 0.1, "waits": 0.15, "copy": 0.05}
# Between two steps at most, so that a batch goes on. No two pauses are alike, or steps would meet the same pieces: what
# follows on 1/phi of the range, again and again, is spread evenly over it.
_PAUSE_S, _GOLDEN = 0.03, 0.618034
# Of these rows, beside so many streams: what a step takes longer does not depend on those, within a fifth from 1 to 8.
WAITED_FOR = (512, 128)
_N_WAITING = 4
_N_QUANTILES = 11
_MOST_STEPS = 64


class StepCosts:
    """Measures with an open backend. Every sequence is empty before and after a phase."""

    def __init__(self, backend: Backend, lines: TextIO, seconds: float) -> None:
        self._backend, self._lines, self._seconds = backend, lines, seconds
        self._ends_s = 0.0
        n_streams = backend.n_seqs if backend.is_split else 1
        self._most_tokens = min(backend.n_cells // n_streams, backend.n_ctx)
        self._sampler = backend.sampler(wire.Sampling(temperature=0), ignore_eos=True)

    def measure(self, n_slots: int) -> None:
        """All phases."""
        self._begin("streams")
        self._streams(n_slots)
        if self._backend.n_rollback:
            self._begin("drafts")
            self._drafts(n_slots)
        self._begin("background")
        self._prompts("background", BATCHES, in_background=self._backend.worker is not None)
        self._begin("beside")
        self._prompts("beside", FEW_ROWS, in_background=False)
        if self._backend.worker is not None:
            for n_rows in WAITED_FOR:
                if n_rows <= self._backend.worker.batch.capacity:
                    self._waits(min(n_slots, _N_WAITING), n_rows)
        if self._backend.cuts_states and n_slots > 1:
            self._begin("copy")
            self._copies()
        self._disk()
        began_s = time.perf_counter()
        self._backend.rebuild()
        self._say("rebuild", 0, 0, [time.perf_counter() - began_s])

    def _begin(self, phase: str) -> None:
        self._ends_s = time.perf_counter() + _PARTS[phase] * self._seconds

    @property
    def _is_over(self) -> bool:
        return time.perf_counter() > self._ends_s

    def _say(
        self, phase: str, n_rows: int, n_tokens: int, seconds: Sequence[float], quantiles: Sequence[float] = ()
    ) -> None:
        median = statistics.median(seconds)
        spread = SIGMAS * statistics.median(abs(math.log(each / median)) for each in seconds)
        of_steps = {"seconds": median, "spread": spread, "quantiles": quantiles}
        say(self._lines, phase=phase, rows=n_rows, tokens=n_tokens, **of_steps)

    def _streams(self, n_slots: int) -> None:
        """Of 1, 2, 3 ... streams at each depth: the first one is computed, and copied to the others."""
        counts = [n for n in range(1, n_slots + 1) if n <= EACH_STREAM or n.bit_count() == 1 or n == n_slots]
        depth = 0
        for wanted in DEPTHS:
            if wanted + REPEATS * len(counts) + 1 > self._most_tokens * (1 if self._backend.is_split else 1 / n_slots):
                break
            depth = self._extend(0, depth, wanted)
            self._fill(n_slots, depth)
            lengths = [depth] * n_slots
            for n_streams in counts:
                seconds = [self._step_s(n_streams, lengths) for _ in range(REPEATS)]
                n_tokens = sum(lengths[:n_streams]) - n_streams * REPEATS // 2
                self._say("streams", n_streams, n_tokens, seconds[1:])  # the first one may touch fresh memory
                if self._is_over and n_streams > 1:
                    break
            depth = lengths[0]
            if self._is_over:
                break
        self._empty(n_slots)

    def steady(self, n_slots: int) -> None:
        """Of one stream and of all, in turn, as many as there is time for: by so many a clock that changes is known."""
        ends_s = time.perf_counter() + self._seconds
        seconds: dict[int, list[float]] = {n: [] for n in sorted({1, n_slots})}
        depth = min(DEPTHS[0], self._most_tokens // (2 if self._backend.is_split else 2 * n_slots))
        self._extend(0, 0, depth)
        self._fill(n_slots, depth)
        while time.perf_counter() < ends_s or not all(seconds.values()):
            for n_streams, own in seconds.items():
                lengths = [depth] * n_streams
                own += [self._step_s(n_streams, lengths) for _ in range(min(REPEATS, depth))]
                for seq in range(n_streams):
                    self._back(seq, depth, REPEATS, self._rows_s)
        self._empty(n_slots)
        for n_streams, own in seconds.items():
            self._say("streams", n_streams, n_streams * (depth + REPEATS // 2), own)

    def _fill(self, n_slots: int, depth: int) -> None:
        """Bring the other sequences to where the first one is."""
        for seq in range(1, n_slots):
            self._backend.seq_remove(seq, 0)
            if not (self._backend.cuts_states and self._backend.seq_copy(0, seq)):
                self._extend(seq, 0, depth)

    def _empty(self, n_seqs: int) -> None:
        for seq in range(n_seqs):
            self._backend.seq_remove(seq, 0)

    def _drafts(self, n_slots: int) -> None:
        """Of one stream and of all, at two depths, each number of rows and back again."""
        depth, most_rows = 0, min(self._backend.n_draft_rows, self._backend.batch.capacity)
        for wanted in DEPTHS[:2]:
            if (wanted + most_rows) * (1 if self._backend.is_split else n_slots) > self._most_tokens:
                break
            depth = self._extend(0, depth, wanted)
            self._fill(n_slots, depth)
            for n_streams, drafted in {n_slots: DRAFTED, 1: DRAFTED_ALONE}.items():
                for n_each in drafted:
                    n_rows = n_streams * (n_each + 1)
                    if n_rows > most_rows or n_each > self._backend.n_rollback:
                        continue
                    seconds = [self._drafted_s(n_streams, depth, n_each) for _ in range(REPEATS // 2)]
                    phase = "alone_drafts" if n_streams == 1 else "drafts"
                    self._say(phase, n_rows, depth, seconds[1:])  # the first one makes a graph
                if self._is_over and n_streams == 1:
                    break
        self._empty(n_slots)

    def _drafted_s(self, n_streams: int, depth: int, n_each: int) -> float:
        """A step of so many streams with drafts, all of which are taken off again."""
        seconds = self._step_s(n_streams, [depth] * n_streams, n_each)
        for seq in range(n_streams):
            self._back(seq, depth, n_each + 1, self._rows_s)
        return seconds

    def _step_s(self, n_streams: int, lengths: list[int], n_drafts: int = 0) -> float:
        """One more token for each of so many streams, and of drafts."""
        batch, n_each = self._backend.batch, n_drafts + 1
        for row in range(n_streams * n_each):
            seq, at = divmod(row, n_each)
            pos = lengths[seq] + at
            batch.token[row], batch.pos[row], batch.seq[row] = _token(pos), pos, seq
        for seq in range(n_streams):
            lengths[seq] += n_each
        n_rows = n_streams * n_each
        batch.wants_logits[:n_rows] = 1
        began_s = time.perf_counter()
        self._backend.decode(n_rows)
        for row in range(n_each - 1, n_rows, n_each):  # the engine looks at the last one of each stream
            self._backend.is_finite(row)
        self._backend.sample([(self._sampler, row) for row in range(n_rows)])
        return time.perf_counter() - began_s

    def _prompts(self, phase: str, sizes: Sequence[int], *, in_background: bool) -> None:
        """Batches of each size at each depth, and back again."""
        worker = self._backend.worker
        compute = self._batch_s if in_background else self._rows_s
        seq = worker.first_seq if in_background and worker is not None else 0
        most_tokens = self._backend.n_ctx if in_background else self._most_tokens
        depth, n_said = 0, 0
        for wanted in (0, *DEPTHS[1:]):
            if wanted + min(sizes) > most_tokens:
                break
            for begin, n_rows in _parts(depth, wanted, self._backend.batch.capacity):
                compute(seq, begin, n_rows)
            depth = wanted
            for n_rows in sizes:
                if (
                    n_rows > self._backend.batch.capacity
                    or depth + n_rows > most_tokens
                    or (self._is_over and n_said > 1)
                ):
                    continue
                seconds = [compute(seq, depth, n_rows)]
                self._back(seq, depth, n_rows, compute)
                if not self._is_over:
                    seconds.append(compute(seq, depth, n_rows))
                    self._back(seq, depth, n_rows, compute)
                self._say(phase, n_rows, depth, seconds)
                n_said += 1
            if self._is_over:
                break
        self._backend.seq_remove(seq, 0)

    def _back(self, seq: int, depth: int, n_rows: int, compute: Callable[[int, int, int], float]) -> None:
        """Take the last rows off a sequence again; where the model cannot, compute the rest anew."""
        if self._backend.seq_remove(seq, depth):
            return
        self._backend.seq_remove(seq, 0)
        for begin, n_part in _parts(0, depth, self._backend.batch.capacity):
            compute(seq, begin, n_part)

    def _rows_s(self, seq: int, begin: int, n_rows: int) -> float:
        """Rows of one sequence among the streams."""
        _fill_rows(self._backend.batch, seq, begin, n_rows)
        began_s = time.perf_counter()
        self._backend.decode(n_rows)
        self._backend.is_finite(n_rows - 1)  # a GPU is waited for
        return time.perf_counter() - began_s

    def _batch_s(self, seq: int, begin: int, n_rows: int) -> float:
        """Rows of one sequence in the background."""
        self._start(seq, begin, n_rows)
        worker = self._backend.worker
        assert worker is not None
        worker.finish()
        return worker.computed_s

    def _start(self, seq: int, begin: int, n_rows: int) -> None:
        worker = self._backend.worker
        assert worker is not None
        _fill_rows(worker.batch, seq - worker.first_seq, begin, n_rows)
        worker.start(n_rows)

    def _extend(self, seq: int, begin: int, end: int) -> int:
        for at, n_rows in _parts(begin, end, self._backend.batch.capacity):
            self._rows_s(seq, at, n_rows)
        return max(begin, end)

    def _waits(self, n_streams: int, n_rows: int) -> None:
        """Steps while a batch is computed, in turn with both alone: others may disturb all of them alike. Each number
        of rows has a share of the time."""
        worker = self._backend.worker
        assert worker is not None
        ends_s = time.perf_counter() + _PARTS["waits"] * self._seconds / len(WAITED_FOR)
        seq, lengths = worker.first_seq, [self._extend(stream, 0, DEPTHS[0]) for stream in range(n_streams)]
        steps: list[float] = []
        batches: list[float] = []
        alone_steps: list[float] = []
        alone_batches: list[float] = []
        while not batches or (time.perf_counter() < ends_s and len(steps) < _MOST_STEPS):
            alone_batches.append(self._batch_s(seq, 0, n_rows))
            self._backend.seq_remove(seq, 0)
            alone_steps += [self._step_s(n_streams, lengths) for _ in range(REPEATS)]
            self._start(seq, 0, n_rows)
            pause_s = min(_PAUSE_S, alone_batches[-1] / 4)
            while lengths[0] + REPEATS < self._most_tokens:
                time.sleep(pause_s * (_GOLDEN * len(steps) % 1.0))
                if worker.is_over():
                    break
                steps.append(self._step_s(n_streams, lengths))
            worker.finish()
            batches.append(worker.computed_s)
            self._backend.seq_remove(seq, 0)
            if lengths[0] + 2 * REPEATS >= self._most_tokens:
                break
        if steps:
            extra_s = np.maximum(0.0, np.array(steps) - statistics.median(alone_steps))
            quantiles = np.quantile(extra_s, np.linspace(0, 1, _N_QUANTILES)).tolist()
            self._say("waits", n_rows, 0, alone_batches, quantiles)
            self._say("batch", n_rows, 0, batches)
        self._empty(n_streams)

    def _copies(self) -> None:
        for n_tokens in COPIES:
            if 2 * n_tokens > self._most_tokens or (self._is_over and n_tokens > COPIES[0]):
                break
            self._extend(0, 0, n_tokens)
            ranges = [(at, at + n_part) for at, n_part in _parts(0, n_tokens, BLOCK_TOKENS)]
            kept: list[list[State]] = []  # or what is saved would come into memory that was touched before
            seconds = [self._copies_s(ranges, kept) for _ in range(REPEATS)]
            for phase, own in zip(("copy", "save", "restore"), zip(*seconds, strict=True), strict=True):
                self._say(phase, 1, n_tokens, own[1:])  # the first one into cells that nobody has touched
            self._backend.seq_remove(0, 0)
            self._backend.seq_remove(1, 0)

    def _copies_s(self, ranges: list[tuple[int, int]], kept: list[list[State]]) -> tuple[float, float, float]:
        """Of a sequence to another one, into memory, and from there."""
        backend, clock = self._backend, time.perf_counter
        backend.seq_remove(1, 0)
        began_s = clock()
        backend.seq_copy(0, 1)
        copied_s = clock()
        kept.append(list(backend.state_slices(0, ranges)))
        saved_s = clock()
        backend.seq_remove(1, 0)
        pieces = [(state, start, start, end) for state, (start, end) in zip(kept[-1], ranges, strict=True)]
        removed_s = clock()
        backend.state_set(1, backend.state_join(1, pieces))
        return copied_s - began_s, saved_s - copied_s, clock() - removed_s

    def _disk(self) -> None:
        """In a folder that is gone afterwards."""
        with tempfile.TemporaryDirectory(prefix="localrun-disk-") as folder:
            about = About(model="", model_path="", build="", created_at_s=0.0)
            disk = KvDisk(Path(folder), fingerprint=bytes(16), about=about, limit_bytes=4 * DISK_BYTES)
            record = DiskRecord(block_key(b"", 0, [1]), b"", 0, [1], is_whole=True)
            disk.write(record, bytes(DISK_BYTES))
            disk.flush(10.0)
            began_s = time.perf_counter()
            if disk.read(record.key) is not None:
                self._say("disk", 0, DISK_BYTES, [time.perf_counter() - began_s])
            disk.close()


def _parts(begin: int, end: int, most_rows: int) -> Iterator[tuple[int, int]]:
    """Batches from `begin` to `end`: where each begins, and its rows."""
    for at in range(begin, end, most_rows):
        yield at, min(most_rows, end - at)


def _fill_rows(batch: Batch, seq: int, begin: int, n_rows: int) -> None:
    batch.token[:n_rows] = [_token(pos) for pos in range(begin, begin + n_rows)]
    batch.pos[:n_rows] = range(begin, begin + n_rows)
    batch.seq[:n_rows] = seq
    batch.wants_logits[:n_rows] = 0
    batch.wants_logits[n_rows - 1] = 1


def _token(pos: int) -> int:
    return pos * 17 % 251


def layout(backend: Backend, opened: wire.Open, n_heads: int) -> dict[str, object]:
    """What a scheduler sees of it."""
    cuts_states = backend.cuts_states
    n_short, n_long = (0, 0) if cuts_states else (_state_bytes(backend, 1), _state_bytes(backend, 257))
    token_bytes = backend.state_token_bytes if cuts_states else max(1, (n_long - n_short) // 256)
    is_tiled = not backend.n_gpu_layers and opened.kv_type == "f16"
    return {
        "slots": opened.n_slots,
        "n_cells": backend.n_cells,
        "n_ctx_train": backend.n_ctx_train,
        "n_batch": backend.batch.capacity,
        "n_spare_seqs": n_spare_sequences(opened) if backend.memory_kind == "attention" else 0,
        "memory_kind": backend.memory_kind.value,
        "cuts_states": cuts_states,
        "is_split": backend.is_split,
        "mixes_rows": backend.mixes_rows,
        "n_gpu_layers": backend.n_gpu_layers,
        "n_threads": backend.n_threads,
        "n_heads": n_heads if is_tiled else 0,
        "kv_type": opened.kv_type,
        "state_token_bytes": token_bytes,
        "state_bytes": max(0, n_short - token_bytes),
    }


def _state_bytes(backend: Backend, n_tokens: int) -> int:
    """Of the state of so many tokens, where it is whole or nothing."""
    _fill_rows(backend.batch, 0, 0, n_tokens)
    backend.decode(n_tokens)
    state = backend.state_get(0, limit_bytes=1 << 40)
    backend.seq_remove(0, 0)
    return len(state or b"")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m localrun.engine.tools.step_costs", description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--heads", type=int, default=0, help="query heads of the model")
    parser.add_argument("--steady", action="store_true", help="steps of one stream and of all, and nothing else")
    args = parser.parse_args(argv)
    lines = own_stdout()
    asked = sys.stdin.buffer.read()
    if not asked:  # whoever started this was interrupted before it asked
        return 1
    opened = msgspec.json.decode(asked, type=wire.Open)
    try:
        backend, _ = LLAMA.backend(opened)
    except LocalrunError as error:
        print(error.message, file=sys.stderr)
        return 1
    build = library_build("llama-cpp-python", library_folder())
    say(lines, build=build, layout=layout(backend, opened, args.heads))
    began_s, others_s = time.perf_counter(), others_busy_s()
    costs = StepCosts(backend, lines, args.seconds)
    (costs.steady if args.steady else costs.measure)(opened.n_slots)
    others = max(0.0, others_busy_s() - others_s) / (time.perf_counter() - began_s)
    say(lines, others=others)
    backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
