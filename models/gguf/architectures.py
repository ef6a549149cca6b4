"""Which models the pinned llama.cpp can load at all, by what their headers say first: asked before a transfer,
and of every file.

Pure. The names are those of `LLM_ARCH_NAMES` in llama-arch.cpp of `LLAMA_CPP_PYTHON`, without projectors (`clip`),
and of its tokenizers.
Ollama's registry has models for Ollama's own engine, too: under names of its own (`gptoss`), or with the vision encoder
in the model's file, where llama.cpp wants it in one of its own.

Does not: judge tensors, or what a build was made without. That is found out when the engine process loads the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from localrun.models.gguf.header import Value

# A test compares it with the version that is installed: a new one may load more.
LLAMA_CPP_PYTHON: Final = "0.3.36"
_VERSION: Final = f"llama-cpp-python {LLAMA_CPP_PYTHON}"

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


def problem(metadata: Mapping[str, Value]) -> str:
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
