"""Opens a model file in llama.cpp.

Owner: the engine's main thread. Does not: make contexts, or know what the model is to be used for.
"""

from __future__ import annotations

from typing import Any

from localrun.engine.native.llama_native import last_problem, native
from localrun.errors import BadModelFile

# These do not generate a text from left to right.
_UNSUPPORTED_KINDS = {
    "a diffusion": native.llama_model_is_diffusion,
    "an encoder": native.llama_model_has_encoder,
}


def load_model(path: str, n_gpu_layers: int, *, use_extra_bufts: bool = True) -> Any:
    """A model handle. The file is mapped into memory, not read; with `use_extra_bufts` weights that have quicker
    kernels in another layout are copied into it. Raises BadModelFile."""
    params = native.llama_model_default_params()
    params.use_extra_bufts = use_extra_bufts
    params.n_gpu_layers = n_gpu_layers
    model = native.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise BadModelFile(f"llama.cpp cannot load {path}: {last_problem()}")
    for kind, is_kind in _UNSUPPORTED_KINDS.items():
        if is_kind(model):
            native.llama_model_free(model)
            raise BadModelFile(f"{path} is {kind} model, which localrun does not run yet; choose a decoder-only one")
    return model
