"""What the layers of a model keep of a sequence: all keys and values, those of a window, or one state.

Pure: from the header alone, by llama.cpp's rules for each architecture. A layer of an architecture that is not known
here counts as one that keeps everything, which is never too little.

Does not: multiply by cells or types (`memory`).
"""

from __future__ import annotations

from typing import NamedTuple

from localrun.models.header import MAX_WIDTH, Header

# One state per sequence and nothing else.
_RECURRENT = {"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"}
# States in some layers, marked by having no key heads, and attention in the others.
_HYBRID_BY_HEADS = {
    "jamba",
    "granitehybrid",
    "lfm2",
    "lfm2moe",
    "nemotron_h",
    "nemotron_h_moe",
    "plamo2",
    "kimi-linear",
}
# States in all but every n-th layer; the number is what files that do not state it mean.
_HYBRID_BY_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
# Both in every layer.
_HYBRID_THROUGHOUT = {"falcon-h1"}
# Every n-th layer sees everything, the others a window, unless the file says which do.
_WINDOW_PATTERNS = {
    "afmoe": 4, "cohere2": 4, "exaone4": 4, "exaone-moe": 4, "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2,
    "olmo2": 4, "plamo3": 8,
}  # fmt: skip


class LayerMemory(NamedTuple):
    """One layer: `n_heads_kv` heads of keys and values, none if 0, of a window or of everything; perhaps a state."""

    n_heads_kv: int
    is_windowed: bool
    has_state: bool


class ModelMemory(NamedTuple):
    """All layers. `state_elements` is the size of one state; `n_window` 0 means that every layer sees everything."""

    layers: tuple[LayerMemory, ...]
    n_window: int
    state_elements: int

    @property
    def is_shareable(self) -> bool:
        """Whether a prefix can be shared between sequences: nothing is forgotten or mixed up on the way."""
        return not self.n_window and not any(layer.has_state for layer in self.layers)


def model_memory(header: Header, *, n_kv_cells: int) -> ModelMemory:
    """What `header`'s model keeps with a pool of `n_kv_cells`; a window that no sequence can outgrow is none."""
    with_state = _layers_with_state(header)
    windowed = _windowed_layers(header)
    n_window = _size(header, "attention.sliding_window")
    if not any(windowed) or any(with_state) or n_window >= min(n_kv_cells, header.n_ctx_train):
        n_window = 0
    is_only_states = header.architecture in _RECURRENT
    layers = tuple(
        LayerMemory(
            n_heads_kv=0 if is_only_states or (has_state and header.architecture in _HYBRID_BY_INTERVAL) else n_heads,
            is_windowed=is_windowed and n_window > 0,
            has_state=has_state,
        )
        for n_heads, is_windowed, has_state in zip(header.heads_kv_per_layer, windowed, with_state, strict=True)
    )
    return ModelMemory(layers, n_window, _state_elements(header) if any(with_state) else 0)


def memory_kind(header: Header) -> str:
    """`attention`, `window`, `recurrent` or `hybrid`: what the engine calls the memory of such a model."""
    if header.architecture in _RECURRENT:
        return "recurrent"
    if any(_layers_with_state(header)):
        return "hybrid"
    return "window" if any(_windowed_layers(header)) else "attention"


def _layers_with_state(header: Header) -> list[bool]:
    layers = range(header.n_layers)
    if header.architecture in _RECURRENT | _HYBRID_THROUGHOUT:
        return [True for _ in layers]
    if header.architecture in _HYBRID_BY_HEADS:
        return [n_heads == 0 for n_heads in header.heads_kv_per_layer]
    if header.architecture in _HYBRID_BY_INTERVAL:
        every = _size(header, "full_attention_interval") or _HYBRID_BY_INTERVAL[header.architecture]
        return [(layer + 1) % every != 0 for layer in layers]
    return [False for _ in layers]


def _windowed_layers(header: Header) -> list[bool]:
    if not _size(header, "attention.sliding_window"):
        return [False] * header.n_layers
    stated = header.metadata.get(f"{header.architecture}.attention.sliding_window_pattern")
    if isinstance(stated, tuple) and len(stated) >= header.n_layers:
        return [bool(is_windowed) for is_windowed in stated[: header.n_layers]]
    known = _WINDOW_PATTERNS.get(header.architecture, 1)
    every = (stated if isinstance(stated, int) and stated > 0 else known) if known > 1 else 1
    return [(layer + 1) % every != 0 for layer in range(header.n_layers)]


def _state_elements(header: Header) -> int:
    """Numbers (f32) in the state of one layer and sequence: `n_embd_r` and `n_embd_s` of llama-hparams.cpp."""
    if head_size := _size(header, "wkv.head_size"):
        return header.n_embd * ((_size(header, "token_shift_count") or 2) + head_size)
    if n_columns := _size(header, "shortconv.l_cache"):
        return header.n_embd * (n_columns - 1)
    n_conv = max(0, _size(header, "ssm.conv_kernel") - 1)
    if head_dim := _size(header, "kda.head_dim"):
        return header.n_heads * head_dim * (3 * (n_conv or 3) + head_dim)
    n_inner, n_state = _size(header, "ssm.inner_size"), _size(header, "ssm.state_size")
    return n_conv * (n_inner + 2 * _size(header, "ssm.group_count") * n_state) + n_state * n_inner


def _size(header: Header, key: str) -> int:
    """A number of the file, 0 where it states none or nonsense."""
    value = header.count(key)
    return value if 0 <= value <= MAX_WIDTH else 0
