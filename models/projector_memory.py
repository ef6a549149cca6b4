"""How much memory a projector takes in an engine, from its header alone.

Pure arithmetic. libmtmd reads the weights into buffers of its own, so they are never mapped. Besides it takes a buffer
to compute in, which grows with the largest picture that it was given and stays as large, and copies of the picture in
floating-point numbers. README.md has the estimates beside what libmtmd took.

The rows that it makes are kept in the engine's memory for prefixes (the setting `ram_cache_bytes`), and are not counted
here. Not modelled: attention without flash attention, which takes the square of the patches, and towers that are no
stack of layers (Gemma 3n).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from localrun.models.gguf import projectors
from localrun.models.gguf.header import Header

_F32_BYTES = 4
_F16_BYTES = 2
_COLOURS = 3
# Copies of a picture, or of all of its tiles, at the size at which it is computed, while it is; and what libmtmd takes
# besides: as measured.
_IMAGE_COPIES = 2
_REST_BYTES = 4 * 1024 * 1024
# Spectra of the longest piece of audio, and the threads that make them: as measured.
_SPECTRA_BYTES = 12 * 1024 * 1024
# A window of thirty seconds, as most towers have it.
_AUDIO_POSITIONS = 1_500
# What the largest of the common towers (4,096 tokens of four patches) make of a photo. Some would take several times as
# many, for pictures that hardly anybody sends.
MOST_PATCHES: Final = 16_384

# Tokens of one picture at most, for towers that compute pictures of any size; the others state it in their files.
_MOST_TOKENS = {
    **dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "ling3vl", "glm4v", "kimik25"), 4_096),
    **dict.fromkeys(("muse-glimmer", "youtuvl", "hunyuanvl", "glm5v", "mimovl", "exaone4_5"), 4_096),
    **dict.fromkeys(("pixtral", "kimivl"), 1_024),
    **dict.fromkeys(("gemma4v", "gemma4uv"), 1_120),
    "minimax_m3": 576, "deepseek4v": 384, "lfm2": 256,
}  # fmt: skip
# Tiles of one picture at most, for towers that cut it into tiles and do not state it.
_MOST_TILES = {"internvl": 13, "resampler": 10, "minicpmv4_6": 10, "llama4": 17, "deepseekocr": 10, "deepseekocr2": 7}
# Patches of a side that make one token, where the file does not say it.
_MERGED = {"gemma4v": 3, "gemma4uv": 3, "gemma3": 4, "pixtral": 1, "kimivl": 2, "lfm2": 2}
_USUAL_MERGED = 2


class ProjectorMemory(NamedTuple):
    """Bytes."""

    weights_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.compute_bytes


def projector_memory(header: Header) -> ProjectorMemory:
    """Of a projector that computes the largest picture, or the longest piece of audio, that it takes at once."""
    needed = [_compute_bytes(header, encoder) for encoder in projectors.encoders(header.metadata)]
    return ProjectorMemory(header.weights_bytes, sum(needed))


def _compute_bytes(header: Header, encoder: str) -> int:
    """The widest point of a layer (the feed-forward's activations, what goes in and what goes around, or the vectors of
    attention), and the activations once more in F16, for a product with weights of that type."""
    n_positions = _AUDIO_POSITIONS if encoder == projectors.AUDIO else most_patches(header)
    n_embd, n_ff = (_number(header, encoder, key) for key in ("embedding_length", "feed_forward_length"))
    layer_bytes = n_positions * (max(n_ff + 3 * n_embd, 5 * n_embd) * _F32_BYTES + n_ff * _F16_BYTES)
    if encoder == projectors.AUDIO:
        return layer_bytes + _SPECTRA_BYTES + _REST_BYTES
    image_bytes = n_positions * _number(header, encoder, "patch_size") ** 2 * _COLOURS * _F32_BYTES
    return layer_bytes + image_bytes * _IMAGE_COPIES * _most_tiles(header) + _REST_BYTES


def _most_tiles(header: Header) -> int:
    """1 for a tower that computes a picture as a whole."""
    name = projectors.type_of(header.metadata, projectors.VISION)
    if stated := _number(header, projectors.VISION, "preproc_max_tiles"):
        return stated + 1
    whole, tile = (_number(header, projectors.VISION, key) for key in ("preproc_image_size", "image_size"))
    if name == "idefics3" and tile:
        return (whole // tile) ** 2 + 1
    return _MOST_TILES.get(name, 1)


def most_patches(header: Header) -> int:
    """Of the largest picture that is computed at once, at most `MOST_PATCHES`."""
    metadata = header.metadata
    name = projectors.type_of(metadata, projectors.VISION)
    patch = max(1, _number(header, projectors.VISION, "patch_size"))
    merged = (
        _number(header, projectors.VISION, "spatial_merge_size")
        or _number(header, projectors.VISION, "projector.scale_factor")
        or _MERGED.get(name, _USUAL_MERGED)
    )
    if pixels := _number(header, projectors.VISION, "image_max_pixels"):
        patches = pixels // patch**2
    elif name in _MOST_TOKENS:
        patches = _MOST_TOKENS[name] * merged**2
    else:
        patches = (_number(header, projectors.VISION, "image_size") // patch) ** 2
    return max(1, min(patches, MOST_PATCHES))


def _number(header: Header, encoder: str, key: str) -> int:
    value = header.metadata.get(f"clip.{encoder}.{key}", 0)
    return value if isinstance(value, int) else 0
