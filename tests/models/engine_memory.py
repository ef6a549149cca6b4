"""What a real engine process takes: starts one on a model file, lets it serve, and reads its memory from /proc.

Run as a program it prints the table of models/README.md: `python -m tests.models.engine_memory FOLDER`.
"""

from __future__ import annotations

import platform
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from localrun import framing, wire
from localrun.models.gguf.reader import read_header
from localrun.models.memory import MemoryEstimate, estimate
from tests.support.synthesis.synthesize import synthesize
from tests.support.synthesis.tensor_plan import SHAPES, Recurrence, Shape

N_BATCH = 512
SHORT_PROMPT_TOKENS = 20
STREAM_TOKENS = 64
MIB = 1024 * 1024

# Real dimensions of the memory kinds that `SHAPES` has in small only: Gemma 3 1B, Mamba 130M, LFM2 350M (with its
# attention in every third layer).
MORE_SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="gemma3-1b", architecture="gemma3", n_layers=26, n_embd=1152, n_heads=4, n_heads_kv=1, head_dim=256,
            n_ff=6912, n_vocab=262_144, n_ctx_train=32_768, rope_freq_base=1_000_000.0, tied=True, attention_every=6,
            n_window=512,
        ),
        Shape(
            name="mamba-130m", architecture="mamba", n_layers=24, n_embd=768, n_heads=0, n_heads_kv=0, head_dim=0,
            n_ff=0, n_vocab=50_280, n_ctx_train=4096, rope_freq_base=10_000.0, tied=True, attention_every=0,
            recurrence=Recurrence(n_conv=4, n_state=16, n_inner=1536, n_rank=48),
        ),
        Shape(
            name="lfm2-350m", architecture="lfm2", n_layers=16, n_embd=1024, n_heads=16, n_heads_kv=8, head_dim=64,
            n_ff=4608, n_vocab=65_536, n_ctx_train=32_768, rope_freq_base=1_000_000.0, tied=True, attention_every=3,
            recurrence=Recurrence(n_conv=3),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    shape: str
    file_type: str
    n_slots: int = 4
    n_kv_cells: int = 4096
    kv_type: str = "f16"


CASES = (
    Case("135m", "Q8_0"),
    Case("135m", "Q4_0", n_slots=8),
    Case("135m", "F16", n_slots=2),
    Case("135m", "Q4_K", n_slots=1, n_kv_cells=2048),
    Case("135m", "Q4_K", n_kv_cells=8192, kv_type="q8_0"),
    Case("0.5b", "Q4_0"),
    Case("0.5b", "Q8_0", n_slots=8, n_kv_cells=16_384, kv_type="q8_0"),
    Case("1b", "Q4_0"),
    Case("1b", "Q4_K", n_slots=1, n_kv_cells=1024, kv_type="q4_0"),
    Case("gemma3-1b", "Q4_0", n_kv_cells=8192),
    Case("mamba-130m", "Q8_0", n_slots=8),
    Case("lfm2-350m", "Q4_0", n_kv_cells=8192),
    # Measured once the constants of the estimate were chosen by the others.
    Case("1b", "Q8_0", n_slots=8),
    Case("0.5b", "F16", n_slots=3, n_kv_cells=3072, kv_type="q4_0"),
    Case("0.5b", "Q4_K", n_slots=16, n_kv_cells=8192),
    Case("gemma3-1b", "Q8_0", n_slots=2, n_kv_cells=4096, kv_type="q8_0"),
)


# The estimate is for the time when every cell has been used. Until then an engine takes less, for it gives the pages of
# cells that nobody has used back to the system; here it keeps them, which is quicker than filling them all.
WITH_ALL_CELLS = """
import sys
from localrun.engine.native.context import LlamaContext
from localrun.engine.process import LLAMA, main
LlamaContext.give_back_cells = lambda context: 0
sys.exit(main(LLAMA))
"""


class Measured(NamedTuple):
    """The estimate and, in bytes, what the process had: resident when ready, and at its peak while it served."""

    estimate: MemoryEstimate
    ready_bytes: int
    peak_bytes: int

    @property
    def error(self) -> float:
        """By what part of the measured peak the estimate is off; positive when it is too high."""
        return self.estimate.resident_bytes / self.peak_bytes - 1


def measure(case: Case, folder: Path) -> Measured:
    """Writes the model of `case` below `folder`, unless it is there, and runs an engine on it. Linux only."""
    SHAPES.update(MORE_SHAPES)
    path = folder / f"{case.shape}-{case.file_type}.gguf"
    if not path.exists():
        synthesize(case.shape, case.file_type, path)
    header = read_header(path)
    needed = estimate(header, n_kv_cells=case.n_kv_cells, n_slots=case.n_slots, n_ubatch=N_BATCH, kv_type=case.kv_type)
    opening = wire.Open(
        model_path=str(path), n_slots=case.n_slots, n_kv_cells=case.n_kv_cells, n_batch=N_BATCH, n_threads=2,
        n_gpu_layers=0, kv_type=case.kv_type, target_itl_s=0.0, ram_cache_bytes=0, max_queue=16,
    )  # fmt: skip
    command = [sys.executable, "-c", WITH_ALL_CELLS]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        _send(process.stdin, opening)
        ready = _next(process.stdout)
        assert isinstance(ready, wire.Ready), ready
        ready_bytes = _status(process.pid, "VmRSS")
        # Streams in all slots but one, and a prompt as long as a slot's share, which is computed beside them.
        n_long = min(case.n_kv_cells // case.n_slots, header.n_ctx_train) - 16
        _serve(process, case.n_slots, n_long, header.n_vocab)
        return Measured(needed, ready_bytes, _status(process.pid, "VmHWM"))


def _serve(process: subprocess.Popen[bytes], n_slots: int, n_long: int, n_vocab: int) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    rng = random.Random(0)
    for number in range(1, n_slots + 1):
        n_tokens, n_predict = (n_long, 4) if number == n_slots else (SHORT_PROMPT_TOKENS, STREAM_TOKENS)
        tokens = tuple(rng.randrange(10, n_vocab) for _ in range(n_tokens))
        _send(process.stdin, wire.Submit(id=number, tokens=tokens, n_predict=n_predict, ignore_eos=True))
    running = set(range(1, n_slots + 1))
    while running:
        step = _next(process.stdout)
        assert isinstance(step, wire.Step), step
        running -= {delta.id for delta in step.deltas if delta.finish is not None}


def _send(pipe: IO[bytes], message: object) -> None:
    pipe.write(framing.encode(message))
    pipe.flush()


def _next(pipe: IO[bytes]) -> object:
    body = framing.read_body(pipe)  # type: ignore[arg-type]
    assert body is not None, "the engine ended"
    return framing.decode_from_engine(body)


def _status(pid: int, field: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", text)
    assert found
    return int(found[1]) * 1024


def main() -> None:
    folder = Path(sys.argv[1])
    print(f"{platform.machine()}, {platform.system()}")
    columns = [
        *("shape, type", "slots, cells, KV", "weights", "KV", "compute", "background", "process", "copied"),
        *("estimate", "measured", "off"),
    ]
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for case in CASES:
        seen = measure(case, folder)
        parts = seen.estimate
        sizes = [*parts[:6], parts.resident_bytes, seen.peak_bytes]
        cells = " | ".join(f"{size / MIB:.0f}" for size in sizes)
        setting = f"{case.n_slots}, {case.n_kv_cells}, {case.kv_type}"
        print(f"| {case.shape} {case.file_type} | {setting} | {cells} | {seen.error:+.1%} |", flush=True)
        print(f"    ready {seen.ready_bytes / MIB:.0f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
