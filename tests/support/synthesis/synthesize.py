"""Writes random-weight GGUF files of real models' shapes, for tests and benchmarks:
`python -m tests.support.synthesis.synthesize SHAPE TYPE OUT`.

The files load in llama.cpp like any other: a working byte-level BPE tokenizer, control tokens, a ChatML template, the
real model's dimensions and context length. Their text is nonsense. The same arguments give the same bytes.

Memory stays below about 300 MiB for any shape: tensors are streamed from small pools of random blocks, which are tiled
(see `random_blocks`). The file appears under its name only when it is whole.

Does not: make mixtures of experts, encoders or projectors; only the architectures that `tensor_plan` names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np

# Here, not at its first use: its modules swallow a KeyboardInterrupt that comes while they are imported.
from numpy.random import default_rng

from localrun.doctor.probe_models import BlockPool
from localrun.errors import BadRequest
from tests.support.synthesis.synthetic_tokenizer import (
    CHAT_TEMPLATE,
    CONTROL_TOKENS,
    END_OF_TEXT,
    TURN_END,
    Vocabulary,
    make_vocabulary,
)
from tests.support.synthesis.tensor_plan import SHAPES, TYPES, Shape, TensorPlan, plan_tensors

_ALIGNMENT = 32


def synthesize(shape: str, type: str, out: Path, seed: int = 0) -> None:  # noqa: A002 - the field's word for it
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
    write_header(path, shape, plans, file_type, vocabulary)
    with path.open("ab") as file:
        _pad(file)
        _write_tensors(file, plans, seed)


def write_header(
    path: Path, shape: Shape, plans: list[TensorPlan], file_type: str, vocabulary: Vocabulary | None
) -> None:
    """All of a file that comes before the tensors' data."""
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


def _write_tensors(file: BinaryIO, plans: list[TensorPlan], seed: int) -> None:
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
                file.write(chunk.data)
        _pad(file)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))


if __name__ == "__main__":
    synthesize(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
