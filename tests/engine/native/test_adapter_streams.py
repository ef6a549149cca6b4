"""An engine over llama.cpp whose requests have sets of adapters: each says what a bare context with its set alone says.

Tokens are compared by the bare context's logits for the same text: the chosen one is the likeliest, but for rounding.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from localrun.engine.adapters import MOST_LOADED
from localrun.engine.cache.tiers import DiskTier
from localrun.engine.engine import Engine, Limits
from localrun.engine.native.llama import LlamaBackend
from localrun.wire import Adapter, Delta, Finish, Lane, Sampling, Submit
from tests.engine.memory_disk import MemoryDisk
from tests.engine.native.bare import bare
from tests.engine.stepped import SteppedEngine
from tests.lora_file import write_lora, write_vector
from tests.support.synthesis.synthesize import synthesize

SETS: tuple[dict[str, float], ...] = (
    {}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"a": -1}, {"v": 1}, {"a": 1, "v": -0.5},
)  # fmt: skip
# Equal for all sets, long enough for the background and for what is saved.
PROMPT = [300 + at * 7 % 200 for at in range(140)]
N_OUTPUT = 10
ROUNDING, STRENGTH = 0.1, 5e-4


@dataclass(frozen=True)
class Case:
    model: str
    may_split: bool

    def __str__(self) -> str:
        return f"{self.model}, {'split' if self.may_split else 'one pool'}"


CASES = [
    Case("tiny", True), Case("tiny", False), Case("tiny-gemma3", False), Case("tiny-lfm2", False),
    Case("tiny-qwen35-nextn", False), Case("tiny-mamba", False),
]  # fmt: skip


class Work:
    """A model with its adapters, and engines over it."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.model = case, folder / "model.gguf"
        synthesize(case.model, "F16", self.model)
        self.files = {
            "a": write_lora(self.model, folder / "a.gguf", seed=1, strength=STRENGTH),
            "b": write_lora(self.model, folder / "b.gguf", seed=2, strength=STRENGTH),
            "v": write_vector(self.model, folder / "v.gguf", seed=3),
        }
        self.said: dict[int, list[int]] = {}
        self.finals: dict[int, Delta] = {}
        self._rows: dict[tuple[object, ...], np.ndarray] = {}

    @contextmanager
    def engine(self, disk: DiskTier | None = None) -> Iterator[Engine]:
        backend = LlamaBackend(
            str(self.model), n_cells=2048, n_seqs=4, n_spare_seqs=4, n_batch=128, n_threads=1, n_gpu_layers=0,
            kv_type="f16", may_split=self.case.may_split,
        )  # fmt: skip
        self.said, self.finals = {}, {}
        engine = SteppedEngine(backend, Limits(4, 64, 0.02, 1 << 28), time.monotonic, disk)
        yield engine
        engine.close()
        engine.cache.tiers.flush(10.0, time.monotonic)
        backend.close()

    def submit(self, engine: Engine, request_id: int, which: dict[str, float], **more: object) -> None:
        adapters = tuple(
            Adapter(str(self.files[name]), hashlib.sha256(self.files[name].read_bytes()).digest(), scale)
            for name, scale in which.items()
        )
        submit = Submit(
            id=request_id, sampling=Sampling(temperature=0), n_predict=N_OUTPUT, ignore_eos=True, adapters=adapters
        )
        for name, value in more.items():
            submit = _with(submit, name, value)
        engine.submit(submit, list(PROMPT))

    def run(self, engine: Engine, until: Sequence[int] | None = None) -> None:
        """Until nothing is left to do, or these have said something."""
        while not engine.is_idle and not (until and all(self.said.get(i) for i in until)):
            step = engine.step()
            for delta in step.deltas if step is not None else ():
                self.said.setdefault(delta.id, []).extend(delta.tokens)
                if delta.finish is not None:
                    self.finals[delta.id] = delta

    def check(self, sets: dict[int, dict[str, float]]) -> None:
        for request_id, which in sets.items():
            final, said = self.finals[request_id], self.said[request_id]
            assert final.finish is Finish.LENGTH, final.error_message
            rows = self._alone(which, said)
            assert len(said) == len(rows)
            for row, token in zip(rows, said, strict=True):
                assert row[token] >= row.max() - ROUNDING, f"with {which} it would not say that"

    def _alone(self, which: dict[str, float], said: list[int]) -> np.ndarray:
        """Rows of a bare context with this set. Most say the same thing several times."""
        adapters = [(self.files[name], scale) for name, scale in which.items()]
        key = (*adapters, *said)
        if key not in self._rows:
            with bare(self.model, adapters) as alone:
                self._rows[key] = alone.logits([*PROMPT, *said])[len(PROMPT) - 1 : -1]
        return self._rows[key]

    def n_cached(self, request_id: int) -> int:
        usage = self.finals[request_id].usage
        assert usage is not None
        return usage.n_cached


def _with(submit: Submit, name: str, value: object) -> Submit:
    fields = {field: getattr(submit, field) for field in submit.__struct_fields__}
    return Submit(**{**fields, name: value})


@pytest.fixture(params=CASES, ids=str, scope="module")
def work(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Work:
    return Work(request.param, tmp_path_factory.mktemp("work"))


def test_sets_beside_each_other_say_what_they_say_alone_cold_cached_and_restored(work: Work) -> None:
    disk = MemoryDisk()
    with work.engine(disk) as engine:
        for begin in (0, 10):  # cold and interleaved; then from cells and memory
            for index, which in enumerate(SETS):
                work.submit(engine, begin + index, which)
            work.run(engine)
            work.check({begin + index: which for index, which in enumerate(SETS)})
        n_different = len({tuple(work.said[index]) for index in range(len(SETS))})
        assert n_different >= len(SETS) - 1, "a mix-up could hide"  # a vector may be all that counts
        assert all(work.n_cached(index) == 0 for index in range(len(SETS)))
        # What is in cells goes on; what was moved out was saved, unless copies were slow just then.
        assert sum(work.n_cached(10 + index) > 0 for index in range(len(SETS))) >= len(SETS) // 2
    with work.engine(disk) as engine:  # from disk
        sets = dict(enumerate(SETS[:0:-1]))
        for index, which in sets.items():
            work.submit(engine, index, which)
        work.run(engine)
        work.check(sets)
        assert all(work.n_cached(index) > 0 for index in sets)


def test_a_preempted_request_goes_on_with_its_set(work: Work) -> None:
    with work.engine() as engine:
        batch = {index: SETS[1 + index % 4] for index in range(4)}
        for index, which in batch.items():
            work.submit(engine, index, which, lane=Lane.BATCH)
        work.run(engine, until=list(batch))
        urgent = {10: SETS[1], 11: SETS[5]}
        for index, which in urgent.items():
            work.submit(engine, index, which, lane=Lane.INTERACTIVE)
        work.run(engine)
        work.check(batch | urgent)


def test_adapters_come_and_go_beside_streams(work: Work, tmp_path: Path) -> None:
    n_files = MOST_LOADED + 3
    for number in range(n_files):
        work.files[f"{number}"] = write_lora(work.model, tmp_path / f"{number}.gguf", seed=number, strength=STRENGTH)
    with work.engine() as engine:
        sets = {index: {f"{index * 5 % n_files}": 1.0} for index in range(2 * n_files)}
        for index, which in sets.items():
            work.submit(engine, index, which)
        work.run(engine)
        work.check(sets)


def test_a_bad_adapter_fails_its_request_alone(work: Work, tmp_path: Path) -> None:
    work.files["bad"] = tmp_path / "bad.gguf"
    work.files["bad"].write_bytes(work.files["a"].read_bytes()[:-1000])
    work.files["other"] = write_lora(work.model, tmp_path / "other.gguf", architecture="phi3")
    with work.engine() as engine:
        sets = {0: SETS[0], 1: SETS[1]}
        for index, which in sets.items():
            work.submit(engine, index, which)
        work.submit(engine, 10, {"a": 1, "bad": 1})
        work.submit(engine, 11, {"other": 1})
        work.run(engine)
        work.check(sets)
        for index, name in ((10, "bad.gguf"), (11, "other.gguf")):
            assert work.finals[index].error_code == "bad_model_file"
            assert name in (work.finals[index].error_message or "")
