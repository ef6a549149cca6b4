"""Figures of llama.cpp that others have published, and what a roofline says for the same machine and model:
`python -m tests.plan.published` prints the table of docs/planning.md.

Tokens per second of one computation: a step of one stream (`tg`), of several (`tg x 8`), or a prompt's batch (`pp`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

from localrun.models.gguf.header import Header
from localrun.models.gguf.reader import read_header
from localrun.plan.roofline import costs_of, device
from tests.support.synthesis.synthesize import write_header
from tests.support.synthesis.tensor_plan import SHAPES, Recurrence, Shape, plan_tensors


def _shape(name: str, n_layers: int, n_embd: int, n_heads: int, n_heads_kv: int, n_ff: int, n_vocab: int,
           *, tied: bool = False) -> Shape:  # fmt: skip
    return Shape(
        name=name, n_layers=n_layers, n_embd=n_embd, n_heads=n_heads, n_heads_kv=n_heads_kv, head_dim=128, n_ff=n_ff,
        n_vocab=n_vocab, n_ctx_train=32768, rope_freq_base=1e6, tied=tied,
    )  # fmt: skip


# As the configurations of the published models state them.
MODELS = {
    "Llama 2 7B": _shape("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
    "Llama 3.1 8B": SHAPES["8b"],
    "Llama 3 70B": _shape("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
    "Llama 3.2 3B": _shape("llama32-3b", 28, 3072, 24, 8, 8192, 128256, tied=True),
    "Qwen 2.5 7B": _shape("qwen25-7b", 28, 3584, 28, 4, 18944, 152064),
    "Qwen 2.5 14B": _shape("qwen25-14b", 48, 5120, 40, 8, 13824, 152064),
    "Qwen 3.8 27B": Shape(
        name="qwen38-27b",
        architecture="qwen35",
        n_layers=64,
        n_embd=5120,
        n_heads=24,
        n_heads_kv=4,
        head_dim=256,
        n_ff=17408,
        n_vocab=248320,
        n_ctx_train=262144,
        rope_freq_base=1e7,
        tied=False,
        attention_every=4,
        recurrence=Recurrence(n_conv=4, n_state=128, n_inner=6144, n_rank=48, n_groups=16),
    ),
    "Qwen 3 8B": _shape("qwen3-8b", 36, 4096, 32, 8, 12288, 151936),
}


class Published(NamedTuple):
    """`n_streams` rows with `depth` tokens before each, or a prompt's `n_prompt` rows."""

    machine: str
    model: str
    file_type: str
    tokens_per_s: float
    source: str
    n_streams: int = 1
    depth: int = 64
    n_prompt: int = 0
    split: str = "layer"

    @property
    def what(self) -> str:
        return self._what + (", tensor split" if self.split == "tensor" else "")

    @property
    def _what(self) -> str:
        if self.n_prompt:
            return f"pp{self.n_prompt}"
        return "tg" if self.n_streams == 1 else f"tg x {self.n_streams}"


_GEERLING = "geerlingguy/ai-benchmarks README"
_SPARK = "llama.cpp benches/dgx-spark.md"
_DAI = "XiongjieDai/GPU-Benchmarks-on-LLM-Inference README"
POINTS = (
    Published("rtx-4090", "Llama 3.2 3B", "Q4_K", 334.67, f"{_GEERLING} (#43)"),
    Published("rtx-4090", "Qwen 2.5 14B", "Q4_K", 92.49, f"{_GEERLING} (#43)"),
    Published("rtx-4090", "Llama 2 7B", "F16", 61.03, "llama.cpp#4766"),
    Published("rtx-4090", "Llama 2 7B", "Q8_0", 98.13, "llama.cpp#4766"),
    Published("rtx-4090", "Llama 2 7B", "F16", 11048.22, "llama.cpp#4766", n_prompt=512),
    Published("rtx-4090", "Llama 2 7B", "Q8_0", 7664.0, "llama.cpp#4766", n_prompt=512),
    Published("rtx-4090", "Llama 3.1 8B", "Q4_0", 1930.5, "llama.cpp#15131", n_prompt=16),
    Published("rtx-3090", "Llama 3.1 8B", "Q4_0", 156.56, "llama.cpp#15802", n_prompt=1),
    Published("rtx-5090", "Qwen 3 8B", "Q4_K", 221.7, "CambrianTech/continuum#1627"),
    Published("gb10", "Llama 3.2 3B", "Q4_K", 97.93, f"{_GEERLING} (#34)"),
    Published("gb10", "Qwen 2.5 14B", "Q4_K", 23.92, f"{_GEERLING} (#34)"),
    Published("gb10", "Qwen 2.5 7B", "Q8_0", 29.24, _SPARK, depth=528),
    Published("gb10", "Qwen 2.5 7B", "Q8_0", 195.67, _SPARK, n_streams=8, depth=528),
    Published("gb10", "Qwen 2.5 7B", "Q8_0", 593.27, _SPARK, n_streams=32, depth=528),
    Published("gb10", "Qwen 2.5 7B", "Q8_0", 163.1, _SPARK, n_streams=8, depth=4112),
    Published("gb10", "Qwen 2.5 7B", "Q8_0", 2379.83, _SPARK, n_prompt=512),
    Published("m3-ultra", "Llama 3.2 3B", "Q4_K", 154.6, f"{_GEERLING} (#42)"),
    Published("m3-ultra", "Qwen 2.5 14B", "Q4_K", 51.85, f"{_GEERLING} (#42)"),
    Published("m4", "Llama 3.2 3B", "Q4_K", 41.31, f"{_GEERLING} (#2)"),
    Published("m4", "Llama 3.1 8B", "Q4_K", 20.87, "brand-o/normiebench#3"),
    Published("m4", "Llama 3.1 8B", "Q4_K", 224.81, "brand-o/normiebench#3", n_prompt=512),
    Published("rtx-3090x2", "Llama 3.1 8B", "Q4_K", 111.67, _DAI, depth=256),
    Published("rtx-3090x2", "Llama 3 70B", "Q4_K", 16.57, _DAI, depth=256),
    Published("rtx-3090x2", "Llama 3 70B", "Q4_K", 357.32, _DAI, n_prompt=512),
    Published("rtx-3090x4", "Llama 3 70B", "Q4_K", 17.07, _DAI, depth=256),
    Published("rtx-4090x2", "Llama 3.1 8B", "F16", 53.64, _DAI, depth=256),
    Published("rtx-4090x2", "Llama 3 70B", "Q4_K", 19.22, _DAI, depth=256),
    Published("rtx-4090x2", "Llama 3 70B", "Q4_K", 839.43, _DAI, n_prompt=512),
    Published("rtx-4090x8", "Llama 3 70B", "F16", 6.47, _DAI, depth=256),
    Published("rtx-5060-ti-16x2", "Qwen 3.8 27B", "Q4_K", 38.3, "sudoingX/qwen38-mtp#32", depth=256, split="tensor"),
    Published("rx-7900-xtxx2", "Qwen 3.8 27B", "Q8_0", 36.26, "llama.cpp#28863", depth=256, split="tensor"),
    Published("ryzen-ai-max-395", "Llama 3.2 3B", "Q4_K", 88.14, f"{_GEERLING} (#21)"),
)


def header_of(model: str, file_type: str, folder: Path) -> Header:
    """A file with such tensors, and a hole for their data."""
    path = folder / f"{MODELS[model].name}-{file_type}.gguf"
    if not path.exists():
        plans = list(plan_tensors(MODELS[model], file_type))
        write_header(path, MODELS[model], plans, file_type, None)
        size = sum(-(-plan.size_bytes // 32) * 32 for plan in plans)
        with path.open("ab") as file:
            file.truncate(-(-file.tell() // 32) * 32 + size)
    return read_header(path)


def predicted_tokens_per_s(point: Published, header: Header) -> float:
    costs = costs_of(header, device(point.machine, point.split), max(point.n_streams, 1))
    if point.n_prompt:
        return point.n_prompt / costs.background.batch_s(point.n_prompt, 0)
    return point.n_streams / costs.streams.step_s(point.n_streams, point.n_streams * point.depth)


def row(point: Published, folder: Path) -> str:
    """Of the table: machine, model, what, published and predicted tokens/s, error, source."""
    said = predicted_tokens_per_s(point, header_of(point.model, point.file_type, folder))
    model = f"{point.model} {point.file_type}{'_M' if point.file_type == 'Q4_K' else ''}"
    error = said / point.tokens_per_s - 1
    return (
        f"| {point.machine} | {model} | {point.what} | {point.tokens_per_s:.0f} | {said:.0f} | {error:+.0%} "
        f"| {point.source} |"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for point in POINTS:
            print(row(point, Path(folder)))


if __name__ == "__main__":
    main()
