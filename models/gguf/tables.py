"""What the pinned llama.cpp knows: types of tensors and files, architectures, tokenizers. Pure.

Which models it can load at all is told by what their headers say first, so it is asked before a transfer, and of every
file. Ollama's registry has models for Ollama's own engine, too: under names of its own (`gptoss`), or with the vision
encoder in the model's file, where llama.cpp wants it in one of its own.

Does not: judge tensors, or what a build was made without. That is found out when the engine process loads the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

# A test compares it with the version that is installed: a new one may load more.
LLAMA_CPP_PYTHON: Final = "0.3.36"
_VERSION: Final = f"llama-cpp-python {LLAMA_CPP_PYTHON}"

# --- types, as GGUF numbers them ---
# Numbers and sizes are those of ggml.h and ggml-common.h (GGML_TYPE_COUNT 43), file types those of enum llama_ftype in
# llama.h. Numbers that are missing here were removed from the format; files with them are refused.


class GgmlType(NamedTuple):
    """A tensor's row is a whole number of blocks; a block of `block_elements` weights takes `block_bytes` bytes."""

    number: int
    name: str
    block_elements: int
    block_bytes: int


_ALL = [
    GgmlType(*row)
    for row in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 36), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18), (42, "Q2_0", 64, 18),
    )
]  # fmt: skip

BY_NUMBER: dict[int, GgmlType] = {entry.number: entry for entry in _ALL}
BY_NAME: dict[str, GgmlType] = {entry.name: entry for entry in _ALL}

# `general.file_type`: what people call the quantization of a whole file.
FILE_TYPES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
# What people write for some of them.
QUANT_ALIASES = {"Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "Q3_K": "Q3_K_M", "FP16": "F16", "FP32": "F32"}

# --- what a model may be ---
# The names are those of `LLM_ARCH_NAMES` in llama-arch.cpp, without projectors (`clip`).

LOADABLE: Final = frozenset(
    {
        *("afmoe", "apertus", "arcee", "arctic", "arwkv7", "baichuan", "bailingmoe", "bailingmoe2", "bailingmoe3"),
        *("bert", "bitnet", "bloom", "chameleon", "chatglm", "codeshell", "cogvlm", "cohere2", "cohere2moe"),
        *("command-r", "dbrx", "deci", "deepseek", "deepseek2", "deepseek2-ocr", "deepseek32", "deepseek4", "dflash"),
        *("dots1", "dots3note", "dream", "eagle3", "ernie4_5", "ernie4_5-moe", "eurobert", "exaone", "exaone-moe"),
        *("exaone4", "falcon", "falcon-h1", "gemma", "gemma-embedding", "gemma2", "gemma3", "gemma3n", "gemma4"),
        *("gemma4-assistant", "glm-dsa", "glm4", "glm4moe", "glm5-next", "gpt-oss", "gpt2", "gptj", "gptneox"),
        *("granite", "granite_swa", "granitehybrid", "granitemoe", "graniteswitch", "grok", "grovemoe", "hrm_text"),
        *("hunyuan-dense", "hunyuan-moe", "hunyuan_vl", "hy_v3", "hy_v4", "internlm2", "jais", "jais2", "jamba"),
        *("jina-bert-v2", "jina-bert-v3", "kimi-k3", "kimi-linear", "laguna", "lfm2", "lfm2moe", "llada", "llada-moe"),
        *("llama", "llama-embed", "llama4", "maincoder", "mamba", "mamba2", "maple", "mellum", "mimo2", "minicpm"),
        *("minicpm3", "minimax-01", "minimax-m2", "minimax-m3", "mistral3", "mistral4", "modern-bert", "mpt"),
        *("muse-glimmer", "nanbeige", "nemotron", "nemotron_h", "nemotron_h_moe", "neo-bert", "nomic-bert"),
        *("nomic-bert-moe", "olmo", "olmo2", "olmoe", "openelm", "orion", "paddleocr", "pangu-embedded", "phi2"),
        *("phi3", "phimoe", "plamo", "plamo2", "plamo3", "plm", "pockettts", "qwen", "qwen2", "qwen2moe", "qwen2vl"),
        *("qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen3tts", "qwen3vl", "qwen3vlmoe", "qwen4exp"),
        *("refact", "rnd1", "rwkv6", "rwkv6qwen2", "rwkv7", "seed_oss", "smallthinker", "smollm3", "spark2_5"),
        *("stablelm", "starcoder", "starcoder2", "step35", "t5", "t5encoder", "talkie", "wavtokenizer-dec", "xverse"),
    }
)

# What llama-vocab.cpp knows as `tokenizer.ggml.model`, and as `tokenizer.ggml.pre` of those that it reads it for.
TOKENIZERS: Final = frozenset(
    {
        *("no_vocab", "none", "llama", "bert", "gpt2", "hybriddna", "whitespace", "t5", "rwkv", "test", "plamo2"),
        "gemma4",
    }
)
_WITH_PRE_TOKENIZER: Final = frozenset({"gpt2", "hybriddna", "whitespace"})
PRE_TOKENIZERS: Final = frozenset(
    {
        *("a.x-4.0", "afmoe", "bailingmoe", "bailingmoe2", "bloom", "chameleon", "chatglm-bpe", "codeshell"),
        *("cohere2moe", "command-r", "dbrx", "deepseek-coder", "deepseek-llm", "deepseek-r1-qwen", "deepseek-v3"),
        *("default", "exaone", "exaone-moe", "exaone4", "f2llmv2", "falcon", "falcon-h1", "falcon3", "gemma4"),
        *("gigachat", "glm4", "glm5", "gpt-2", "gpt-4o", "gpt3-finnish", "granite-docling", "granite-embed-multi-311m"),
        *("granite-embed-multi-97m", "grok-2", "hunyuan", "hunyuan-dense", "hy_v4", "jais", "jais-2", "jina-de"),
        *("jina-es", "jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es", "jina-v5-nano", "joyai-llm", "kanana2"),
        *("kimi-k2", "kormo", "laguna", "lfm2", "llada-moe", "llama-bpe", "llama-v3", "llama3", "llama4", "megrez"),
        *("mellum", "mellum2", "midm-2.0", "minerva-7b", "minicpm5", "minimax-m2", "modern-bert", "mpt", "olmo"),
        *("phi-2", "pixtral", "poro-chat", "qwen2", "qwen35", "refact", "roberta-bpe", "sarvam-moe", "seed-coder"),
        *("smaug-bpe", "smollm", "solar-open", "spark2_5", "stablelm2", "starcoder", "superbpe", "talkie", "tekken"),
        *("tiny_aya", "trillion", "ufakzeka", "viking", "whitespace", "youtu"),
    }
)

# What Ollama's engine calls, and keeps in one file, what llama.cpp knows by another name.
_OLLAMA_ONLY: Final = frozenset({"gptoss", "mllama", "qwen25vl", "deepseekocr"})


def problem(metadata: Mapping[str, object]) -> str:
    """Why no engine here can load a model whose file begins with these entries, as the end of a sentence that begins
    with the model; "" if nothing speaks against it, or the architecture is not among them."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        return ""
    if architecture not in LOADABLE:
        whose = "which only Ollama itself runs" if architecture in _OLLAMA_ONLY else "which llama.cpp cannot load"
        return f"has the architecture '{architecture[:60]}', {whose} ({_VERSION})"
    if f"{architecture}.vision.block_count" in metadata:
        return (
            f"has the architecture '{architecture}' with its vision encoder in the same file, which only Ollama itself "
            f"runs ({_VERSION} wants it in a file of its own)"
        )
    tokenizer, pre = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if isinstance(tokenizer, str) and tokenizer not in TOKENIZERS:
        return f"has the tokenizer '{tokenizer[:60]}', which llama.cpp does not know ({_VERSION})"
    if tokenizer in _WITH_PRE_TOKENIZER and isinstance(pre, str) and pre and pre not in PRE_TOKENIZERS:
        return f"has the pre-tokenizer '{pre[:60]}', which llama.cpp does not know ({_VERSION})"
    return ""
