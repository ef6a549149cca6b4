"""Random traces of requests over llama.cpp's own contexts: tiny models of every kind of memory, tiny contexts.

After every step all books agree with each other and with the positions that the contexts hold. Whatever a request was
told is what the model says to its prompt alone: a context of its own computes it again, and each token must be the best
one there but for rounding.

So many traces of each kind reach all lines of the engine that more of them reach. A failure names its seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from localrun.engine.backend import MemoryKind
from localrun.engine.native.llama import LlamaBackend
from localrun.wire import Finish, Lane
from tests.depth import DEPTH
from tests.engine.conftest import n_held
from tests.engine.harness import Harness, n_seqs_away
from tests.fakes.backend import FakeBackend
from tests.support.synthesis.synthesize import synthesize

N_SLOTS, N_SPARE, N_BATCH = 3, 3, 64
N_EVENTS = 40
# Of the spread of a row's logits. Another row's best token would be some times the spread worse.
ROUNDING = 0.05


@dataclass(frozen=True)
class Case:
    model: str
    kind: MemoryKind
    n_cells: int
    n_traces: int
    may_split: bool = False

    def __str__(self) -> str:
        return f"{self.kind}, {'split' if self.may_split else 'one pool'}"


CASES = [
    Case("tiny", MemoryKind.ATTENTION, 768, 12, may_split=True),
    Case("tiny", MemoryKind.ATTENTION, 512, 11),
    Case("tiny-gemma3", MemoryKind.WINDOW, 768, 7),
    Case("tiny-mamba", MemoryKind.RECURRENT, 512, 5),  # slow to compute, and nothing that hybrid ones do not reach
    Case("tiny-lfm2", MemoryKind.HYBRID, 512, 8),
]


class RealHarness(Harness):
    """Over a context that may have been used before."""

    backend: Any

    def __init__(self, real: LlamaBackend, **shape: Any) -> None:
        for seq in range(real.n_seqs + n_seqs_away(real)):
            real.seq_remove(seq, 0)
        super().__init__(n_slots=N_SLOTS, wrap=lambda _: cast(FakeBackend, real), **shape)

    def check(self) -> None:
        cache, real = self.engine.cache, self.backend
        cache.check_integrity()
        for request in self.engine.scheduler.running:
            assert request.seq is not None
            assert cache.cells.length(request.seq) == request.n_computed
        for seq in range(real.n_seqs + n_seqs_away(real)):
            if seq >= real.n_seqs and real.worker.is_busy:
                continue  # nobody's to look at
            assert cache.cells.length(seq) == n_held(real, seq), f"sequence {seq} has another length"


class Judge:
    """Computes what a request was told once more, alone, in a context of its own."""

    def __init__(self, path: Path, n_cells: int) -> None:
        self._backend = open_model(path, n_cells, n_seqs=1)

    def check(self, prompt: list[int], output: list[int]) -> None:
        self._backend.seq_remove(0, 0)
        told = [*prompt, *output[:-1]]
        for start in range(0, len(told), N_BATCH):
            part = told[start : start + N_BATCH]
            batch, n_rows = self._backend.batch, len(part)
            batch.token[:n_rows], batch.pos[:n_rows], batch.seq[:n_rows] = part, range(start, start + n_rows), 0
            first = max(0, len(prompt) - 1 - start)
            batch.wants_logits[:n_rows] = [row >= first for row in range(n_rows)]
            self._backend.decode(n_rows)
            for row in range(first, n_rows if output else 0):
                at = start + row - len(prompt) + 1
                logits = self._backend.logits(row).copy()
                logits[list(self._backend.eog_tokens)] = logits.min()  # the harness asks for answers without an end
                is_best = logits.max() - logits[output[at]] <= ROUNDING * logits.std()
                assert is_best, f"token {at} is not the model's"

    def close(self) -> None:
        self._backend.close()


def open_model(path: Path, n_cells: int, *, n_seqs: int, may_split: bool = False) -> LlamaBackend:
    return LlamaBackend(
        str(path), n_cells=n_cells, n_seqs=n_seqs, n_spare_seqs=N_SPARE if n_seqs > 1 else 0, n_batch=N_BATCH,
        n_threads=1, n_gpu_layers=0, kv_type="f16", may_split=may_split,
    )  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids=str)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, sound_kernels: None
) -> Iterator[tuple[Case, LlamaBackend, Judge]]:
    case = request.param
    path = tmp_path_factory.mktemp("traces") / f"{case.model}.gguf"
    synthesize(case.model, "F16", path)
    real = open_model(path, case.n_cells, n_seqs=N_SLOTS, may_split=case.may_split)
    assert real.memory_kind is case.kind
    assert real.is_split is case.may_split
    judge = Judge(path, case.n_cells)
    yield case, real, judge
    judge.close()
    real.close()


def prompts(rng: Random, n_longest: int) -> Iterator[list[int]]:
    """Some begin alike, some go on where another ended, a few are long."""
    openings = [[rng.randrange(3, 200) for _ in range(rng.choice([40, 70, 130]))] for _ in range(2)]
    while True:
        tail = [rng.randrange(3, 200) for _ in range(rng.choice([1, 1, 5, 30, 90, n_longest]))]
        yield [*rng.choice([[], *openings]), *tail]


def trace(seed: int, real: LlamaBackend, judge: Judge) -> None:
    rng = Random(seed)
    harness = RealHarness(
        real, ram_cache_bytes=rng.choice([0, 1 << 18, 1 << 26]), max_queue=rng.choice([2, 64]),
        target_itl_s=rng.choice([0.0, 0.05]),
    )  # fmt: skip
    restoring = prompts(rng, real.n_cells // 2)
    asked: dict[int, list[int]] = {}
    chats: list[int] = []
    for _ in range(N_EVENTS):
        event = rng.random()
        if event < 0.4:
            prompt = next(restoring)
            if chats and rng.random() < 0.4:
                before = rng.choice(chats)
                prompt = [*asked[before], *harness.tokens.get(before, []), *prompt[-20:]]
            asked[len(asked)] = prompt
            harness.submit(
                len(asked) - 1, prompt, n_predict=rng.choice([0, 1, 4, 20]), client=rng.choice("ab"),
                lane=rng.choice(list(Lane)),
            )  # fmt: skip
        elif event < 0.48 and asked:
            harness.engine.cancel(rng.randrange(len(asked)))
        elif event < 0.5:
            harness.engine.clear_cache(ram=True, disk=False)
        else:
            for _ in range(rng.randint(1, 12)):
                harness.step()
        chats = list(harness.finals)
    harness.run()
    assert harness.finals.keys() == asked.keys(), "a request without an end"
    for request_id, final in harness.finals.items():
        if final.finish is Finish.ERROR:
            assert final.error_code in ("queue_full", "context_length_exceeded")
        judge.check(asked[request_id], harness.tokens.get(request_id, []))
    harness.engine.close()


@pytest.mark.slow
def test_traces_on_a_real_context_end_clean_and_say_what_the_model_says(opened: tuple[Case, LlamaBackend, Judge]):
    case, real, judge = opened
    for seed in range(case.n_traces * DEPTH):
        try:
            trace(seed, real, judge)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
