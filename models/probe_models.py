"""The smallest files that take every kernel a real model would: one for each weight type and kind of memory.

For the probe of the native library (`localrun.kernel_probe`). All matrices of a file have one type, so that what goes
wrong has one name. Their rows are multiples of 256 elements and their columns of 32, as the interleaved and the tiled
kernels want them; smaller ones would be computed in the plain way and prove nothing.

Does not: compute (`localrun.engine.tools.probe`), or hold texts: the files have no vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from localrun.models.ggml_types import by_name
from localrun.models.shapes import Recurrence, Shape
from localrun.models.synthesize import write_model
from localrun.models.tensor_plan import plan_tensors

# What published files are made of: F16, the simple ones, and the parts of the mixes Q4_K_M, Q5_K_M and IQ4_XS.
WEIGHT_TYPES = ("F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")

_LLAMA = Shape(
    name="probe-llama", n_layers=1, n_embd=256, n_heads=4, n_heads_kv=2, head_dim=64, n_ff=256, n_vocab=512,
    n_ctx_train=256, rope_freq_base=10_000.0, tied=True,
)  # fmt: skip
# By kind of memory (`layer_memory.memory_kind`), in the order in which they are probed. Hybrids differ in what their
# other layers are.
PROBE_SHAPES: dict[str, tuple[Shape, ...]] = {
    "attention": (_LLAMA,),
    "window": (
        replace(_LLAMA, name="probe-gemma3", architecture="gemma3", n_layers=2, attention_every=6, n_window=32),
    ),
    "recurrent": (
        replace(
            _LLAMA, name="probe-mamba", architecture="mamba", attention_every=0, n_heads=0, n_heads_kv=0, head_dim=0,
            n_ff=0, recurrence=Recurrence(n_conv=4, n_state=16, n_inner=512, n_rank=16),
        ),
    ),
    "hybrid": (
        replace(
            _LLAMA, name="probe-qwen35", architecture="qwen35", n_layers=2, attention_every=2,
            recurrence=Recurrence(n_conv=4, n_state=64, n_inner=256, n_rank=4, n_groups=2),
        ),
        replace(
            _LLAMA, name="probe-lfm2", architecture="lfm2", n_layers=2, attention_every=2,
            recurrence=Recurrence(n_conv=3),
        ),
    ),
}  # fmt: skip


def write_probe_models(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Writes them all to a folder, one by one: weight type, kind of memory, and the file."""
    for kind, shapes in PROBE_SHAPES.items():
        for weight_type in WEIGHT_TYPES:
            for shape in shapes:
                path = folder / f"{shape.name}-{weight_type}.gguf"
                plans = [
                    replace(plan, type=by_name(weight_type)) if plan.type.name == "F16" else plan
                    for plan in plan_tensors(shape, "F16")
                ]
                write_model(path, shape, plans, weight_type, None, seed=0)
                yield weight_type, kind, path
