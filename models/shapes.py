"""Shapes of real models, and small ones of every memory kind, for synthesized files.

Pure data. The dimensions of the large ones are those that the published models state in their configuration. The small
ones exist so that tests can load every kind of memory that llama.cpp has: attention over everything, a sliding window,
a recurrent state, and the two mixed.

Does not: know which tensors a shape has (`tensor_plan`), or write anything.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """What a recurrent layer keeps of a sequence: `n_conv - 1` columns of a convolution, and a state if `n_state` > 0.

    `n_rank` is the rank of the time step (Mamba) or the number of value heads (gated delta net), `n_groups` its key
    heads, `n_inner` its inner width. A short convolution has none of these.
    """

    n_conv: int
    n_state: int = 0
    n_inner: int = 0
    n_rank: int = 0
    n_groups: int = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Dimensions of a model. `tied`: the embedding matrix is also the output matrix.

    Of every `attention_every` layers the last attends to everything; the others see `n_window` tokens or are recurrent.
    With `attention_every` 0 none attends.
    """

    name: str
    architecture: str = "llama"
    n_layers: int
    n_embd: int
    n_heads: int
    n_heads_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    rope_freq_base: float
    tied: bool
    attention_every: int = 1
    n_window: int = 0
    recurrence: Recurrence | None = None

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer keeps a state instead of keys and values."""
        if self.recurrence is None:
            return False
        return self.attention_every == 0 or (layer + 1) % self.attention_every != 0


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        # Wide enough (256) for real K-quant rows, and otherwise as small as tests like it.
        Shape(
            name="tiny", n_layers=4, n_embd=256, n_heads=4, n_heads_kv=2, head_dim=64, n_ff=768,
            n_vocab=2048, n_ctx_train=4096, rope_freq_base=10_000.0, tied=True,
        ),
        # Six layers, because in Gemma 3 every sixth sees everything. The output has embeddings of its own: Gemma scales
        # the input's, and a tied matrix of random weights would then answer with the last token for ever.
        Shape(
            name="tiny-gemma3", architecture="gemma3", n_layers=6, n_embd=256, n_heads=4, n_heads_kv=2, head_dim=64,
            n_ff=512, n_vocab=2048, n_ctx_train=4096, rope_freq_base=10_000.0, tied=False, attention_every=6,
            n_window=64,
        ),
        Shape(
            name="tiny-mamba", architecture="mamba", n_layers=4, n_embd=256, n_heads=0, n_heads_kv=0, head_dim=0,
            n_ff=0, n_vocab=2048, n_ctx_train=4096, rope_freq_base=10_000.0, tied=True, attention_every=0,
            recurrence=Recurrence(n_conv=4, n_state=16, n_inner=512, n_rank=16),
        ),
        # Attention in every fourth layer, gated delta nets in the others.
        Shape(
            name="tiny-qwen35", architecture="qwen35", n_layers=4, n_embd=256, n_heads=4, n_heads_kv=2, head_dim=64,
            n_ff=512, n_vocab=2048, n_ctx_train=4096, rope_freq_base=10_000.0, tied=True, attention_every=4,
            recurrence=Recurrence(n_conv=4, n_state=32, n_inner=128, n_rank=4, n_groups=2),
        ),
        # Attention in every third layer, short convolutions in the others.
        Shape(
            name="tiny-lfm2", architecture="lfm2", n_layers=6, n_embd=256, n_heads=4, n_heads_kv=2, head_dim=64,
            n_ff=512, n_vocab=2048, n_ctx_train=4096, rope_freq_base=10_000.0, tied=True, attention_every=3,
            recurrence=Recurrence(n_conv=3),
        ),
        # SmolLM2-135M.
        Shape(
            name="135m", n_layers=30, n_embd=576, n_heads=9, n_heads_kv=3, head_dim=64, n_ff=1536,
            n_vocab=49_152, n_ctx_train=8192, rope_freq_base=100_000.0, tied=True,
        ),
        # Qwen2.5-0.5B without its attention biases, which the llama architecture does not have.
        Shape(
            name="0.5b", n_layers=24, n_embd=896, n_heads=14, n_heads_kv=2, head_dim=64, n_ff=4864,
            n_vocab=151_936, n_ctx_train=32_768, rope_freq_base=1_000_000.0, tied=True,
        ),
        # Llama-3.2-1B.
        Shape(
            name="1b", n_layers=16, n_embd=2048, n_heads=32, n_heads_kv=8, head_dim=64, n_ff=8192,
            n_vocab=128_256, n_ctx_train=131_072, rope_freq_base=500_000.0, tied=True,
        ),
        # Llama-3.1-8B.
        Shape(
            name="8b", n_layers=32, n_embd=4096, n_heads=32, n_heads_kv=8, head_dim=128, n_ff=14_336,
            n_vocab=128_256, n_ctx_train=131_072, rope_freq_base=500_000.0, tied=False,
        ),
    )
}  # fmt: skip
