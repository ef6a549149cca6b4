"""llama.cpp beside and after an adapter whose strength is too much for it: its kernels multiply masked cells by 0, and
clear states by 0, and what is no number stays one. The others say what they say alone."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest

from localrun.engine.engine import Limits
from localrun.engine.native.llama import LlamaBackend
from localrun.wire import Adapter, Delta, Finish, Sampling, Submit
from tests.engine.stepped import SteppedEngine
from tests.lora_file import write_lora
from tests.support.synthesis.synthesize import synthesize

TOO_MUCH = 1e37
LONG, SHORT = 700, 40


def prompt(which: int, n_tokens: int) -> list[int]:
    """Those used here have a first token that is ahead of all others by more than rounding changes."""
    return [300 + (at * 7 + which * 13) % 200 for at in range(n_tokens)]


@pytest.mark.parametrize("model", ["tiny", "tiny, split", "tiny-gemma3", "tiny-mamba"])
def test_others_say_what_they_say_alone_beside_and_after(model: str, tmp_path: Path) -> None:
    name, _, is_split = model.partition(", ")
    path = tmp_path / "model.gguf"
    synthesize(name, "F16", path)
    lora = write_lora(path, tmp_path / "lora.gguf", strength=5e-4)
    digest = hashlib.sha256(lora.read_bytes()).digest()
    backend = LlamaBackend(
        str(path), n_cells=4096, n_seqs=4, n_spare_seqs=4, n_batch=256, n_threads=1, n_gpu_layers=0, kv_type="f16",
        may_split=bool(is_split),
    )  # fmt: skip
    engine = SteppedEngine(backend, Limits(4, 64, 0.0, 1 << 26), time.monotonic)
    said: dict[int, list[int]] = {}
    finals: dict[int, Delta] = {}

    def submit(request_id: int, scale: float, tokens: list[int], n_predict: int = 8) -> None:
        adapters = (Adapter(str(lora), digest, scale),) if scale else ()
        sampling = Sampling(temperature=0)
        message = Submit(id=request_id, sampling=sampling, n_predict=n_predict, ignore_eos=True, adapters=adapters)
        engine.submit(message, tokens)

    def run() -> None:
        while not engine.is_idle:
            step = engine.step()
            for delta in step.deltas if step is not None else ():
                said.setdefault(delta.id, []).extend(delta.tokens)
                if delta.finish is not None:
                    finals[delta.id] = delta

    try:
        for round_, culprit in enumerate((None, "beside", "after"), start=1):
            engine.clear_cache(ram=True, disk=True)
            if culprit == "after":
                submit(100 + round_, TOO_MUCH, prompt(5, 500))
                run()
            submit(10 * round_, 0, prompt(1, SHORT), 40)
            if culprit == "beside":
                submit(100 + round_, TOO_MUCH, prompt(5, 500))
            submit(10 * round_ + 1, 0, prompt(12, LONG))
            submit(10 * round_ + 2, 1, prompt(10, LONG))
            run()
            for number in range(3):
                final = finals[10 * round_ + number]
                assert final.finish is Finish.LENGTH, final.error_message
                # What follows depends on rounding, and so on who is computed with whom.
                assert said[10 * round_ + number][0] == said[10 + number][0]
            if culprit:
                assert "NaN" in (finals[100 + round_].error_message or "")
    finally:
        engine.close()
        backend.close()
