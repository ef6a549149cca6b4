"""The network of `tiny`: a decoder of the llama architecture in plain PyTorch.

Training-time only; nothing at run time imports this module (it needs `torch`, which localrun does not depend on).
Rotary positions turn adjacent pairs (2i, 2i+1), which is what llama.cpp does for architecture `llama`, so the weights
go into the GGUF file without permutation.

Does not: tokenize, sample, or read and write files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the network. All matrix dimensions are multiples of 32, so that the file can be quantised."""

    vocab_size: int = 1024
    width: int = 256
    n_layers: int = 5
    n_heads: int = 4
    n_kv_heads: int = 2
    head_width: int = 64
    feed_forward_width: int = 704
    context_tokens: int = 4096
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5


class Attention(nn.Module):  # type: ignore[misc]
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.query = nn.Linear(shape.width, shape.n_heads * shape.head_width, bias=False)
        self.key = nn.Linear(shape.width, shape.n_kv_heads * shape.head_width, bias=False)
        self.value = nn.Linear(shape.width, shape.n_kv_heads * shape.head_width, bias=False)
        self.output = nn.Linear(shape.n_heads * shape.head_width, shape.width, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """`hidden` (batch, tokens, width); `cosine` and `sine` (tokens, head_width / 2). Same shape as `hidden` out."""
        shape = self.shape
        batch, tokens, _ = hidden.shape
        query = rotate(self.query(hidden).view(batch, tokens, shape.n_heads, shape.head_width), cosine, sine)
        key = rotate(self.key(hidden).view(batch, tokens, shape.n_kv_heads, shape.head_width), cosine, sine)
        value = self.value(hidden).view(batch, tokens, shape.n_kv_heads, shape.head_width)
        group = shape.n_heads // shape.n_kv_heads
        key = key.repeat_interleave(group, dim=2)
        value = value.repeat_interleave(group, dim=2)
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        result: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return result


class FeedForward(nn.Module):  # type: ignore[misc]
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.feed_forward_width, bias=False)
        self.up = nn.Linear(shape.width, shape.feed_forward_width, bias=False)
        self.down = nn.Linear(shape.feed_forward_width, shape.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return result


class Block(nn.Module):  # type: ignore[misc]
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.feed_forward = FeedForward(shape)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), cosine, sine)
        result: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return result


class Network(nn.Module):  # type: ignore[misc]
    """Token ids in, final hidden states out; `logits` applies the tied output matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.final_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        cosine, sine = rotary_tables(shape)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small normal weights; the two matrices that write to the residual stream start at zero (a calm start)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                zero = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.0 if zero else 0.6 / math.sqrt(parameter.shape[1]))
        nn.init.normal_(self.embedding.weight, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens` (batch, tokens) int64 -> hidden states (batch, tokens, width), normed for the output matrix."""
        n_tokens = tokens.shape[1]
        cosine: Tensor = self.get_buffer("cosine")[:n_tokens]
        sine: Tensor = self.get_buffer("sine")[:n_tokens]
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, cosine, sine)
        result: Tensor = self.final_norm(hidden)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., width) -> logits (..., vocab_size) in float32."""
        return functional.linear(hidden, self.embedding.weight).float()


def rotary_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's rotation, each (context_tokens, head_width / 2)."""
    exponent = torch.arange(0, shape.head_width, 2, dtype=torch.float32) / shape.head_width
    angle = torch.outer(torch.arange(shape.context_tokens, dtype=torch.float32), shape.rope_base**-exponent)
    return angle.cos(), angle.sin()


def rotate(vectors: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turns adjacent pairs of `vectors` (batch, tokens, heads, head_width) by their position's angle."""
    even, odd = vectors[..., 0::2], vectors[..., 1::2]
    cosine, sine = cosine[:, None, :].to(vectors.dtype), sine[:, None, :].to(vectors.dtype)
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2)
