"""Writes random-weight GGUF files of real models' shapes, for tests and benchmarks; and the smallest ones that take
every kernel a real model would, for the probe of the native library (`localrun.kernel_probe`).

The files load in llama.cpp like any other: a working byte-level BPE tokenizer, control tokens, a ChatML template, the
real model's dimensions and context length. Their text is nonsense. The same arguments give the same bytes. The files
for the probe have no vocabulary; all matrices of one have one type, so that what goes wrong has one name.

Memory stays below about 300 MiB for any shape: tensors are streamed from small pools of random blocks, which are tiled
(see `random_blocks`). The file appears under its name only when it is whole.

Does not: make mixtures of experts, encoders or projectors; only the architectures that `tensor_plan` names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np

# Here, not at its first use: its modules swallow a KeyboardInterrupt that comes while they are imported.
from numpy.random import default_rng

from localrun.errors import BadRequest
from localrun.models.gguf.ggml_types import by_name
from localrun.models.synthesis.random_blocks import BlockPool
from localrun.models.synthesis.synthetic_tokenizer import (
    CHAT_TEMPLATE,
    CONTROL_TOKENS,
    END_OF_TEXT,
    TURN_END,
    Vocabulary,
    make_vocabulary,
)
from localrun.models.synthesis.tensor_plan import SHAPES, TYPES, Recurrence, Shape, TensorPlan, plan_tensors

_ALIGNMENT = 32


def synthesize(shape: str, type: str, out: Path, seed: int = 0) -> None:  # noqa: A002 - the CLI's word for it
    """Write a model of `shape` (a key of `SHAPES`) and `type` (a key of `TYPES`) to `out`, replacing what is there.

    Raises BadRequest for an unknown shape or type, and OSError when the disk refuses.
    """
    if shape not in SHAPES:
        raise BadRequest(f"unknown shape '{shape}'; the shapes are {', '.join(SHAPES)}", field="shape")
    if type not in TYPES:
        raise BadRequest(f"unknown type '{type}'; the types are {', '.join(TYPES)}", field="type")
    plans = list(plan_tensors(SHAPES[shape], type))
    partial = out.with_name(out.name + ".part")
    try:
        write_model(partial, SHAPES[shape], plans, type, make_vocabulary(SHAPES[shape].n_vocab), seed)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)


def write_model(
    path: Path, shape: Shape, plans: list[TensorPlan], file_type: str, vocabulary: Vocabulary | None, seed: int
) -> None:
    """Write a file of these tensors. Without a vocabulary its tokens have numbers and no texts."""
    _write_header(path, shape, plans, file_type, vocabulary)
    with path.open("ab") as file:
        _pad(file)
        _write_tensors(file, plans, seed)


def _write_reference(path: Path, shape: Shape, plans: list[TensorPlan]) -> None:
    """The same weights as `write_model` writes for the probe, as F32."""
    _write_header(path, shape, [replace(plan, type=by_name("F32")) for plan in plans], "F32", None)
    with path.open("ab") as file:
        _pad(file)
        _write_tensors(file, plans, seed=0, as_f32=True)


def _write_header(
    path: Path, shape: Shape, plans: list[TensorPlan], file_type: str, vocabulary: Vocabulary | None
) -> None:
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(f"synthetic {shape.name} {file_type}")
    writer.add_description("random weights for tests and benchmarks")
    if file_type in TYPES:
        writer.add_file_type(TYPES[file_type])
    writer.add_quantization_version(2)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers + shape.n_nextn)
    if shape.n_nextn:
        writer.add_nextn_predict_layers(shape.n_nextn)
    writer.add_feed_forward_length(shape.n_ff)
    _add_attention(writer, shape)
    _add_recurrence(writer, shape)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.n_vocab)
    if vocabulary is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        add_tokenizer(writer, vocabulary)
    for plan in plans:
        number = gguf.GGMLQuantizationType(plan.type.number)
        writer.add_tensor_info(plan.name, plan.shape[::-1], np.dtype(np.float32), plan.size_bytes, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    """The entries of a file that say what its tokens are."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.token_types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(CONTROL_TOKENS.index(END_OF_TEXT))
    writer.add_eos_token_id(CONTROL_TOKENS.index(TURN_END))
    writer.add_eot_token_id(CONTROL_TOKENS.index(TURN_END))
    writer.add_pad_token_id(CONTROL_TOKENS.index(END_OF_TEXT))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_attention(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_head_count(shape.n_heads)
    if not shape.n_heads:
        return
    if shape.architecture == "lfm2":
        # No key head marks a layer as recurrent.
        layers = range(shape.n_layers)
        writer.add_head_count_kv([0 if shape.is_recurrent(layer) else shape.n_heads_kv for layer in layers])
    else:
        writer.add_head_count_kv(shape.n_heads_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_freq_base)
    if shape.n_window:
        writer.add_sliding_window(shape.n_window)
    if shape.architecture in ("qwen35", "qwen2vl"):
        # Positions in time, height, width; the fourth is not used. Together they are the rotated pairs of a head.
        third = shape.head_dim // 2 // 3
        writer.add_rope_dimension_sections([shape.head_dim // 2 - 2 * third, third, third, 0])


def _add_recurrence(writer: gguf.GGUFWriter, shape: Shape) -> None:
    recurrence = shape.recurrence
    if recurrence is None:
        return
    if shape.architecture == "lfm2":
        writer.add_shortconv_l_cache(recurrence.n_conv)
        return
    writer.add_ssm_conv_kernel(recurrence.n_conv)
    writer.add_ssm_inner_size(recurrence.n_inner)
    writer.add_ssm_state_size(recurrence.n_state)
    writer.add_ssm_time_step_rank(recurrence.n_rank)
    if shape.architecture == "qwen35":
        writer.add_ssm_group_count(recurrence.n_groups)
        writer.add_full_attention_interval(shape.attention_every)


def _write_tensors(file: BinaryIO, plans: list[TensorPlan], seed: int, *, as_f32: bool = False) -> None:
    rng = default_rng(seed)
    n_rows_max = max(plan.n_rows for plan in plans)
    pools: dict[tuple[str, int], BlockPool] = {}
    for plan in plans:
        fan_in = plan.shape[0]
        if plan.fill is not None:
            file.write(np.full(fan_in * plan.n_rows, plan.fill, dtype="<f4").tobytes())
        else:
            key = (plan.type.name, fan_in)
            if key not in pools:
                pools[key] = BlockPool(plan.type, fan_in, n_rows_max, rng)
            for chunk in pools[key].chunks(plan.size_bytes):
                number = gguf.GGMLQuantizationType(plan.type.number)
                file.write((gguf.quants.dequantize(chunk, number) if as_f32 else chunk).data)
        _pad(file)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))


# What published files are made of, the mixes and gpt-oss's included, and whatever else has quick kernels somewhere.
WEIGHT_TYPES = ("F16", "Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")

_LLAMA = Shape(
    name="probe-llama", n_layers=1, n_embd=256, n_heads=4, n_heads_kv=2, head_dim=64, n_ff=256, n_vocab=512,
    n_ctx_train=256, rope_freq_base=10_000.0, tied=True,
)  # fmt: skip
# By kind of memory (`memory.memory_kind`), in the order in which they are probed. Hybrids differ in what their
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


def write_probe_models(folder: Path) -> Iterator[tuple[str, str, Path, Path | None]]:
    """Writes them all to a folder, one by one: weight type, kind of memory, the file, and for the first kind of memory
    one with the same weights as F32."""
    for kind, shapes in PROBE_SHAPES.items():
        for weight_type in WEIGHT_TYPES:
            for shape in shapes:
                path = folder / f"{shape.name}-{weight_type}.gguf"
                plans = [
                    replace(plan, type=by_name(weight_type)) if plan.type.name == "F16" else plan
                    for plan in plan_tensors(shape, "F16")
                ]
                write_model(path, shape, plans, weight_type, None, seed=0)
                reference = folder / f"{shape.name}-{weight_type}-F32.gguf" if shape is _LLAMA else None
                if reference:
                    _write_reference(reference, shape, plans)
                yield weight_type, kind, path, reference
