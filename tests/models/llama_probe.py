"""Runs in a process of its own: loads models in llama.cpp, tokenizes, decodes greedily, says what it saw.

A line of its input is a JSON list: model, n_ctx, n_slots, n_ubatch, number of the KV type, texts. A line of its output
is a JSON object. It ends with its input.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from typing import Any

import llama_cpp
import numpy as np

from localrun.models.memory import SNAPSHOTS

log: list[str] = []


@llama_cpp.llama_log_callback
def remember(_level: int, text: bytes, _data: Any) -> None:
    log.append(text.decode(errors="replace"))


def logged_mib(kind: str) -> float:
    return sum(map(float, re.findall(rf"{kind} buffer size = +([\d.]+) MiB", "".join(log))))


def seen(path: str, n_ctx: int, n_slots: int, n_ubatch: int, kv_type: int, texts: list[str]) -> dict[str, Any]:
    log.clear()
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
    assert model, "".join(log)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_ubatch, n_ubatch
    params.n_seq_max = params.n_outputs_max = n_slots
    params.kv_unified = True
    params.type_k = params.type_v = kv_type
    params.flash_attn_type = 1
    params.swa_full = False
    params.n_rs_seq = SNAPSHOTS
    params.n_threads = params.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, params)
    assert context, "".join(log)
    vocab = llama_cpp.llama_model_get_vocab(model)
    n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)

    def tokenize(text: str, parse_special: bool) -> list[int]:
        raw = text.encode()
        buffer = (llama_cpp.llama_token * (len(raw) + 8))()
        n = llama_cpp.llama_tokenize(vocab, raw, len(raw), buffer, len(buffer), True, parse_special)
        return list(buffer[:n])

    def detokenize(tokens: list[int]) -> str:
        buffer = ctypes.create_string_buffer(64 * len(tokens) + 64)
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        n = llama_cpp.llama_detokenize(vocab, array, len(tokens), buffer, len(buffer), False, True)
        return buffer.raw[:n].decode(errors="replace")

    tokenized = [tokenize(text, True) for text in texts]
    next_tokens = tokenized[0]
    generated: list[int] = []
    finite, logits_std = True, 0.0
    for _ in range(8):
        array = (llama_cpp.llama_token * len(next_tokens))(*next_tokens)
        assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(next_tokens))) == 0
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (n_vocab,))
        finite = finite and bool(np.isfinite(logits).all())
        logits_std = float(logits.std())
        next_tokens = [int(logits.argmax())]
        generated += next_tokens
    found = {
        "n_vocab": n_vocab,
        "n_ctx_train": llama_cpp.llama_model_n_ctx_train(model),
        "n_params": llama_cpp.llama_model_n_params(model),
        "size_bytes": llama_cpp.llama_model_size(model),
        "tokens": tokenized,
        "plain_tokens": [tokenize(text, False) for text in texts],
        "texts": [detokenize(tokens) for tokens in tokenized],
        "eos": llama_cpp.llama_vocab_eos(vocab),
        "ends": [token for token in range(n_vocab) if llama_cpp.llama_vocab_is_eog(vocab, token)],
        "generated": generated,
        "finite": finite,
        "logits_std": logits_std,
        "kv_mib": logged_mib("KV"),
        "state_mib": logged_mib("RS"),
        "compute_mib": logged_mib("compute"),
        "output_mib": logged_mib("output"),
    }
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return found


def main() -> None:
    llama_cpp.llama_log_set(remember, ctypes.c_void_p(0))
    for line in sys.stdin:
        print(json.dumps(seen(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
