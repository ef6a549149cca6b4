"""Writes the trained network as a GGUF file that llama.cpp opens: architecture `llama`, F16 matrices, F32 norms.

Training-time only. The names and the order of pairs in the rotary part are llama.cpp's own, so no weight is permuted.
The output matrix is not written: it is the embedding, and llama.cpp then takes that.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy
from tokenizers import Tokenizer

from tiny import tokenizer as bpe
from tiny.network import Network

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
DESCRIPTION = "A four-million-parameter chat model that comes with localrun, trained on text its own recipe writes."

BLOCK_TENSORS = {
    "attention_norm.weight": "attn_norm.weight",
    "attention.query.weight": "attn_q.weight",
    "attention.key.weight": "attn_k.weight",
    "attention.value.weight": "attn_v.weight",
    "attention.output.weight": "attn_output.weight",
    "feed_forward_norm.weight": "ffn_norm.weight",
    "feed_forward.gate.weight": "ffn_gate.weight",
    "feed_forward.up.weight": "ffn_up.weight",
    "feed_forward.down.weight": "ffn_down.weight",
}


def tensor_name(parameter: str) -> str:
    """`blocks.0.attention.query.weight` -> `blk.0.attn_q.weight`."""
    if parameter == "embedding.weight":
        return "token_embd.weight"
    if parameter == "final_norm.weight":
        return "output_norm.weight"
    _, index, rest = parameter.split(".", 2)
    return f"blk.{index}.{BLOCK_TENSORS[rest]}"


def write(path: Path, network: Network, tokenizer: Tokenizer) -> int:
    """Writes the file and returns its size in bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    add_description(writer)
    add_shape(writer, network)
    add_tokenizer(writer, tokenizer)
    for name, parameter in network.named_parameters():
        values = parameter.detach().float().numpy()
        writer.add_tensor(tensor_name(name), values.astype(numpy.float16 if values.ndim == 2 else numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.stat().st_size


def add_description(writer: gguf.GGUFWriter) -> None:
    """The `general.*` keys."""
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name("tiny")
    writer.add_basename("tiny")
    writer.add_size_label("4M")
    writer.add_author("the localrun project")
    writer.add_organization("localrun")
    writer.add_license("mit")
    writer.add_description(DESCRIPTION)
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def add_shape(writer: gguf.GGUFWriter, network: Network) -> None:
    """The `llama.*` keys."""
    shape = network.shape
    writer.add_context_length(shape.context_tokens)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.feed_forward_width)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_vocab_size(shape.vocab_size)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """The `tokenizer.*` keys. No BOS is added, so its id only has to be valid."""
    tokens, merges = bpe.vocabulary(tokenizer)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(bpe.PRE_TOKENIZER_NAME)
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in bpe.CONTROL_TOKENS else normal for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(bpe.END_OF_TEXT_ID)
    writer.add_eos_token_id(bpe.TURN_END_ID)
    writer.add_eot_token_id(bpe.TURN_END_ID)
    writer.add_pad_token_id(bpe.END_OF_TEXT_ID)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)
