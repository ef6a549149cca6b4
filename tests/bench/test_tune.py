from __future__ import annotations

from pathlib import Path

import pytest

from localrun.bench.tune import STREAMS, StepTiming, Tuning, counts_to_try, tune
from localrun.config import Settings
from localrun.engine.cache.disk_files import library_build
from localrun.engine.native.library import library_folder
from localrun.errors import EngineFailed
from localrun.hardware import thread_choice
from localrun.hardware.processors import Processors
from localrun.hardware.thread_choice import ModelShape, Threads
from localrun.models.storage.model import Model
from localrun.models.storage.store import Store
from tests.support.synthesis.synthesize import synthesize

HERE = Processors(name="made", n_machine=2, n_allowed=2, performance_cores=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("tune") / "small.gguf"
    synthesize("tiny", "Q8_0", path)
    return Store.of(Settings()).resolve(str(path))


def test_smaller_numbers_are_tried_besides_those_of_an_engine():
    assert counts_to_try(HERE) == [1, 2]
    hybrid = Processors(name="made", n_machine=24, n_allowed=24, performance_cores=8, efficiency_cores=8)
    assert counts_to_try(hybrid) == [1, 2, 4, 8, 16, 24]
    assert counts_to_try(Processors(name="made", n_machine=64, n_allowed=64, performance_cores=64, quota=1.5)) == [1, 2]


def test_a_real_model_is_measured_with_every_number_and_the_best_kept(model: Model, tmp_path: Path):
    told: list[StepTiming] = []
    tuning = tune(model, HERE, [1, 2], rounds=2, on_measured=told.append)
    assert tuning.measured == told
    kinds = [(each.streams, each.rows) for each in told]
    assert kinds == [*((n, 1) for n in STREAMS), (1, 512)] * 4
    assert [each.threads for each in told] == [1] * 4 + [2] * 8 + [1] * 4
    assert all(tuning.tokens_per_s(n_threads, n) > 0 for n_threads in (1, 2) for n in STREAMS)
    assert {tuning.best.decode, tuning.best.prompt} <= {1, 2}
    tuning.keep(tmp_path / "threads.json", 7.0)
    # Under the name that an engine looks for.
    build = library_build("llama-cpp-python", library_folder())
    shape = ModelShape(model.header.n_layers, model.header.weights_bytes)
    assert thread_choice.find(tmp_path / "threads.json", HERE.identity, build, shape) == tuning.best


def test_rates_are_medians_of_all_streams_together():
    measured = [StepTiming(threads=2, streams=4, rows=1, seconds=seconds) for seconds in (0.1, 0.2, 0.9)]
    measured += [
        StepTiming(threads=2, streams=1, rows=512, seconds=2.0),
        StepTiming(threads=2, streams=1, rows=1, seconds=1),
    ]
    tuning = Tuning(
        model="m", shape=ModelShape(1, 1), processors=HERE, build="b", measured=measured, best=Threads(2, 2), others=0.3
    )
    assert tuning.is_disturbed
    assert tuning.tokens_per_s(2, 4) == 20
    assert tuning.tokens_per_s(2, 1) == 1
    assert tuning.tokens_per_s(2, 1, is_prompt=True) == 256


def test_a_model_that_llama_cpp_refuses_is_one_error(model: Model, tmp_path: Path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model.path.read_bytes()[:-1000])
    with pytest.raises(EngineFailed, match="cannot be measured"):
        tune(Model(name="broken", path=broken, size_bytes=1, modified_at=model.modified_at, header=model.header), HERE,
             [1], rounds=1, on_measured=print)  # fmt: skip
