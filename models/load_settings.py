"""What load settings come to for one model: the longest request, and what cannot be.

Pure: a header in, settings out. Does not: know where settings were said (config.py, modelfile.py), or what fits into
the memory (fit.py).
"""

from __future__ import annotations

import msgspec

from localrun.config import AUTO_KV_TYPE, LoadSettings
from localrun.errors import BadRequest
from localrun.models.fit import is_quantizable
from localrun.models.gguf.header import Header

# llama.cpp counts tokens in 32 bits.
MAX_CTX = 2**31 - 1
# Beyond these nothing is left of what the model has learned about positions.
LEAST_BASE, LEAST_SCALE = 1.0, 1 / 1024


def context_limit(header: Header, said: LoadSettings) -> int:
    """Tokens of the longest request that a model can be loaded for: the context that it was trained for, or so much
    more as positions are moved together."""
    scale = said.rope_frequency_scale
    if not scale or said.rope_scaling == "none":
        return header.n_ctx_train
    original = said.yarn_orig_ctx or header.count("rope.scaling.original_context_length")
    original = original or round(header.n_ctx_train * _trained_scale(header))
    return max(header.n_ctx_train, int(min(original / scale, MAX_CTX)))


def settled(header: Header, said: LoadSettings) -> LoadSettings:
    """The settings without those that change nothing for this model, so that equal ones are one engine's: a context
    beyond the limit is the limit, and more layers than there are are all."""
    base, scale = said.rope_frequency_base, said.rope_frequency_scale
    layers = said.gpu_layers
    return msgspec.structs.replace(
        said,
        adapters=said.adapters or None,
        num_ctx=min(said.num_ctx, context_limit(header, said)) if said.num_ctx else None,
        gpu_layers=None if layers is None or layers < 0 else min(layers, header.n_layers + 1),
        rope_frequency_base=None if base == _number(header, "rope.freq_base") else base or None,
        rope_frequency_scale=None if scale == _trained_scale(header) else scale or None,
        yarn_orig_ctx=said.yarn_orig_ctx or None,
    )


def check(header: Header, said: LoadSettings, name: str) -> None:
    """Raises BadRequest for what this model cannot be loaded with, naming the setting, its limit and the way out."""
    if said.kv_type not in (None, AUTO_KV_TYPE, "f16") and not is_quantizable(header):
        raise BadRequest(
            f"kv_type is {said.kv_type}, which stores blocks of 32 numbers, but the heads of '{name}' have "
            f"{header.head_dim_k} and {header.head_dim_v}; use f16",
            field="kv_type",
        )
    for field, least in (("rope_frequency_base", LEAST_BASE), ("rope_frequency_scale", LEAST_SCALE)):
        value = getattr(said, field)
        if value is not None and 0 < value < least:
            raise BadRequest(f"{field} is {value}; use {least:g} or more, or 0 for the model's own", field=field)


def too_long(header: Header, said: LoadSettings) -> str:
    """What is done about a context beyond the limit; "" for one within it."""
    limit = context_limit(header, said)
    if said.num_ctx is None or said.num_ctx <= limit:
        return ""
    scale = f"{header.n_ctx_train / said.num_ctx:.3g}"
    return (
        f"num_ctx {said.num_ctx} is more than the model's context, and {limit} is used (trained for "
        f"{header.n_ctx_train}; rope_frequency_scale {scale} extends it, which costs quality)"
    )


def _trained_scale(header: Header) -> float:
    """1 is what files without a scale mean."""
    factor = _number(header, "rope.scaling.factor") or _number(header, "rope.scale_linear")
    return 1 / factor if factor else 1.0


def _number(header: Header, key: str) -> float:
    value = header.metadata.get(f"{header.architecture}.{key}")
    return float(value) if isinstance(value, int | float) else 0.0
