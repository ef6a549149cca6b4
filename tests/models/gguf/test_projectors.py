"""Headers of projectors: which are refused before libmtmd sees them; and that the tables are the library's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from localrun.errors import BadModelFile
from localrun.models.gguf import projector_shapes, projectors
from localrun.models.gguf.projectors import KEY_TYPES, SPEAKERS, TYPES
from localrun.models.gguf.reader import read_header
from tests.models.handmade import STRING, U32, entry, file_bytes, text, u32
from tests.projector_file import another, changed, parts_of, write_parts, write_projector
from tests.says import says

KINDS = ("gemma3", "idefics3", "qwen2vl_merger", "ultravox")


def library() -> bytes:
    folder = Path(llama_cpp.__file__).parent / "lib"
    return b"".join(path.read_bytes() for path in folder.iterdir() if "mtmd" in path.name and path.is_file())


def test_the_installed_library_knows_every_type():
    content = library()
    names = {*TYPES, *SPEAKERS, "qwen2.5o"}
    assert {name for name in names if name.encode() + b"\0" not in content} == set()


def test_every_key_of_the_installed_library_has_a_type():
    # Some are only there in pieces, as immediate values of instructions.
    said = {match.decode() for match in re.findall(rb"(?<=\0)clip\.[a-z0-9_.%]+(?=\0)", library())} - {"clip.cpp"}
    keys = {key.replace("%s", part) for key in said for part in ("vision", "audio", "gen.audio")}
    assert {key for key in keys if key.count("clip.") == 1} - set(KEY_TYPES) == set()
    assert len(said) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_sound_ones(kind: str, tmp_path: Path):
    header = read_header(write_projector(tmp_path / "mmproj.gguf", kind, 96), kind="projector")
    assert projectors.encoders(header.metadata) == (("audio",) if kind == "ultravox" else ("vision",))
    assert projectors.width(header) == 96


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_with_another_type_is_refused(kind: str, tmp_path: Path):
    parts = parts_of(kind, 64)
    numbers = [key for key, value in parts.entries.items() if type(value) is int and key.startswith("clip.")]
    assert len(numbers) >= 6
    for key in numbers:
        path = write_parts(tmp_path / "mmproj.gguf", parts._replace(i32={key}))
        with pytest.raises(BadModelFile) as refused:
            read_header(path, kind="projector")
        assert says(refused.value.message, "mmproj.gguf", "i32", f"'{key}'", "u32")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"clip.projector_type": "future"}, ["unknown type 'future'", "llama.cpp"]),
        ({"clip.projector_type": "x" * 900}, ["x" * 40 + "'"]),
        ({"clip.projector_type": "ultravox"}, ["ultravox", "vision", "audio"]),
        ({"clip.projector_type": "qwen3tts_spkenc"}, ["speech"]),
        ({"clip.projector_type": ""}, ["does not say its type"]),
        ({"clip.has_vision_encoder": False}, ["without an encoder"]),
        ({"clip.vision.block_count": 1_000_000_000}, ["block_count", "1000000000"]),
        ({"clip.vision.block_count": 2}, ["v.blk.1.attn_out.weight"]),
        ({"clip.vision.attention.head_count": 0}, ["0 attention heads"]),
        ({"clip.vision.attention.head_count": 5}, ["5 attention heads", "32"]),
        ({"clip.vision.patch_size": 0}, ["patch_size"]),
        ({"clip.vision.patch_size": 16}, ["v.patch_embd.weight"]),
        ({"clip.vision.image_size": 8193}, ["image_size", "8192"]),
        ({"clip.vision.image_mean": [0.5]}, ["image_mean"]),
        ({"clip.vision.image_std": [1, 1, 1]}, ["[i32]", "[f32]"]),
        ({"clip.vision.projector.scale_factor": 0}, ["scale_factor"]),
        ({"clip.vision.image_min_pixels": 2_000_000_000}, ["image_min_pixels", "67108864"]),
    ],
)
def test_what_it_says_is_checked(entries: dict[str, Any], said: list[str], tmp_path: Path):
    path = write_parts(tmp_path / "mmproj.gguf", changed(parts_of("gemma3", 64), entries))
    with pytest.raises(BadModelFile) as refused:
        read_header(path, kind="projector")
    assert says(refused.value.message, "mmproj.gguf", *said)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_part_that_it_needs(kind: str, tmp_path: Path):
    parts = parts_of(kind, 64)
    needed = {TYPES[kind].output, *TYPES[kind].tensors}
    assert needed <= set(parts.tensors)
    for name in (*sorted(needed), f"{'a' if kind == 'ultravox' else 'v'}.blk.0.attn_q.weight"):
        path = write_parts(tmp_path / "mmproj.gguf", changed(parts, without=name))
        with pytest.raises(BadModelFile, match=re.escape(f"lacks the tensor '{name}'")):
            read_header(path, kind="projector")
    for key in parts.entries:
        if key.endswith(("length", "count", "epsilon", "dim")):
            path = write_parts(tmp_path / "mmproj.gguf", changed(parts, without=key))
            with pytest.raises(BadModelFile, match=re.escape(f"lacks '{key}'")):
                read_header(path, kind="projector")


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_do_not_fit_together(kind: str, tmp_path: Path):
    parts = parts_of(kind, 64, n_layers=2)
    own = [name for name in parts.tensors if ".blk.1." in name]
    assert len(own) >= 8
    for name in own:
        shape = parts.tensors[name]
        for axis in range(len(shape)):
            wrong = (*shape[:axis], shape[axis] + 8, *shape[axis + 1 :])
            path = write_parts(tmp_path / "mmproj.gguf", parts._replace(tensors={**parts.tensors, name: wrong}))
            # Of the two halves of the feed-forward either may be the wrong one.
            said = re.escape(name) if "ffn" not in name else r"[av]\.blk\.1\.ffn_(up|down)\.(weight|bias)"
            with pytest.raises(BadModelFile, match=f"'{said}'"):
                read_header(path, kind="projector")
    for name in (each for each in own if each.endswith(".bias") and "attn_out" not in each and "ffn" not in each):
        path = write_parts(tmp_path / "mmproj.gguf", changed(parts, without=name))
        with pytest.raises(BadModelFile, match=re.escape(f"lacks the tensor '{name}'")):
            read_header(path, kind="projector")


@pytest.mark.parametrize("kind", projector_shapes.KINDS)
def test_what_stands_around_the_layers(kind: str, tmp_path: Path):
    parts = another(kind, 64)
    read_header(write_parts(tmp_path / "mmproj.gguf", parts), kind="projector")
    own = [name for name in parts.tensors if ".blk." not in name]
    type_name = parts.entries["clip.projector_type"]
    assert len(own) >= 4
    for name in own:
        shape = parts.tensors[name]
        # What nothing else is compared with is the width of the rows.
        for axis in range(len(shape)):
            longer = (*shape[:axis], shape[axis] + 1, *shape[axis + 1 :])
            path = write_parts(tmp_path / "mmproj.gguf", parts._replace(tensors={**parts.tensors, name: longer}))
            may_be_longer = name == "a.position_embd.weight" or (name == "v.position_embd.weight" and "mlp" in kind)
            if (may_be_longer and axis == 0) or (65 in longer and name in (TYPES[type_name].output, "mm.2.weight")):
                continue
            with pytest.raises(BadModelFile, match="of the shape"):
                read_header(path, kind="projector")


def test_what_is_added_is_in_single_precision(tmp_path: Path):
    kernel = another("ultravox", 64)
    read_header(write_parts(tmp_path / "mmproj.gguf", kernel, is_half=True), kind="projector")
    for name in ("v.blk.0.ln1.weight", "v.position_embd.weight", "v.post_ln.bias"):
        path = write_parts(tmp_path / "mmproj.gguf", parts_of("gemma3", 64), types={name: np.float16})
        with pytest.raises(BadModelFile, match=f"'{name}' of the type F16, where F32"):
            read_header(path, kind="projector")
    path = write_parts(tmp_path / "mmproj.gguf", parts_of("gemma3", 64), types={"v.blk.0.ffn_up.weight": np.int32})
    with pytest.raises(BadModelFile, match=r"ffn_up.weight' of the type I32"):
        read_header(path, kind="projector")


def test_towers_with_all_of_attention_in_one_tensor_or_fewer_heads_for_keys(tmp_path: Path):
    parts = changed(parts_of("idefics3", 64), {"clip.vision.attention.head_count_kv": 1})
    parts.tensors.update({"v.blk.0.attn_k.weight": (16, 32), "v.blk.0.attn_v.weight": (16, 32)})
    read_header(write_parts(tmp_path / "mmproj.gguf", parts), kind="projector")
    for name in ("q", "k", "v"):
        del parts.tensors[f"v.blk.0.attn_{name}.weight"]
    parts.tensors.update({"v.blk.0.attn_qkv.weight": (96, 32), "v.blk.0.attn_qkv.bias": (96,)})
    read_header(write_parts(tmp_path / "mmproj.gguf", parts), kind="projector")
    parts.tensors.update({"v.blk.0.attn_qkv.weight": (64, 32), "v.blk.0.attn_qkv.bias": (64,)})
    with pytest.raises(BadModelFile, match=r"attn_qkv.weight.*\(32, 64\), where \(32, 96\)"):
        read_header(write_parts(tmp_path / "mmproj.gguf", parts), kind="projector")
    three = changed(parts_of("idefics3", 64), {"clip.vision.attention.head_count_kv": 3})
    with pytest.raises(BadModelFile, match="2 attention heads for queries and 3 for keys"):
        read_header(write_parts(tmp_path / "mmproj.gguf", three), kind="projector")


@pytest.mark.parametrize(
    ("kind", "entries", "said"),
    [
        ("gemma3", {"clip.vision.projector.scale_factor": 3}, ["4 patches", "multiple of 3"]),
        ("gemma3", {"clip.vision.image_std": [0.5, 0.0, 0.5]}, ["0 in", "image_std"]),
        ("gemma3", {"clip.vision.image_mean": [float("nan")] * 3}, ["image_mean", "nan"]),
        ("gemma3", {"clip.vision.attention.layer_norm_epsilon": -1.0}, ["layer_norm_epsilon", "-1.0"]),
        ("idefics3", {"clip.vision.projector.scale_factor": 1}, ["scale_factor", "2 to 64"]),
        ("idefics3", {"clip.vision.preproc_image_size": 1_000_000}, ["preproc_image_size", "8192"]),
        ("qwen2vl_merger", {"clip.vision.spatial_merge_size": 4}, ["spatial_merge_size", "must be 2"]),
        ("qwen2.5vl_merger", {"clip.vision.n_wa_pattern": 1}, ["n_wa_pattern"]),
        ("qwen2.5vl_merger", {"clip.vision.projection_dim": 32}, ["mm.2.weight", "(128, 32)"]),
        ("ultravox", {"clip.audio.projector.stack_factor": 8}, ["stack_factor", "188", "187"]),
        ("ultravox", {"clip.audio.num_mel_bins": 81}, ["a.conv1d.1.weight", "(3, 81, 32)"]),
    ],
)  # fmt: skip
def test_numbers_that_the_graphs_cannot_count_with(kind: str, entries: dict[str, Any], said: list[str], tmp_path: Path):
    path = write_parts(tmp_path / "mmproj.gguf", changed(another(kind, 64), entries))
    with pytest.raises(BadModelFile) as refused:
        read_header(path, kind="projector")
    assert says(refused.value.message, "mmproj.gguf", *said)


def test_a_model_is_no_projector(tiny_gguf: Path, tmp_path: Path):
    with pytest.raises(BadModelFile, match="is no projector"):
        read_header(tiny_gguf, kind="projector")
    with pytest.raises(BadModelFile, match="a part for one"):
        read_header(write_projector(tmp_path / "mmproj.gguf"))


def test_one_of_another_width_is_refused_with_both_numbers(tiny_gguf: Path, tmp_path: Path):
    model = read_header(tiny_gguf)
    for width, is_right in ((model.n_embd, True), (model.n_embd + 8, False)):
        path = write_projector(tmp_path / "mmproj.gguf", width=width)
        problem = projectors.fit_problem(read_header(path, kind="projector"), model)
        assert (problem == "") is is_right
        assert is_right or says(problem, str(width), str(model.n_embd))


def test_layers_that_get_a_part_of_the_picture_make_rows_wider(tmp_path: Path):
    parts = changed(another("qwen3vl_merger", 64), {"clip.vision.block_count": 3})
    for name, shape in [each for each in parts.tensors.items() if ".blk.0." in each[0]]:
        parts.tensors.update({name.replace(".0.", f".{layer}."): shape for layer in (1, 2)})
    for layer in (0, 2):
        deep = f"v.deepstack.{layer}."
        parts.tensors.update({f"{deep}norm.weight": (128,), f"{deep}norm.bias": (128,)})
        parts.tensors.update({f"{deep}fc1.weight": (48, 128), f"{deep}fc2.weight": (64, 48)})
    projector = read_header(write_parts(tmp_path / "mmproj.gguf", parts), kind="projector")
    assert projectors.width(projector) == 3 * 64
    model = tmp_path / "model.gguf"
    dimensions = {"context_length": 64, "block_count": 1, "embedding_length": 64, "n_deepstack_layers": 2}
    entries = [entry(f"qwen3vl.{key}", U32, u32(value)) for key, value in dimensions.items()]
    model.write_bytes(file_bytes((entry("general.architecture", STRING, text("qwen3vl")), *entries), ()))
    assert projectors.input_width(read_header(model)) == 3 * 64
    assert projectors.fit_problem(projector, read_header(model)) == ""


def test_one_name_for_two_encoders():
    said = {
        "clip.projector_type": "qwen2.5o", "clip.has_vision_encoder": True, "clip.has_audio_encoder": True,
    }  # fmt: skip
    assert projectors.encoders(said) == ("vision", "audio")
    assert [projectors.type_of(said, each) for each in ("vision", "audio")] == ["qwen2.5vl_merger", "qwen2a"]
    assert projectors.type_problem(said) == ""


def test_audio_that_libmtmd_leaves_out_is_not_promised():
    said = {
        "clip.vision.projector_type": "gemma3nv", "clip.audio.projector_type": "gemma3na",
        "clip.has_vision_encoder": True, "clip.has_audio_encoder": True,
    }  # fmt: skip
    assert projectors.encoders(said) == ("vision",)
    assert projectors.type_problem(said) == ""
