"""Computes streams on each GPU and on the CPU, and says how many rows are not the same.

`python -m localrun.engine.tools.device_check MODEL`, started by the doctor. stdout has JSON lines, with the GPU's place
in the list, for two may have one name: `{"number": 0, "device": "..."}` before each GPU is tried, and `{"number": 0,
"device": "...", "n_rows": 60, "n_wrong": 0}` after it. A crash ends the process, and the last line says where.

What is compared is what engines use of a device: the likeliest token of every stream, found where the logits were
computed, while other streams have rows at each step. It is wrong if it is far from being the likeliest on the CPU: by
more than `TOLERANCE` of the range of the row's logits. Rounding on devices was seen to make a hundredth of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import MemoryKind
from localrun.engine.native.context import ContextShape, LlamaContext
from localrun.engine.native.library import Threadpools, gpu_devices, gpus, log_callback, native
from localrun.engine.native.model import load_model
from localrun.engine.tools import own_stdout, say

Logits = NDArray[np.float32]
TOLERANCE = 0.05
N_STREAMS = 3
# Which streams have rows, step by step. A context plans its memory for the first of them, and keeps the plan while
# others have as many rows; so each pair is the first one once, and all streams together come last.
_PAIRS = list(combinations(range(N_STREAMS), 2))
_ALONE = [(seq,) for seq in range(N_STREAMS)]
ROUNDS = [[first, *_PAIRS, *_ALONE, *_PAIRS, tuple(range(N_STREAMS))] for first in _PAIRS]
# Rows of drafts besides, as engines have them: without, llama.cpp lays out memory in another way.
_SHAPE = ContextShape(256, N_STREAMS, 64, 1, "f16", is_split=False, n_draft_rows=8)


def main(path: str) -> None:
    lines = own_stdout()
    native.llama_log_set(log_callback, None)
    names = [name for name, *_ in gpus()]
    for number, (name, device) in enumerate(zip(names, gpu_devices(), strict=True)):
        of_device: dict[str, object] = {"number": number, "device": name}
        say(lines, **of_device)
        there, here = load_model(path, -1, devices=(device,)), load_model(path, 0)
        wrong = [is_wrong(*found) for steps in ROUNDS for found in compared(there, here, steps)]
        say(lines, **of_device, n_rows=len(wrong), n_wrong=sum(wrong))


def compared(there: Any, here: Any, steps: list[tuple[int, ...]]) -> Iterator[tuple[int, Logits]]:
    """Of each row: the token of the model on the device, and the logits of the one on the CPU."""
    on_device, on_cpu = _opened(there, is_device=True), _opened(here, is_device=False)
    lengths = [0] * N_STREAMS
    for number, seqs in enumerate(steps):
        for context in (on_device, on_cpu):
            for row, seq in enumerate(seqs):
                batch = context.batch
                batch.token[row] = (number * 31 + seq * 7) * 37 % context.n_vocab
                batch.pos[row], batch.seq[row], batch.wants_logits[row] = lengths[seq], seq, 1
            context.decode(len(seqs))
        for row, seq in enumerate(seqs):
            lengths[seq] += 1
            yield on_device.likeliest(row), on_cpu.logits(row)
    on_device.close()
    on_cpu.close()


def is_wrong(token: int, logits: Logits) -> bool:
    """Whether this token, or none (negative), cannot be the likeliest of a row."""
    return token < 0 or bool(logits.max() - logits[token] > TOLERANCE * np.ptp(logits))


def _opened(model: Any, *, is_device: bool) -> LlamaContext:
    n_vocab = int(native.llama_vocab_n_tokens(native.llama_model_get_vocab(model)))
    shape = replace(_SHAPE, samples_on_device=is_device)
    pools = Threadpools()
    return LlamaContext(model, shape, pools, kind=MemoryKind.ATTENTION, n_window=0, n_vocab=n_vocab)


if __name__ == "__main__":
    main(sys.argv[1])
