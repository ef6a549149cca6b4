"""LoRA adapters of a model: loaded once, in effect in every context of it.

Owner: the engine's main thread. Native memory of an adapter goes with its model.

Does not: judge whether an adapter belongs to the model; llama.cpp compares their tensors and refuses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from localrun.engine.native.llama_native import last_problem, native
from localrun.errors import BadModelFile, EngineFailed

SCALE = 1.0


class LlamaAdapters:
    """The adapters at `paths`, for `model`. Raises BadModelFile when llama.cpp refuses one."""

    def __init__(self, model: Any, paths: Sequence[str]) -> None:
        self._adapters = [_load(model, path) for path in paths]

    def apply(self, context: Any) -> None:
        """Puts them into effect in a native context. Raises EngineFailed."""
        if not self._adapters:
            return
        n_adapters = len(self._adapters)
        handles = (native.llama_adapter_lora_p_ctypes * n_adapters)(
            *(ctypes.cast(adapter, native.llama_adapter_lora_p_ctypes) for adapter in self._adapters)
        )
        scales = (ctypes.c_float * n_adapters)(*[SCALE] * n_adapters)
        if native.llama_set_adapters_lora(context, handles, n_adapters, scales) != 0:
            raise EngineFailed(f"llama.cpp cannot apply the model's adapters: {last_problem()}")


def _load(model: Any, path: str) -> Any:
    adapter = native.llama_adapter_lora_init(model, path.encode())
    if not adapter:
        raise BadModelFile(f"llama.cpp cannot load the adapter {path}: {last_problem()}")
    return adapter
