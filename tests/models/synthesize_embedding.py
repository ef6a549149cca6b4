"""Writes small random-weight GGUF files of models for embeddings and ranking, for tests.

Four kinds: encoders with a WordPiece vocabulary as BERT has, pooling by the mean, and one with a reranker's head; and
decoders as Qwen3 has, pooling by the last token, and one that ranks with a template for pairs. They load in llama.cpp
like any other; what they compute is nonsense, but the same nonsense every time. The same arguments give the same bytes.

Does not: write models that generate (`synthesize`), or quantize.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from localrun.errors import BadRequest
from tests.support.synthesis.synthetic_tokenizer import COMMON_WORDS, CONTROL_TOKENS, END_OF_TEXT, make_vocabulary

__all__ = ["KINDS", "synthesize_embedding"]

Matrix = npt.NDArray[np.float32]

PAIR_TEMPLATE = (
    "<|im_start|>system\nDoes the document answer the query? Say yes or no.<|im_end|>\n"
    "<|im_start|>user\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
)

_WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_PAD, _UNK, _CLS, _SEP, _MASK = range(5)
_WORD_START = "\u2581"
# Values of enum llama_token_type.
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Dimensions, and the pooling by its number in llama.cpp."""

    name: str
    architecture: str
    pooling: gguf.PoolingType
    n_layers: int = 3
    n_embd: int = 64
    n_heads: int = 4
    n_heads_kv: int = 4
    n_ff: int = 128
    n_ctx_train: int = 128


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="tiny-bert", architecture="bert", pooling=gguf.PoolingType.MEAN),
        Kind(name="tiny-bert-reranker", architecture="bert", pooling=gguf.PoolingType.RANK),
        Kind(
            name="tiny-qwen3-embedding", architecture="qwen3", pooling=gguf.PoolingType.LAST, n_heads_kv=2,
            n_ctx_train=2048,
        ),
        Kind(
            name="tiny-qwen3-reranker", architecture="qwen3", pooling=gguf.PoolingType.RANK, n_heads_kv=2,
            n_ctx_train=2048,
        ),
    )
}  # fmt: skip


def synthesize_embedding(kind: str, out: Path, seed: int = 0) -> None:
    """Write a model of `kind` (a key of `KINDS`) to `out`, replacing what is there. Raises BadRequest for another."""
    if kind not in KINDS:
        raise BadRequest(f"unknown kind '{kind}'; the kinds are {', '.join(KINDS)}", field="kind")
    made = KINDS[kind]
    partial = out.with_name(out.name + ".part")
    writer = gguf.GGUFWriter(partial, made.architecture)
    writer.add_name(f"synthetic {made.name}")
    writer.add_description("random weights for tests")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(made.n_ctx_train)
    writer.add_embedding_length(made.n_embd)
    writer.add_block_count(made.n_layers)
    writer.add_feed_forward_length(made.n_ff)
    writer.add_head_count(made.n_heads)
    writer.add_head_count_kv(made.n_heads_kv)
    writer.add_pooling_type(made.pooling)
    rng = np.random.default_rng(seed)
    is_encoder = made.architecture == "bert"
    n_vocab = (_add_wordpiece if is_encoder else _add_bpe)(writer, made)
    for name, tensor in (_encoder_tensors if is_encoder else _decoder_tensors)(made, n_vocab, _Draw(rng)):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(out)


def _add_wordpiece(writer: gguf.GGUFWriter, kind: Kind) -> int:
    """Special tokens, letters that begin and continue a word, and whole words. Returns the number of tokens."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1) if not chr(code).isupper()]
    words = [word.lower() for word in COMMON_WORDS if len(word) > 1]
    starts = [_WORD_START + text for text in (*letters, *words)]
    tokens = list(dict.fromkeys([*_WORDPIECE_SPECIAL, *starts, *letters]))
    types = [_CONTROL] * len(_WORDPIECE_SPECIAL) + [_NORMAL] * (len(tokens) - len(_WORDPIECE_SPECIAL))
    types[_UNK] = _UNKNOWN
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_token_type_count(2)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(_CLS)
    writer.add_sep_token_id(_SEP)
    writer.add_unk_token_id(_UNK)
    writer.add_pad_token_id(_PAD)
    writer.add_mask_token_id(_MASK)
    return len(tokens)


def _add_bpe(writer: gguf.GGUFWriter, kind: Kind) -> int:
    vocabulary = make_vocabulary(1024)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_key_length(kind.n_embd // kind.n_heads)
    writer.add_value_length(kind.n_embd // kind.n_heads)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.token_types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_eos_token_id(CONTROL_TOKENS.index(END_OF_TEXT))
    writer.add_pad_token_id(CONTROL_TOKENS.index(END_OF_TEXT))
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(True)
    if kind.pooling == gguf.PoolingType.RANK:
        writer.add_classifier_output_labels(["yes", "no"])
        writer.add_chat_template([{"name": "rerank", "template": PAIR_TEMPLATE}])
    return len(vocabulary.tokens)


class _Draw:
    """Random weights that keep activations at their size, and norms that are not quite one."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def matrix(self, n_out: int, n_in: int) -> Matrix:
        return self._rng.standard_normal((n_out, n_in), np.float32) / np.float32(math.sqrt(n_in))

    def bias(self, n_out: int) -> Matrix:
        return self._rng.standard_normal(n_out, np.float32) * np.float32(0.1)

    def norm(self, width: int) -> Matrix:
        return np.float32(1) + self.bias(width)


_Tensors = Iterator[tuple[str, Any]]


def _encoder_tensors(kind: Kind, n_vocab: int, draw: _Draw) -> _Tensors:
    width = kind.n_embd
    yield "token_embd.weight", draw.matrix(n_vocab, width) * np.float32(math.sqrt(width))
    yield "token_types.weight", draw.matrix(2, width)
    yield "position_embd.weight", draw.matrix(kind.n_ctx_train, width)
    yield from _with_bias("token_embd_norm", draw.norm(width), draw.bias(width))
    for layer in range(kind.n_layers):
        prefix = f"blk.{layer}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield from _with_bias(prefix + name, draw.matrix(width, width), draw.bias(width))
        yield from _with_bias(prefix + "attn_output_norm", draw.norm(width), draw.bias(width))
        yield from _with_bias(prefix + "ffn_up", draw.matrix(kind.n_ff, width), draw.bias(kind.n_ff))
        yield from _with_bias(prefix + "ffn_down", draw.matrix(width, kind.n_ff), draw.bias(width))
        yield from _with_bias(prefix + "layer_output_norm", draw.norm(width), draw.bias(width))
    if kind.pooling == gguf.PoolingType.RANK:
        yield from _with_bias("cls", draw.matrix(width, width), draw.bias(width))
        yield from _with_bias("cls.output", draw.matrix(1, width), draw.bias(1))


def _decoder_tensors(kind: Kind, n_vocab: int, draw: _Draw) -> _Tensors:
    width, head_dim = kind.n_embd, kind.n_embd // kind.n_heads
    kv_width = head_dim * kind.n_heads_kv
    yield "token_embd.weight", draw.matrix(n_vocab, width)
    yield "output_norm.weight", draw.norm(width)
    for layer in range(kind.n_layers):
        prefix = f"blk.{layer}."
        matrices: tuple[tuple[str, int, int], ...] = (
            ("attn_q", width, width), ("attn_k", kv_width, width), ("attn_v", kv_width, width),
            ("attn_output", width, width), ("ffn_gate", kind.n_ff, width), ("ffn_up", kind.n_ff, width),
            ("ffn_down", width, kind.n_ff),
        )  # fmt: skip
        for name, n_out, n_in in matrices:
            yield f"{prefix}{name}.weight", draw.matrix(n_out, n_in)
        norms: tuple[tuple[str, int], ...] = (
            ("attn_norm", width), ("ffn_norm", width), ("attn_q_norm", head_dim), ("attn_k_norm", head_dim),
        )  # fmt: skip
        for name, size in norms:
            yield f"{prefix}{name}.weight", draw.norm(size)
    if kind.pooling == gguf.PoolingType.RANK:
        yield "cls.output.weight", draw.matrix(2, width)


def _with_bias(name: str, weight: Matrix, bias: Matrix) -> _Tensors:
    yield f"{name}.weight", weight
    yield f"{name}.bias", bias
