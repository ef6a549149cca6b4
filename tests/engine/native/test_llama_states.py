"""What saving states takes of memory, on the real backend."""

from __future__ import annotations

import numpy as np
import pytest

from localrun.engine.cache.tiers import GAIN_TOKENS
from localrun.engine.cache.tree import PrefixKey
from localrun.engine.engine import Limits
from localrun.engine.native import pages
from localrun.engine.native.llama import LlamaBackend
from localrun.wire import Sampling, Submit
from tests.engine.conftest import compute
from tests.engine.stepped import SteppedEngine

TOKENS = list(range(300, 360))
RANGES = [(0, 20), (20, 50), (50, 60)]


def buffer_bytes(backend: LlamaBackend) -> int:
    return backend.main.buffer.size_bytes


def give_back(backend: LlamaBackend) -> None:
    backend.main.buffer.lend()


def test_a_position_takes_what_the_backend_says(backend: LlamaBackend):
    compute(backend, 0, TOKENS)
    sizes = [len(data) for data in backend.state_slices(0, RANGES)]
    assert sizes == [(end - start) * backend.state_token_bytes for start, end in RANGES]


def test_a_large_buffer_is_given_back_and_a_small_one_kept(backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch):
    compute(backend, 0, TOKENS)
    give_back(backend)
    slices = list(backend.state_slices(0, RANGES))
    assert buffer_bytes(backend) > 0
    monkeypatch.setattr(pages, "KEPT_BUFFER_BYTES", 1000)
    again = list(backend.state_slices(0, RANGES))
    assert buffer_bytes(backend) == 0
    for data, same in zip(slices, again, strict=True):
        np.testing.assert_array_equal(data, same)
    for _ in backend.state_slices(0, RANGES):
        assert buffer_bytes(backend) > 0
        break
    assert buffer_bytes(backend) == 0, "whoever needs no more of them keeps nothing"
    pieces = [(data, start, start, end) for data, (start, end) in zip(again, RANGES, strict=True)]
    assert backend.state_set(1, backend.state_join(1, pieces))
    assert buffer_bytes(backend) == 0
    backend.seq_remove(0, 0)
    assert backend.seq_copy(1, 0)
    assert buffer_bytes(backend) == 0
    for data, same in zip(slices, backend.state_slices(0, RANGES), strict=True):
        np.testing.assert_array_equal(data, same)


@pytest.mark.parametrize("ram_tokens", [10, 100])
def test_nothing_is_copied_that_cannot_be_kept(backend: LlamaBackend, ram_tokens: int):
    limit_bytes = ram_tokens * backend.state_token_bytes
    give_back(backend)
    engine = SteppedEngine(backend, Limits(2, 8, 0.0, limit_bytes), lambda: 0.0)
    submit = Submit(id=0, sampling=Sampling(temperature=0), n_predict=4, ignore_eos=True)
    engine.submit(submit, list(range(300, 440)))
    while not engine.is_idle:
        engine.step()
    store = engine.cache.tiers
    assert store.match(PrefixKey(list(range(300, 440))), 140).saved().n_tokens == (
        ram_tokens if ram_tokens >= GAIN_TOKENS else 0
    )
    assert (buffer_bytes(backend) > 0) == (store.size_bytes > 0)
    assert store.size_bytes <= limit_bytes
