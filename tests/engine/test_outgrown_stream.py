"""A request that outgrows its stream while others wait for a slot: everybody ends, on the fake and on llama.cpp."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from localrun.engine.engine import Limits
from localrun.engine.native.llama import LlamaBackend
from localrun.wire import Finish, Sampling, Submit
from tests.engine.stepped import SteppedEngine
from tests.fakes.backend import FakeBackend

N_SLOTS, SHARE = 4, 256
LONG = [97 + at % 20 for at in range(SHARE - 40)]


def open_fake(_path: Path) -> FakeBackend:
    return FakeBackend(
        n_cells=N_SLOTS * SHARE, n_seqs=N_SLOTS + 16, n_batch=128, n_slots=N_SLOTS, n_background_seqs=N_SLOTS
    )


def open_llama(path: Path) -> LlamaBackend:
    return LlamaBackend(
        str(path), n_cells=N_SLOTS * SHARE, n_seqs=N_SLOTS, n_spare_seqs=16, n_batch=128, n_threads=1, n_gpu_layers=0,
        kv_type="f16",
    )  # fmt: skip


# The long one may run already when it grows beyond its stream, or come with a prompt that is too long for any.
@pytest.mark.parametrize("n_prompt", [len(LONG), SHARE + 60])
@pytest.mark.parametrize("ram_cache_bytes", [0, 1 << 28])
@pytest.mark.parametrize("opened", [open_fake, open_llama])
def test_everybody_ends_with_as_much_as_was_asked_for(opened, ram_cache_bytes: int, n_prompt: int, tiny_gguf: Path):
    backend = opened(tiny_gguf)
    engine = SteppedEngine(backend, Limits(N_SLOTS, 64, 0.02, ram_cache_bytes), time.monotonic)
    # Nearly all of the second one is in the cache when it starts: it has a single token to compute.
    prompts = {20: (LONG * 2)[:n_prompt], 21: (LONG * 2)[:n_prompt], 22: LONG[:100]}
    prompts |= {30 + at: [65 + at] * 30 for at in range(20)}
    n_outputs = dict.fromkeys(prompts, 20) | {20: 100, 21: 60}
    for request_id, prompt in prompts.items():
        submit = Submit(
            id=request_id, sampling=Sampling(temperature=0), n_predict=n_outputs[request_id], ignore_eos=True
        )
        engine.submit(submit, list(prompt))
    got = dict.fromkeys(prompts, 0)
    finals: dict[int, Finish | None] = {}
    was_long_with_a_queue = False
    for _ in range(20_000):
        if engine.is_idle:
            break
        step = engine.step()
        engine.cache.check_integrity()
        is_long = any(request.is_long for request in engine.scheduler.running)
        was_long_with_a_queue |= is_long and bool(engine.scheduler.waiting)
        for delta in step.deltas if step else ():
            got[delta.id] += len(delta.tokens)
            if delta.finish is not None:
                finals[delta.id] = delta.finish
    engine.close()
    backend.close()
    assert got == n_outputs
    assert finals == dict.fromkeys(prompts, Finish.LENGTH)
    assert was_long_with_a_queue
