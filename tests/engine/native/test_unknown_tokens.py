"""What llama.cpp hands back is looked at where it comes in: what cannot be ends one request, and nobody else's."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrun.engine.engine import Limits
from localrun.engine.native.context import LlamaContext
from localrun.engine.native.library import native
from localrun.wire import Finish, Sampling, Submit
from tests.engine.conftest import open_tiny
from tests.engine.stepped import SteppedEngine

# The bits of 2.9, which a device has handed back as a token.
NO_TOKEN = 1_077_516_697
GREEDY = Sampling(temperature=0)
FEW = Sampling(temperature=0.8, top_k=40, seed=3)
ALL = Sampling(temperature=0.8, top_k=0, seed=3)


def spoil_ids(monkeypatch: pytest.MonkeyPatch, is_spoiled: Callable[[int], bool]) -> None:
    ids = (ctypes.c_int32 * 64)(*[NO_TOKEN] * 64)
    real = native.llama_get_sampled_candidates_ith
    monkeypatch.setattr(
        native, "llama_get_sampled_candidates_ith", lambda context, row: ids if is_spoiled(row) else real(context, row)
    )


def spoil_counts(monkeypatch: pytest.MonkeyPatch, is_spoiled: Callable[[int], bool]) -> None:
    real = native.llama_get_sampled_candidates_count_ith
    monkeypatch.setattr(
        native,
        "llama_get_sampled_candidates_count_ith",
        lambda context, row: 63 if is_spoiled(row) else real(context, row),
    )


def spoil_draws(monkeypatch: pytest.MonkeyPatch, is_spoiled: Callable[[int], bool]) -> None:
    real = native.llama_sampler_sample
    monkeypatch.setattr(
        native,
        "llama_sampler_sample",
        lambda chain, context, row: NO_TOKEN if is_spoiled(row) else real(chain, context, row),
    )


@pytest.mark.parametrize("samples_on_device", [True, False], ids=["on the device", "on the host"])
@pytest.mark.parametrize(
    ("spoil", "sampling"),
    [(spoil_ids, GREEDY), (spoil_counts, GREEDY), (spoil_counts, FEW), (spoil_draws, FEW)],
    ids=["ids", "counts", "counts, drawn", "drawn ids"],
)
def test_a_token_that_is_none_ends_its_request_alone(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, sampling: Sampling, samples_on_device: bool
) -> None:
    if not samples_on_device and spoil is not spoil_draws:
        pytest.skip("the host finds the tokens itself")
    backend = open_tiny(tiny_gguf, samples_on_device=samples_on_device)
    engine = SteppedEngine(backend, Limits(4, 16, 0.05, 0), time.monotonic)
    said: dict[int, list[int]] = {}
    finals: dict[int, Any] = {}
    victims: set[int] = set()

    def run() -> None:
        while not engine.is_idle:
            step = engine.step()
            for delta in step.deltas if step is not None else ():
                said.setdefault(delta.id, []).extend(delta.tokens)
                if delta.finish is not None:
                    finals[delta.id] = delta

    def ask(request_id: int, first: int, sampling: Sampling) -> None:
        prompt = list(range(first, first + 40))
        engine.submit(Submit(id=request_id, sampling=sampling, n_predict=12, ignore_eos=False), prompt)

    try:
        ask(1, 300, GREEDY)
        run()
        spoil(monkeypatch, lambda row: int(backend.batch.seq[row]) in victims)
        ask(2, 300, GREEDY)
        ask(3, 500, sampling)
        while len(said.get(3, ())) < 3:
            step = engine.step()
            for delta in step.deltas if step is not None else ():
                said.setdefault(delta.id, []).extend(delta.tokens)
        [victim] = (request.seq for request in engine.scheduler.running if request.id == 3)
        victims.add(victim)
        run()
        assert finals[3].finish is Finish.ERROR
        assert finals[3].error_code == "unknown_token"
        assert "ask again" in finals[3].error_message
        assert said[2] == said[1]  # the neighbour's answer is the one that it has alone
        assert finals[2].finish in (Finish.STOP, Finish.LENGTH)
        victims.clear()
        ask(4, 500, sampling)
        run()
        assert finals[4].finish in (Finish.STOP, Finish.LENGTH)
        assert len(said[4]) > len(said[3])
    finally:
        engine.close()
        backend.close()


def test_a_row_whose_logits_are_no_numbers_gives_no_token(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_tiny(tiny_gguf)
    try:
        batch = backend.batch
        batch.token[0], batch.pos[0], batch.seq[0], batch.wants_logits[0] = 300, 0, 0, 1
        backend.decode(1)
        spoiled = backend.logits(0).copy()
        spoiled[7] = np.nan
        monkeypatch.setattr(LlamaContext, "logits", lambda self, row: spoiled)
        assert not backend.is_finite(0)
        for sampling in (GREEDY, FEW, ALL):
            sampler = backend.sampler(sampling, ignore_eos=False)
            assert backend.sample([(sampler, 0)]) == [-1]
            sampler.close()
    finally:
        backend.close()
