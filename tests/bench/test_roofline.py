from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from localrun.bench import roofline as roofline_module
from localrun.bench.roofline import Roofline, StepBytes, decode_bound_tokens_per_s, roofline, step_bytes
from localrun.models.gguf.header import Header, TensorInfo
from localrun.models.gguf.reader import read_header
from tests.support.synthesis.synthesize import synthesize


def test_every_thread_reads_every_byte_of_its_array(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, float]] = []
    original = np.bitwise_or.reduce

    class Recorded:
        @staticmethod
        def reduce(array: np.ndarray) -> int:
            seen.append((array.nbytes, float(original(array))))
            return 0

    monkeypatch.setattr(roofline_module.np, "bitwise_or", Recorded)
    rate = roofline_module.read_bandwidth_bytes_per_s(3, array_bytes=80_000, passes=2)
    assert seen == [(80_000, 1.0)] * 6
    assert rate > 0


def test_the_best_pass_counts(monkeypatch: pytest.MonkeyPatch):
    times = iter([10.0, 10.5, 20.0, 20.1, 30.0, 30.2])
    monkeypatch.setattr(roofline_module.time, "perf_counter", lambda: next(times))
    assert roofline_module.read_bandwidth_bytes_per_s(2, array_bytes=1000, passes=3) == pytest.approx(2 * 1000 / 0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bound") / "tiny.gguf"
    synthesize("tiny", "Q4_0", path)
    return path


@pytest.fixture(scope="module")
def header(model: Path) -> Header:
    return read_header(model)


def test_one_stream_without_context_reads_the_weights_once_per_token():
    assert decode_bound_tokens_per_s(StepBytes(100e6, 20e3), 50e9, [0]) == pytest.approx(500)


def test_streams_share_the_weights_and_bring_their_own_context():
    # B * BW / (W + sum k): 2 * 50e9 / (100e6 + 20e3 * (1000 + 4000))
    assert decode_bound_tokens_per_s(StepBytes(100e6, 20e3), 50e9, [1000, 4000]) == pytest.approx(500)


def test_more_streams_approach_the_rate_at_which_contexts_alone_are_read():
    read = StepBytes(100e6, 20e3)
    rates = [decode_bound_tokens_per_s(read, 50e9, [1000.0] * n_streams) for n_streams in (1, 8, 64, 4096)]
    assert rates == sorted(rates)
    assert rates[-1] < 50e9 / (20e3 * 1000)
    assert rates[-1] > 0.99 * 50e9 / (20e3 * 1000)


def test_the_bytes_of_a_model_are_those_of_its_tensors_and_its_kv_heads(header: Header):
    read = step_bytes(header, n_streams=1)
    assert read.weights_bytes == header.weights_bytes
    # tiny: 4 layers, 2 KV heads of 64, keys and values in f16.
    assert read.kv_bytes_per_token == 4 * 2 * 64 * 2 * 2


def test_an_embedding_matrix_of_its_own_is_not_read(header: Header):
    output = TensorInfo("output.weight", (256, 2048), "Q4_0", 0, 1000)
    untied = dataclasses.replace(header, tensors=(*header.tensors, output))
    embedding = next(tensor for tensor in header.tensors if tensor.name == "token_embd.weight")
    expected = header.weights_bytes - embedding.size_bytes + 1000
    assert step_bytes(untied, n_streams=1).weights_bytes == expected


def test_of_many_experts_a_step_reads_those_that_its_rows_use(header: Header):
    experts = TensorInfo("blk.0.ffn_up_exps.weight", (256, 768, 8), "Q4_0", 0, 8000)
    counts = {f"{header.architecture}.expert_count": 8, f"{header.architecture}.expert_used_count": 2}
    mixture = dataclasses.replace(header, metadata={**header.metadata, **counts}, tensors=(*header.tensors, experts))
    one, two, many = (step_bytes(mixture, n_streams=n).weights_bytes - header.weights_bytes for n in (1, 2, 200))
    assert one == pytest.approx(2000)
    assert two == pytest.approx(8000 * (1 - 0.75**2))
    assert many == pytest.approx(8000)


def test_a_roofline_with_a_bandwidth_of_one_s_own_measures_nothing(model: Path, header: Header):
    limit = roofline(model, 1, 1e9)
    assert limit.bandwidth_bytes_per_s == 1e9
    read = step_bytes(header, n_streams=2)
    assert limit.bound_tokens_per_s(2, 100.0) == decode_bound_tokens_per_s(read, 1e9, [100.0, 100.0])


def test_twice_the_bandwidth_is_twice_the_bound(header: Header):
    slow, fast = (Roofline(header, bandwidth).bound_tokens_per_s(4, 50) for bandwidth in (1e9, 2e9))
    assert fast == pytest.approx(2 * slow)
