"""Whether the tensors of a projector's layers fit together, for towers that are plain stacks of attention and
feed-forward: ggml ends the process where a product or a sum does not work out.

Pure. `problem` is for the types that `PLAIN` names; others have layers of their own kind, and are left to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from localrun.models.gguf.header import TensorInfo

# What libmtmd uses of each layer besides the weights, without a look whether it is there.
PLAIN: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("gemma3", "idefics3", "internvl", "mlp", "pixtral", "qwen3vl_merger"), ()),
    **dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger"), ("attn_q", "attn_k", "attn_v")),
    **dict.fromkeys(("ultravox", "voxtral", "qwen2a"), ("ln1", "ln2")),
}


class Tower(NamedTuple):
    """`prefix` of the tensors' names, and the dimensions that the file states. `head_dim` 0 is the usual one."""

    prefix: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_heads_kv: int
    head_dim: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of a layer's tensors, in GGML's order."""
        head_dim = self.head_dim or self.n_embd // max(1, self.n_heads)
        n_q, n_kv = self.n_heads * head_dim, (self.n_heads_kv or self.n_heads) * head_dim
        return {
            "attn_q": (self.n_embd, n_q),
            "attn_k": (self.n_embd, n_kv),
            "attn_v": (self.n_embd, n_kv),
            "attn_qkv": (self.n_embd, n_q + 2 * n_kv),
            "attn_out": (n_q, self.n_embd),
            "ln1": (self.n_embd,),
            "ln2": (self.n_embd,),
        }


def problem(name: str, tower: Tower, tensors: Mapping[str, TensorInfo]) -> str:
    """What does not fit in a tower of the type `name`, as the end of a sentence that begins with the file; "" if all
    does. The weights of attention and feed-forward are there."""
    shapes = tower.shapes
    for layer in range(tower.n_layers):
        block = f"{tower.prefix}.blk.{layer}."
        has_all_in_one = f"{block}attn_qkv.weight" in tensors
        for part in PLAIN[name]:
            if f"{block}{part}.bias" not in tensors and not (has_all_in_one and part.startswith("attn")):
                return f"lacks the tensor '{block}{part}.bias'"
        for part, shape in shapes.items():
            found = tensors.get(f"{block}{part}.weight")
            if found is not None and found.shape != shape:
                return _wrong(found, shape)
        up, down = (tensors[f"{block}ffn_{part}.weight"] for part in ("up", "down"))
        if up.shape != down.shape[::-1] or len(up.shape) != 2 or tower.n_embd not in up.shape:
            return (
                f"has the tensors '{up.name}' of the shape {up.shape} and '{down.name}' of {down.shape}, which do not "
                f"fit a width of {tower.n_embd}"
            )
        for part in (*shapes, "ffn_up", "ffn_down"):
            bias, weight = (tensors.get(f"{block}{part}.{kind}") for kind in ("bias", "weight"))
            if bias is not None and weight is not None and bias.shape != weight.shape[-1:]:
                return _wrong(bias, weight.shape[-1:])
    return ""


def _wrong(tensor: TensorInfo, shape: tuple[int, ...]) -> str:
    return f"has the tensor '{tensor.name}' of the shape {tensor.shape}, where {shape} is needed"
