"""What the header of a projector (mmproj) says: what it takes, how wide its rows are, and whether libmtmd can open it.

Pure. Names, keys and tensors are those of clip.cpp of `LLAMA_CPP_PYTHON`. libmtmd ends its process for a key of another
type than it expects, and for many a tensor that it uses without having looked whether it is there; so the types of all
keys that it reads are checked while the header is read (`KEY_TYPES`), and what every projector and each type of them
needs besides in `problem`.

Does not: check shapes (projector_shapes.py does so, for most types). What is wrong besides is found out when an engine
process opens the file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from localrun.models.gguf import projector_shapes
from localrun.models.gguf.header import MAX_LAYERS, MAX_WIDTH, ArraySummary, Header, TensorInfo, Value
from localrun.models.gguf.tables import LLAMA_CPP_PYTHON

VISION: Final = "vision"
AUDIO: Final = "audio"
ENCODERS: Final = (VISION, AUDIO)

MAX_IMAGE_SIDE: Final = 8_192
MAX_PATCH_SIDE: Final = 65_535

_PREFIXES = {VISION: "v", AUDIO: "a"}

# --- types of the keys --------------------------------------------------------------------------------------------

_OF_EACH = {
    "embedding_length": "u32", "feed_forward_length": "u32", "block_count": "u32", "projection_dim": "u32",
    "attention.head_count": "u32", "attention.head_count_kv": "u32", "attention.head_dim": "u32",
    "attention.layer_norm_epsilon": "f32", "feature_layer": "[i32]", "projector_type": "str",
}  # fmt: skip
_OF_VISION = {
    **dict.fromkeys(
        (
            *("image_size", "image_min_pixels", "image_max_pixels", "preproc_min_tiles", "preproc_max_tiles"),
            *("preproc_image_size", "patch_size", "projector.scale_factor", "projector.query_side"),
            *("projector.window_side", "spatial_merge_size", "n_wa_pattern", "window_size", "sam.head_count"),
            *("sam.block_count", "sam.embedding_length", "expert_used_count"),
        ),
        "u32",
    ),
    "image_mean": "[f32]", "image_std": "[f32]", "projector.spatial_offsets": "[i32]", "swiglu_clamp": "f32",
    "mm_patch_merge_type": "str", "image_grid_pinpoints": "[i32]", "wa_layer_indexes": "[i32]",
    "wa_pattern_mode": "[i32]",
}  # fmt: skip
_OF_AUDIO = {
    **dict.fromkeys(
        (
            *("num_mel_bins", "projector.stack_factor", "chunk_size", "conv_kernel_size", "max_pos_emb"),
            *("projector.window_size", "projector.downsample_rate", "projector.head_count", "rvq.num_quantizers"),
            *("window_size", "local_block_count", "local_group_size", "subsampling_factor"),
        ),
        "u32",
    ),
    "rvq.codebook_size": "[i32]", "wa_pattern_mode": "[i32]",
}  # fmt: skip

KEY_TYPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("general.architecture", "general.name", "general.description", "clip.projector_type"), "str"),
    **dict.fromkeys(("clip.has_vision_encoder", "clip.has_audio_encoder", "clip.has_gen_audio_encoder"), "bool"),
    **dict.fromkeys(("clip.use_gelu", "clip.use_silu"), "bool"),
    "clip.minicpmv_version": "i32",
    "clip.minicpmv_query_num": "u32",
    "clip.gen.audio.model_variant": "str",
    **{f"clip.{part}.{key}": kind for part in (*ENCODERS, "gen.audio") for key, kind in _OF_EACH.items()},
    **{f"clip.vision.{key}": kind for key, kind in _OF_VISION.items()},
    **{f"clip.audio.{key}": kind for key, kind in _OF_AUDIO.items()},
}

# --- the types of projectors --------------------------------------------------------------------------------------


class _Type(NamedTuple):
    """The tensor whose dimension `axis`, in GGML's order, is the width of the rows, and others that there must be."""

    encoder: str
    output: str
    axis: int
    tensors: tuple[str, ...] = ()


def _vision(output: str, axis: int, tensors: str = "") -> _Type:
    return _Type(VISION, output, axis, tuple(_named(tensors)))


def _audio(output: str, axis: int, tensors: str = "") -> _Type:
    return _Type(AUDIO, output, axis, tuple(_named(tensors)))


def _named(tensors: str) -> Iterator[str]:
    """`x+` is the weight and the bias of x, `x` its weight, `=x` a tensor of that name."""
    for name in tensors.split():
        if name.startswith("="):
            yield name[1:]
            continue
        yield f"{name.removesuffix('+')}.weight"
        if name.endswith("+"):
            yield f"{name.removesuffix('+')}.bias"


_QWEN = _vision("mm.2.bias", 0, "mm.0+ mm.2+ v.patch_embd =v.patch_embd.weight.1")
_GEMMA_4 = _vision("mm.input_projection.weight", 1)
_KIMI = _vision("mm.2.weight", 1, "mm.input_norm+ mm.1+ mm.2+")
_GLM_V = _vision("mm.down.weight", 1, "mm.model.fc mm.up mm.gate mm.down mm.post_norm mm.patch_merger+")
_DEEPSEEK_OCR = _vision("mm.model.fc.weight", 1, "mm.model.fc+ v.sam.pos_embd v.sam.patch_embd+ =v.view_seperator")
_WHISPER = "a.conv1d.1+ a.conv1d.2+ a.position_embd"
_CONV_2D = "a.conv2d.1+ a.conv2d.2+ a.conv2d.3+ a.conv_out mm.a.mlp.1+"

TYPES: Final[Mapping[str, _Type]] = {
    "adapter": _vision("adapter.linear.dense_4h_to_h.weight", 1,
                       "adapter.conv+ adapter.linear.linear adapter.linear.gate =adapter.boi =adapter.eoi"),
    "cogvlm": _vision("mm.down.weight", 1, "mm.model.fc mm.post_fc_norm+ mm.up mm.gate =v.boi =v.eoi"),
    "deepseek4v": _vision("mm.2.weight", 1, "mm.1+ mm.2+ =v.image_newline =v.token_embd.img_start"),
    "deepseekocr": _DEEPSEEK_OCR,
    "deepseekocr2": _DEEPSEEK_OCR,
    "dots3note_v": _vision("mm.2.weight", 1, "mm.0+ mm.2+ mm.input_norm+ mm.post_norm"),
    "dots_ocr": _vision("mm.2.weight", 1, "mm.0+ mm.2+ mm.input_norm+ mm.post_norm"),
    "exaone4_5": _QWEN,
    "gemma3": _vision("mm.input_projection.weight", 0, "mm.soft_emb_norm v.patch_embd v.position_embd"),
    "gemma3nv": _vision("mm.input_projection.weight", 0, "mm.soft_emb_norm v.conv_stem.conv"),
    "gemma4uv": _GEMMA_4,
    "gemma4v": _GEMMA_4,
    "glm4v": _GLM_V,
    "glm5v": _GLM_V,
    "hunyuanvl": _vision("mm.model.fc.weight", 1, "mm.0+ mm.2+ mm.model.fc+ =mm.image_begin =mm.image_end"),
    "idefics3": _vision("mm.model.fc.weight", 1, "v.patch_embd v.position_embd"),
    "internvl": _vision("mm.model.mlp.3.weight", 1, "mm.model.mlp.0+ mm.model.mlp.1+ mm.model.mlp.3+ =v.class_embd"),
    "janus_pro": _vision("mm.1.bias", 0, "mm.0+ mm.1+"),
    "kimik25": _KIMI,
    "kimivl": _KIMI,
    "ldp": _vision("mm.model.mb_block.1.block.2.1.bias", 0, "mm.model.mlp.1+ mm.model.mlp.3+"),
    "ldpv2": _vision("mm.model.peg.0.bias", 0, "mm.model.mlp.0+ mm.model.mlp.2+ mm.model.peg.0"),
    "lfm2": _vision("mm.2.weight", 1, "mm.1+ mm.2+"),
    "lightonocr": _vision("mm.2.weight", 1, "mm.1"),
    "ling3vl": _vision("mm.2.bias", 0, "mm.input_norm+ mm.0+ mm.2+"),
    "llama4": _vision("mm.model.fc.weight", 1, "mm.model.mlp.1 mm.model.mlp.2"),
    "mimovl": _vision("mm.2.weight", 1, "mm.0"),
    "minicpmv4_6": _vision("mm.down.weight", 1, "mm.input_norm mm.up"),
    "minimax_m3": _vision("mm.merger.fc2.bias", 0, "mm.1+ mm.2+ mm.merger.fc1+ mm.merger.fc2+"),
    "mlp": _vision("mm.2.weight", 1, "mm.0+"),
    "muse-glimmer": _vision("mm.2.weight", 1, "mm.0 mm.1"),
    "nemotron_v2_vl": _vision("mm.model.mlp.3.weight", 1, "mm.model.mlp.0 mm.model.mlp.1"),
    "paddleocr": _KIMI,
    "phi4": _vision("mm.2.weight", 1, "mm.0+ mm.2+"),
    "pixtral": _vision("mm.2.weight", 1, "mm.1 =v.token_embd.img_break"),
    "qwen2.5vl_merger": _QWEN,
    "qwen2vl_merger": _QWEN,
    "qwen3vl_merger": _QWEN,
    "resampler": _vision("resampler.proj.weight", 0,
                         "=resampler.pos_embed_k =resampler.query resampler.kv resampler.attn.q+ resampler.ln_post+"),
    "step3vl": _vision("mm.model.fc.weight", 1, "mm.0 mm.1"),
    "yasa2": _vision("mm.2.weight", 1, "mm.0 v.patch_embd"),
    "youtuvl": _vision("mm.2.bias", 0, "mm.input_norm mm.0+ mm.2+"),
    # Its output is that of several projectors together, see `_width`.
    "granite4_vision": _vision("v.proj_blk.0.linear.weight", 1, "=v.image_newline"),
    "dots3note_a": _audio("mm.a.mlp.3.weight", 1, f"{_CONV_2D} mm.a.norm_pre+ mm.a.mlp.3+"),
    "gemma4a": _audio("mm.a.input_projection.weight", 1, "a.conv1d.0 a.conv1d.1 a.input_projection"),
    "gemma4ua": _audio("mm.a.input_projection.weight", 1),
    "glma": _audio("mm.a.mlp.2.weight", 1, f"{_WHISPER} mm.a.mlp.1+ mm.a.mlp.2+ mm.a.norm_pre+ =v.boi =v.eoi"),
    "granite_speech": _audio("a.proj_linear.weight", 1, "=a.proj_query a.proj_norm+"),
    "lfm2a": _audio("a.position_embd.weight", 0, "a.pre_encode.out+ mm.a.mlp.0+ mm.a.mlp.1+ mm.a.mlp.3+"),
    "meralion": _audio("mm.a.mlp.3.weight", 1, f"{_WHISPER} mm.a.mlp.0+ mm.a.mlp.1+ mm.a.mlp.2+ mm.a.norm_pre+"),
    "mimo_audio": _audio("mm.a.mlp.2.weight", 1, "a.conv1d.1+ a.conv1d.2+ mm.a.mlp.1"),
    "musicflamingo": _audio("mm.a.mlp.2.weight", 1, f"{_WHISPER} mm.a.mlp.1+ mm.a.mlp.2+"),
    "parakeet": _audio("mm.a.mlp.2.weight", 1, "mm.a.mlp.1 a.pre_encode.out+"),
    "qwen2a": _audio("mm.a.fc.weight", 1, f"{_WHISPER} mm.a.fc+"),
    "qwen3a": _audio("mm.a.mlp.2.weight", 1, f"{_CONV_2D} mm.a.mlp.2+"),
    "ultravox": _audio("mm.a.mlp.2.weight", 1, f"{_WHISPER} mm.a.mlp.1 mm.a.norm_pre mm.a.norm_mid"),
    "voxtral": _audio("mm.a.mlp.2.weight", 1, f"{_WHISPER} mm.a.mlp.1"),
}  # fmt: skip
# One name for two encoders in one file.
_BOTH = {"qwen2.5o": {VISION: "qwen2.5vl_merger", AUDIO: "qwen2a"}}
# libmtmd opens such a file without its audio.
_WITHOUT_AUDIO = "gemma3nv"
# Language models that are made for images; without a projector they are half of what they could be.
_SEEING = frozenset(
    {
        *("cogvlm", "deepseek2-ocr", "gemma3", "gemma3n", "gemma4", "hunyuan_vl", "llama4", "mistral3", "muse-glimmer"),
        *("paddleocr", "qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"),
    }
)
# The smallest ones of the family read text only.
_GEMMA_3_BLIND_WIDTH = 1_152

# They make speech, or belong to what does.
SPEAKERS: Final = frozenset({"qwen3tts_spkenc", "qwen3tts_gen", "pockettts_spkenc", "pockettts_gen"})
# Towers that are no stack of ordinary layers.
_WITHOUT_LAYERS = frozenset({"gemma3nv"})
# They divide by how many positions make a row.
_STACKED = frozenset({"ultravox", "voxtral", "meralion", "glma"})


class _Merge(NamedTuple):
    """How many patches of a side, or frames, make a row: where the file says it, what it is if it does not, and what
    the graph can do."""

    key: str
    default: int
    least: int
    most: int


_SCALE, _SIDE = "projector.scale_factor", "spatial_merge_size"
_MERGES: Final[Mapping[str, _Merge]] = {
    "gemma3": _Merge(_SCALE, 4, 1, 64),
    "idefics3": _Merge(_SCALE, 1, 2, 64),
    "internvl": _Merge(_SCALE, 1, 1, 64),
    "lfm2": _Merge(_SCALE, 1, 2, 64),
    "pixtral": _Merge(_SIDE, 1, 1, 64),
    "lightonocr": _Merge(_SIDE, 1, 1, 64),
    **dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"), _Merge(_SIDE, 2, 2, 2)),
}
# Pictures of one size only: as many patches as there are positions.
_SQUARE = frozenset({"gemma3", "idefics3", "internvl", "janus_pro", "mlp"})
# Positions turn pairs of numbers, in two directions.
_TURNED = frozenset({"pixtral", "lightonocr", "qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"})
# Patches attend to those in a window of so many pixels, but for every `n_wa_pattern`-th layer.
_WINDOWED, _WINDOW = "qwen2.5vl_merger", 112
# Of libmtmd's recordings, before and after its convolutions.
_N_FRAMES, _N_POSITIONS = 3_000, 1_500


def type_of(metadata: Mapping[str, Value], encoder: str) -> str:
    """The projector's type for one of its encoders; "" if the file does not say it."""
    named = metadata.get("clip.projector_type") or metadata.get(f"clip.{encoder}.projector_type")
    name = named if isinstance(named, str) else ""
    return _BOTH.get(name, {}).get(encoder, name)


def encoders(metadata: Mapping[str, Value]) -> tuple[str, ...]:
    """Of VISION and AUDIO, what the projector takes."""
    has = tuple(encoder for encoder in ENCODERS if metadata.get(f"clip.has_{encoder}_encoder") is True)
    return has[:1] if VISION in has and type_of(metadata, VISION) == _WITHOUT_AUDIO else has


def type_problem(metadata: Mapping[str, Value]) -> str:
    """Why libmtmd does not know such a projector, as the end of a sentence that begins with the file; "" if it does."""
    found = encoders(metadata)
    if not found:
        return "is a projector without an encoder of images or audio"
    for encoder in found:
        name = type_of(metadata, encoder)
        if name in SPEAKERS:
            return f"is a projector of the type '{name}', which is for making speech; localrun makes none"
        if not name:
            return f"is a projector that does not say its type ('clip.{encoder}.projector_type')"
        if name not in TYPES:
            return (
                f"is a projector of the unknown type '{name[:40]}', which llama.cpp cannot use (llama-cpp-python "
                f"{LLAMA_CPP_PYTHON})"
            )
        if TYPES[name].encoder != encoder:
            return f"is a projector with the type '{name}' for {encoder}, which is one for {TYPES[name].encoder}"
    return ""


def problem(metadata: Mapping[str, Value], tensors: Collection[TensorInfo]) -> str:
    """Why libmtmd cannot open the projector, as the end of a sentence that begins with the file; "" if nothing is known
    against it. The types of the keys were checked before."""
    if found := type_problem(metadata):
        return found
    by_name = {tensor.name: tensor for tensor in tensors}
    widths = {}
    for encoder in encoders(metadata):
        name = type_of(metadata, encoder)
        found = _number_problem(metadata, encoder, name) or _tensor_problem(metadata, encoder, name, by_name)
        if found:
            return found
        widths[encoder] = _width(metadata, encoder, by_name)
    if len(set(widths.values())) > 1:
        return f"has rows of {widths[VISION]} for images and of {widths[AUDIO]} for audio, and a model takes one width"
    return ""


def width(header: Header) -> int:
    """Numbers in a row that the projector of a checked header makes."""
    by_name = {tensor.name: tensor for tensor in header.tensors}
    return _width(header.metadata, encoders(header.metadata)[0], by_name)


def input_width(model: Header) -> int:
    """Numbers in a row that a model takes: its own width, and that of each layer which gets a part of the picture of
    its own (deepstack)."""
    mapping = model.metadata.get(f"{model.architecture}.deepstack_mapping")
    n_more = model.count("n_deepstack_layers")
    if isinstance(mapping, tuple) and not isinstance(mapping, ArraySummary):
        n_more = len({index for index in mapping if isinstance(index, int) and index >= 0})
    return model.n_embd * (1 + n_more)


def sees(model: Header) -> bool:
    """Whether models like this one usually come with a projector."""
    is_blind = model.architecture == "gemma3" and model.n_embd <= _GEMMA_3_BLIND_WIDTH
    return model.architecture in _SEEING and not is_blind


def fit_problem(projector: Header, model: Header) -> str:
    """Why a projector is not one for the model, as the end of a sentence that begins with its file; "" if it may be."""
    if model.is_bidirectional:
        return "is a projector, and this model reads in both directions, which llama.cpp does with text only"
    has, wanted = width(projector), input_width(model)
    if has == wanted:
        return ""
    return f"is a projector for another model: its rows have {has} numbers, and this model takes {wanted}"


def _number_problem(metadata: Mapping[str, Value], encoder: str, name: str) -> str:
    """What is wrong with the numbers that every projector has."""

    def count(key: str, least: int, most: int, default: int | None = None) -> str:
        full_key = f"clip.{encoder}.{key}"
        value = metadata.get(full_key, default)
        if value is None:
            return f"lacks '{full_key}'"
        if isinstance(value, int) and least <= value <= most:
            return ""
        needed = f"which is not a number from {least} to {most}" if least < most else f"which must be {least}"
        return f"has '{full_key}' = {str(value)[:40]}, {needed}"

    limits = [
        count("embedding_length", 1, MAX_WIDTH),
        count("feed_forward_length", 0, MAX_WIDTH),
        count("block_count", 0, MAX_LAYERS),
        count("projection_dim", 0, MAX_WIDTH),
        count("attention.head_count", 0, MAX_WIDTH),
        count("attention.head_count_kv", 0, MAX_WIDTH, 0),
        count("attention.head_dim", 0, MAX_WIDTH, 0),
    ]
    epsilon = metadata.get(f"clip.{encoder}.attention.layer_norm_epsilon")
    if epsilon is None:
        limits.append(f"lacks 'clip.{encoder}.attention.layer_norm_epsilon'")
    elif not (isinstance(epsilon, float) and 0 <= epsilon < 1):
        limits.append(f"has 'clip.{encoder}.attention.layer_norm_epsilon' = {epsilon}, which is not from 0 to 1")
    if encoder == VISION:
        limits += [
            count("image_size", 0, MAX_IMAGE_SIDE),
            count("patch_size", 1, MAX_PATCH_SIDE),
            count("spatial_merge_size", 1, MAX_PATCH_SIDE, 1),
            count("projector.scale_factor", 1, MAX_PATCH_SIDE, 1),
            count("preproc_image_size", 1, MAX_IMAGE_SIDE, 1),
            # Smaller pictures are enlarged to so many, each of which takes 15 bytes.
            count("image_min_pixels", 0, MAX_IMAGE_SIDE**2, 0),
        ]
        if (merge := _MERGES.get(name)) is not None:
            limits.append(count(merge.key, merge.least, merge.most, merge.default))
        for key in ("image_mean", "image_std"):
            values = metadata.get(f"clip.vision.{key}")
            if not isinstance(values, tuple) or isinstance(values, ArraySummary) or len(values) < 3:
                limits.append(f"lacks the three numbers of 'clip.vision.{key}'")
            elif not all(isinstance(each, float) and math.isfinite(each) for each in values):
                limits.append(f"has 'clip.vision.{key}' = {str(values)[:80]}, which are not all numbers")
            elif key == "image_std" and 0 in values:
                limits.append("has a 0 in 'clip.vision.image_std', by which pixels are divided")
    else:
        limits.append(count("num_mel_bins", 0, MAX_PATCH_SIDE))
        is_stacked = name in _STACKED
        limits.append(count("projector.stack_factor", int(is_stacked), MAX_PATCH_SIDE, None if is_stacked else 1))
    if found := next(filter(None, limits), ""):
        return found
    n_embd, n_heads, n_layers = (
        number(metadata, encoder, key) for key in ("embedding_length", "attention.head_count", "block_count")
    )
    if not n_layers and name in projector_shapes.KINDS:
        return "has no layers"
    has_layers = n_layers > 0 and name not in _WITHOUT_LAYERS
    if has_layers and not number(metadata, encoder, "attention.head_dim") and (not n_heads or n_embd % n_heads):
        return f"has {n_heads} attention heads for a width of {n_embd}, which they do not divide"
    return _grid_problem(metadata, encoder, name) if name in projector_shapes.KINDS else ""


def _grid_problem(metadata: Mapping[str, Value], encoder: str, name: str) -> str:
    """What is wrong with the numbers of heads, patches and frames, by how libmtmd counts with them."""
    sizes = _sizes(metadata, encoder, name)
    n_heads, n_kv = sizes["Q"] // sizes["D"], sizes["K"] // sizes["D"]
    if not n_heads or n_heads % n_kv:
        return f"has {n_heads} attention heads for queries and {n_kv} for keys, which do not divide them"
    if name in _TURNED and sizes["D"] % 4:
        return f"has attention heads of {sizes['D']} numbers, where a multiple of 4 is needed"
    if name == "qwen3vl_merger" and sizes["Q"] != sizes["E"]:
        return f"has {n_heads} attention heads of {sizes['D']} numbers for a width of {sizes['E']}"
    if name == _WINDOWED and (pattern := number(metadata, VISION, "n_wa_pattern")) == 1:
        return f"has 'clip.vision.n_wa_pattern' = {pattern}, where 0 or at least 2 is needed"
    if name == _WINDOWED and sizes["S"] > _WINDOW // 2:
        return f"has patches of {sizes['S']} a side, where windows have {_WINDOW}"
    if encoder == VISION:
        merge, n_side = math.isqrt(sizes["F"]), number(metadata, VISION, "image_size") // sizes["S"]
        if name in _SQUARE and (not n_side or n_side % merge):
            return (
                f"has pictures ('clip.vision.image_size') of {n_side} patches ('clip.vision.patch_size') a side, where "
                f"a multiple of {merge} is needed"
            )
        return ""
    n_frames = sizes["F"]
    stride = sizes["E"] * n_frames
    n_positions = _N_POSITIONS // (2 if name == "voxtral" else 1)
    # libmtmd pads to the stride as if that were a power of two.
    n_rows = ((n_positions * sizes["E"] + stride - 1) & ~(stride - 1)) // stride if n_frames > 1 else n_positions
    n_counted = n_positions // n_frames
    if name != "glma":
        n_counted = -(-_N_FRAMES // n_frames) * n_positions // _N_FRAMES
    if n_rows != n_counted:
        return (
            f"has 'clip.audio.projector.stack_factor' = {n_frames}, with which {_N_POSITIONS} positions make {n_rows} "
            f"rows and are counted as {n_counted}"
        )
    return ""


def _sizes(metadata: Mapping[str, Value], encoder: str, name: str) -> projector_shapes.Sizes:
    """The numbers of a file that were checked."""
    n_embd, n_heads, n_kv, head_dim = (
        number(metadata, encoder, key)
        for key in ("embedding_length", "attention.head_count", "attention.head_count_kv", "attention.head_dim")
    )
    head_dim = head_dim or n_embd // max(1, n_heads)
    sizes = {"E": n_embd, "D": head_dim, "Q": n_heads * head_dim, "K": (n_kv or n_heads) * head_dim, "L": 1}
    if encoder == AUDIO:
        n_frames = number(metadata, AUDIO, "projector.stack_factor") if name in _STACKED else 1
        return {**sizes, "F": n_frames, "M": number(metadata, AUDIO, "num_mel_bins")}
    merge = _MERGES.get(name)
    side = metadata.get(f"clip.vision.{merge.key}", merge.default) if merge is not None else 1
    patch = number(metadata, VISION, "patch_size")
    layers = metadata.get("clip.vision.feature_layer")
    if isinstance(layers, tuple) and not isinstance(layers, ArraySummary):
        sizes["L"] = len({layer for layer in layers if isinstance(layer, int) and layer >= 0}) or 1
    n_patches = (number(metadata, VISION, "image_size") // patch) ** 2
    sizes["W"] = number(metadata, VISION, "projection_dim")
    return {**sizes, "S": patch, "N": n_patches, "F": side**2 if isinstance(side, int) else 1}


def _tensor_problem(metadata: Mapping[str, Value], encoder: str, name: str, tensors: Mapping[str, TensorInfo]) -> str:
    kind = TYPES[name]
    missing = next((each for each in (kind.output, *kind.tensors) if each not in tensors), "")
    if missing and not (name == "mlp" and missing == kind.output and "mm.3.bias" in tensors):
        return f"lacks the tensor '{missing}', which a projector of the type '{name}' needs"
    prefix = _PREFIXES[encoder]
    n_layers = 0 if name in _WITHOUT_LAYERS else number(metadata, encoder, "block_count")
    for layer in range(n_layers):
        has_experts = f"{prefix}.blk.{layer}.ffn_gate_exps.weight" in tensors
        wanted = ["attn_out"] if has_experts else ["attn_out", "ffn_up", "ffn_down"]
        if f"{prefix}.blk.{layer}.attn_qkv.weight" not in tensors:
            wanted += ["attn_q", "attn_k", "attn_v"]
        for each in wanted:
            if f"{prefix}.blk.{layer}.{each}.weight" not in tensors:
                return f"lacks the tensor '{prefix}.blk.{layer}.{each}.weight'"
    if name in projector_shapes.KINDS:
        return projector_shapes.problem(name, prefix, n_layers, _sizes(metadata, encoder, name), tensors)
    return ""


def _width(metadata: Mapping[str, Value], encoder: str, tensors: Mapping[str, TensorInfo]) -> int:
    name = type_of(metadata, encoder)
    if name == "granite4_vision":
        layers = metadata.get("clip.vision.feature_layer")
        n_parts = len(layers) if isinstance(layers, tuple) and not isinstance(layers, ArraySummary) else 1
        return n_parts * number(metadata, VISION, "projection_dim")
    kind = TYPES[name]
    if name == "mlp" and "mm.3.weight" in tensors:  # of the Yi family
        kind = kind._replace(output="mm.3.bias", axis=0)
    output = tensors.get(kind.output)
    own = output.shape[kind.axis] if output is not None and len(output.shape) > kind.axis else 1
    if name == "qwen3vl_merger":
        n_layers = number(metadata, VISION, "block_count")
        own *= 1 + sum(f"v.deepstack.{layer}.fc1.weight" in tensors for layer in range(n_layers))
    return own


def number(metadata: Mapping[str, Value], encoder: str, key: str) -> int:
    """A whole number of an encoder; 0 where the file states none."""
    value = metadata.get(f"clip.{encoder}.{key}", 0)
    return value if isinstance(value, int) else 0
