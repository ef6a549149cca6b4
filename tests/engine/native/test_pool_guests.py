"""Streams that join a long request in the pool and go home again say what a bare context says."""

from __future__ import annotations

import time
from pathlib import Path

from localrun.engine.engine import Limits
from localrun.engine.native.llama import LlamaBackend
from localrun.wire import Delta, Sampling, Submit
from tests.engine.native.bare import bare
from tests.engine.stepped import SteppedEngine

SHARE = 256
ROUNDING = 0.1
PROMPTS = {0: [300 + at * 3 % 90 for at in range(40)], 1: [500 + at * 7 % 50 for at in range(70)],
           9: [400 + at * 5 % 200 for at in range(SHARE + 100)]}  # fmt: skip
NEWCOMER = [350 + at * 11 % 130 for at in range(150)]


def test_guests_of_the_pool_say_what_they_say_alone(tiny_gguf: Path):
    backend = LlamaBackend(
        str(tiny_gguf), n_cells=8 * SHARE, n_seqs=8, n_spare_seqs=4, n_batch=64, n_threads=1, n_gpu_layers=0,
        kv_type="f16",
    )  # fmt: skip
    engine = SteppedEngine(backend, Limits(8, 64, 0.02, 1 << 28), time.monotonic)
    said: dict[int, list[int]] = {}
    finals: dict[int, Delta] = {}

    def submit(request_id: int, prompt: list[int], n_predict: int) -> None:
        sampling = Sampling(temperature=0)
        engine.submit(
            Submit(id=request_id, sampling=sampling, n_predict=n_predict, ignore_eos=True, speculates=False),
            list(prompt),
        )

    def step() -> int:
        """How many of the two short ones are in the pool afterwards."""
        update = engine.step()
        for delta in update.deltas if update else ():
            said.setdefault(delta.id, []).extend(delta.tokens)
            if delta.finish is not None:
                finals[delta.id] = delta
        return sum(r.seq >= backend.n_seqs for r in engine.scheduler.running if r.id in (0, 1) and r.seq is not None)

    for request_id, prompt in PROMPTS.items():
        submit(request_id, prompt, 120)
    were_guests = False
    while not were_guests:
        assert not engine.is_idle, "nobody came"
        were_guests = step() == 2
    submit(5, NEWCOMER, 8)
    assert step() == 0, "a prompt came"
    while not engine.is_idle:
        step()
    assert finals.keys() == {*PROMPTS, 5}
    for request_id, prompt in (PROMPTS | {5: NEWCOMER}).items():
        with bare(tiny_gguf, []) as alone:
            rows = alone.logits([*prompt, *said[request_id]])[len(prompt) - 1 : -1]
        assert len(rows) == len(said[request_id]) == (8 if request_id == 5 else 120)
        for row, token in zip(rows, said[request_id], strict=True):
            assert row[token] >= row.max() - ROUNDING
    engine.close()
    backend.close()
