"""A model and a context with bare calls of the library, and one set of adapters: what the others are compared with."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from localrun.engine.native.library import native

N_CTX = 512


class Bare:
    """See the module."""

    def __init__(self, model: Any, context: Any) -> None:
        self._context = context
        self._n_vocab = native.llama_vocab_n_tokens(native.llama_model_get_vocab(model))

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """A row for each of these tokens, computed anew."""
        native.llama_memory_clear(native.llama_get_memory(self._context), True)
        batch = native.llama_batch_init(len(tokens), 0, 1)
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, True
            batch.seq_id[at][0] = 0
        batch.n_tokens = len(tokens)
        assert native.llama_decode(self._context, batch) == 0
        rows = np.ctypeslib.as_array(native.llama_get_logits(self._context), (len(tokens), self._n_vocab)).copy()
        native.llama_batch_free(batch)
        return rows


@contextmanager
def bare(path: Path, adapters: Sequence[tuple[Path, float]]) -> Iterator[Bare]:
    """Adapters are files with their strengths."""
    model = native.llama_model_load_from_file(str(path).encode(), native.llama_model_default_params())
    params = native.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = N_CTX
    params.n_threads = params.n_threads_batch = 1
    context = native.llama_init_from_model(model, params)
    n_layers, n_embd = native.llama_model_n_layer(model), native.llama_model_n_embd(model)
    loras, vector = [], np.zeros((n_layers - 1, n_embd), np.float32)
    for file, scale in adapters:
        read = gguf.GGUFReader(file)
        if read.get_field("general.architecture").contents() != "controlvector":
            loras.append((native.llama_adapter_lora_init(model, str(file).encode()), scale))
            continue
        for tensor in read.tensors:
            vector[int(tensor.name.removeprefix("direction.")) - 1] += np.float32(scale) * tensor.data
    assert all(lora for lora, _ in loras)
    kind = native.llama_adapter_lora_p_ctypes
    handles = (kind * len(loras))(*(ctypes.cast(lora, kind) for lora, _ in loras))
    scales = (ctypes.c_float * len(loras))(*(scale for _, scale in loras))
    assert native.llama_set_adapters_lora(context, handles, len(loras), scales) == 0
    if vector.any():
        data = vector.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        assert native.llama_set_adapter_cvec(context, data, vector.size, n_embd, 1, n_layers) == 0
    try:
        yield Bare(model, context)
    finally:
        native.llama_free(context)
        native.llama_model_free(model)
