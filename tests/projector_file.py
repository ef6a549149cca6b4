"""Projectors of random numbers that libmtmd opens, by default of some hundred kilobytes; and the pieces of one, so that
any of them can be left out or be another.

There is one of each way in which rows differ: `gemma3` (they attend to each other), `idefics3` (pictures in tiles, with
texts between), `qwen2vl_merger` (positions in parts) and `ultravox` (sound). `another` makes the other types out of
these. The same arguments give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from tests.support.synthesis.synthetic_tokenizer import Vocabulary

Shape = tuple[int, ...]

# What `idefics3` puts around tiles. libmtmd looks these up in the model's vocabulary.
TILE_TOKENS = ("\n\n", "\n", "<fake_token_around_image>", "<global-img>")

_CONTROL = 3
_WHISPER_POSITIONS = 1500


class Parts(NamedTuple):
    """Metadata (`int` is u32, `float` f32) and tensors' shapes as numpy has them; change them before they are written.
    `i32` are keys that get another type than libmtmd expects."""

    entries: dict[str, Any]
    tensors: dict[str, Shape]
    i32: set[str]


def parts_of(
    kind: str, width: int, *, n_embd: int = 32, n_ff: int = 64, n_layers: int = 1, n_heads: int = 2, patch: int = 8,
    image: int = 32, scale: int = 2,
) -> Parts:  # fmt: skip
    """Of a projector of one of the four types, with rows of `width` numbers. A picture has (`image` / `patch`)²
    patches, `scale`² of which become a row. `n_ff` must differ from `n_embd`, or libmtmd takes the file for an old
    one."""
    encoder = "audio" if kind == "ultravox" else "vision"
    entries: dict[str, Any] = {
        "general.architecture": "clip", "general.type": "mmproj", "general.file_type": 0,
        f"clip.has_{encoder}_encoder": True, "clip.projector_type": kind,
        f"clip.{encoder}.embedding_length": n_embd, f"clip.{encoder}.feed_forward_length": n_ff,
        f"clip.{encoder}.block_count": n_layers, f"clip.{encoder}.attention.head_count": n_heads,
        f"clip.{encoder}.projection_dim": width, f"clip.{encoder}.attention.layer_norm_epsilon": 1e-6,
    }  # fmt: skip
    tensors: dict[str, Shape] = {}
    prefix = "a" if encoder == "audio" else "v"
    for layer in range(n_layers):
        block = f"{prefix}.blk.{layer}."
        tensors |= {f"{block}attn_{name}.weight": (n_embd, n_embd) for name in ("q", "k", "v", "out")}
        tensors |= {f"{block}{name}.weight": (n_embd,) for name in ("ln1", "ln2")}
        tensors |= {f"{block}ffn_up.weight": (n_ff, n_embd), f"{block}ffn_down.weight": (n_embd, n_ff)}
    if encoder == "vision":
        entries |= {"clip.vision.image_size": image, "clip.vision.patch_size": patch, "clip.use_gelu": True}
        entries |= {"clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3}
        tensors["v.patch_embd.weight"] = (n_embd, 3, patch, patch)
    if kind in ("gemma3", "idefics3"):
        entries["clip.vision.projector.scale_factor"] = scale
        tensors["v.position_embd.weight"] = ((image // patch) ** 2, n_embd)
        tensors |= {"v.post_ln.weight": (n_embd,), "v.post_ln.bias": (n_embd,)}
    if kind == "gemma3":
        tensors |= {"mm.input_projection.weight": (n_embd, width), "mm.soft_emb_norm.weight": (n_embd,)}
    elif kind == "idefics3":
        entries["clip.vision.preproc_image_size"] = 2 * image
        tensors["mm.model.fc.weight"] = (width, scale * scale * n_embd)
    elif kind == "qwen2vl_merger":
        _add_qwen(entries, tensors, width, n_embd, n_layers, patch)
    elif kind == "ultravox":
        _add_ultravox(entries, tensors, width, n_embd, n_layers)
    return Parts(entries, tensors, set())


def _add_qwen(
    entries: dict[str, Any], tensors: dict[str, Shape], width: int, n_embd: int, n_layers: int, patch: int
) -> None:
    entries["clip.vision.spatial_merge_size"] = 2
    tensors["v.patch_embd.weight.1"] = (n_embd, 3, patch, patch)
    tensors |= {
        f"v.blk.{layer}.attn_{name}.bias": (n_embd,) for layer in range(n_layers) for name in ("q", "k", "v", "out")
    }
    tensors |= {"v.post_ln.weight": (n_embd,), "v.post_ln.bias": (n_embd,)}
    tensors |= {"mm.0.weight": (4 * n_embd, 4 * n_embd), "mm.0.bias": (4 * n_embd,)}
    tensors |= {"mm.2.weight": (width, 4 * n_embd), "mm.2.bias": (width,)}


def _add_ultravox(entries: dict[str, Any], tensors: dict[str, Shape], width: int, n_embd: int, n_layers: int) -> None:
    entries |= {"clip.audio.num_mel_bins": 80, "clip.audio.projector.stack_factor": 4}
    tensors |= {"a.conv1d.1.weight": (n_embd, 80, 3), "a.conv1d.2.weight": (n_embd, n_embd, 3)}
    tensors |= {"a.conv1d.1.bias": (n_embd, 1), "a.conv1d.2.bias": (n_embd, 1)}
    tensors["a.position_embd.weight"] = (_WHISPER_POSITIONS, n_embd)
    for layer in range(n_layers):
        for name in ("attn_q", "attn_v", "attn_out", "ln1", "ln2", "ffn_up", "ffn_down"):
            tensors[f"a.blk.{layer}.{name}.bias"] = tensors[f"a.blk.{layer}.{name}.weight"][:1]
    tensors |= {"a.post_ln.weight": (n_embd,), "a.post_ln.bias": (n_embd,)}
    tensors |= {"mm.a.norm_pre.weight": (4 * n_embd,), "mm.a.mlp.1.weight": (2 * n_embd, 4 * n_embd)}
    tensors |= {"mm.a.norm_mid.weight": (n_embd,), "mm.a.mlp.2.weight": (width, n_embd)}


def another(kind: str, width: int) -> Parts:
    """A projector of any type whose tensors' shapes are known (`projector_shapes.KINDS`), as small as they get."""
    if kind in ("gemma3", "idefics3", "qwen2vl_merger", "ultravox"):
        return parts_of(kind, width)
    n_embd, n_hidden = 32, 48
    sounds = {"glma", "meralion", "musicflamingo", "qwen2a", "voxtral"}
    like = "ultravox" if kind in sounds else "qwen2vl_merger" if kind.startswith("qwen") else "idefics3"
    entries, old, _ = parts_of(like, width)
    entries["clip.projector_type"] = kind
    tensors = old if kind == "qwen2.5vl_merger" else {k: shape for k, shape in old.items() if not k.startswith("mm.")}

    def linear(name: str, n_in: int, n_out: int) -> dict[str, Shape]:
        return {f"{name}.weight": (n_out, n_in), f"{name}.bias": (n_out,)}

    def norm(name: str, n: int) -> dict[str, Shape]:
        return {f"{name}.weight": (n,), f"{name}.bias": (n,)}

    if kind == "glma":
        tensors |= norm("mm.a.norm_pre", n_embd) | linear("mm.a.mlp.1", 4 * n_embd, n_hidden)
        tensors |= linear("mm.a.mlp.2", n_hidden, width) | {"v.boi": (width,), "v.eoi": (width,)}
    elif kind == "meralion":
        tensors |= norm("mm.a.norm_pre", 4 * n_embd) | linear("mm.a.mlp.0", 4 * n_embd, n_hidden)
        tensors |= linear("mm.a.mlp.1", n_hidden, 56) | linear("mm.a.mlp.2", n_hidden, 56)
        tensors |= linear("mm.a.mlp.3", 56, width)
    elif kind == "musicflamingo":
        tensors |= linear("mm.a.mlp.1", n_embd, n_hidden) | linear("mm.a.mlp.2", n_hidden, width)
    elif kind == "qwen2a":
        tensors |= linear("mm.a.fc", n_embd, width)
    elif kind == "voxtral":
        entries["clip.audio.projector.stack_factor"] = 2
        tensors |= {"mm.a.mlp.1.weight": (n_hidden, 2 * n_embd), "mm.a.mlp.2.weight": (width, n_hidden)}
    elif kind == "qwen2.5vl_merger":
        entries["clip.vision.n_wa_pattern"] = 2
    elif kind == "qwen3vl_merger":
        for part in ("q", "k", "v"):
            del tensors[f"v.blk.0.attn_{part}.weight"], tensors[f"v.blk.0.attn_{part}.bias"]
        tensors |= linear("v.blk.0.attn_qkv", n_embd, 3 * n_embd) | {"v.patch_embd.bias": (n_embd,)}
        tensors |= {"v.position_embd.weight": (16, n_embd)}
        tensors |= linear("mm.0", 4 * n_embd, n_hidden) | linear("mm.2", n_hidden, width)
    else:
        del entries["clip.vision.preproc_image_size"], entries["clip.vision.projector.scale_factor"]
        _add_pictures(kind, entries, tensors, width, n_embd, linear, norm)
    return Parts(entries, tensors, set())


def _add_pictures(
    kind: str, entries: dict[str, Any], tensors: dict[str, Shape], width: int, n_embd: int,
    linear: Callable[[str, int, int], dict[str, Shape]], norm: Callable[[str, int], dict[str, Shape]],
) -> None:  # fmt: skip
    n_hidden = 48
    if kind in ("internvl", "mlp"):
        tensors |= {"v.class_embd": (n_embd,), "v.position_embd.weight": (17, n_embd)}
    if kind in ("internvl", "lfm2"):
        entries["clip.vision.projector.scale_factor"] = 2
    if kind == "internvl":
        tensors |= norm("mm.model.mlp.0", 4 * n_embd) | linear("mm.model.mlp.1", 4 * n_embd, n_hidden)
        tensors |= linear("mm.model.mlp.3", n_hidden, width)
    elif kind == "lfm2":
        tensors |= norm("mm.input_norm", 4 * n_embd) | linear("mm.1", 4 * n_embd, n_hidden)
        tensors |= linear("mm.2", n_hidden, width)
    elif kind in ("pixtral", "lightonocr"):
        entries["clip.vision.spatial_merge_size"] = 2
        del tensors["v.position_embd.weight"]
        tensors |= {"mm.input_norm.weight": (n_embd,), "mm.patch_merger.weight": (n_embd, 4 * n_embd)}
        tensors |= {"v.token_embd.img_break": (width,)} | linear("mm.1", n_embd, n_hidden)
        tensors |= linear("mm.2", n_hidden, width)
    elif kind == "mlp_norm":
        entries["clip.projector_type"] = "mlp"
        tensors |= linear("mm.0", n_embd, n_hidden) | norm("mm.1", n_hidden)
        tensors |= linear("mm.3", n_hidden, width) | norm("mm.4", width)
    elif kind == "janus_pro":
        tensors |= linear("mm.0", n_embd, n_hidden) | linear("mm.1", n_hidden, width)
    else:
        assert kind in ("mlp", "phi4"), kind
        if kind == "phi4":
            entries |= {"clip.vision.image_min_pixels": 1024, "clip.vision.image_max_pixels": 16_384}
        tensors |= linear("mm.0", n_embd, n_hidden) | linear("mm.2", n_hidden, width)


def write_parts(
    path: Path, parts: Parts, *, seed: int = 0, is_half: bool = False, types: Mapping[str, type[np.generic]] = {}
) -> Path:
    """The file. Matrices are F16 with `is_half`, all else F32, or what `types` says of a tensor."""
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in parts.entries.items():
        if key == "general.architecture":
            continue  # the writer has it
        if key in parts.i32:
            writer.add_int32(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    rng = np.random.default_rng(seed)
    for name, shape in parts.tensors.items():
        has_rows = len(shape) > 1 and ".weight" in name
        spread = np.prod(shape[1:]) ** -0.5 if has_rows else 0.1
        content = rng.standard_normal(shape, dtype=np.float32) * np.float32(spread)
        if len(shape) == 1 and name.endswith(".weight"):
            content = np.ones(shape, dtype=np.float32)
        is_matrix = has_rows and name.endswith(".weight") and "position" not in name
        default = np.float16 if is_half and is_matrix else np.float32
        writer.add_tensor(name, content.astype(types.get(name, default)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_projector(path: Path, kind: str = "gemma3", width: int = 64, *, seed: int = 0, **shape: int) -> Path:
    """A sound one."""
    return write_parts(path, parts_of(kind, width, **shape), seed=seed)


def with_tokens(vocabulary: Vocabulary, texts: tuple[str, ...]) -> Vocabulary:
    """A vocabulary in which these are the last tokens, in the place of others."""
    n_kept = len(vocabulary.tokens) - len(texts)
    types = [*vocabulary.token_types[:n_kept], *[_CONTROL] * len(texts)]
    return Vocabulary([*vocabulary.tokens[:n_kept], *texts], types, vocabulary.merges)


def changed(parts: Parts, entries: Mapping[str, Any] = {}, *, without: str = "") -> Parts:
    """The same with other entries, and without the tensor or the entry `without`."""
    kept = {key: value for key, value in {**parts.entries, **entries}.items() if key != without}
    return parts._replace(
        entries=kept, tensors={name: shape for name, shape in parts.tensors.items() if name != without}
    )
