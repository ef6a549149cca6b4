"""The estimate of a projector's memory beside what libmtmd takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from localrun.models.builtin import model_path
from localrun.models.gguf.reader import read_header
from localrun.models.memory import MOST_PATCHES, most_patches, projector_memory
from tests.models.projector_rss import CASES, Case, measure
from tests.projector_file import another, changed, parts_of, write_parts

SMALL = Case("small", "gemma3", {"n_embd": 256, "n_ff": 1024, "n_layers": 1, "patch": 16, "image": 1024, "scale": 4},
             (640, 480))  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.skipif(not model_path().is_file(), reason="the built-in model's file is not there")
@pytest.mark.parametrize(
    "case", [SMALL, *(pytest.param(case, marks=pytest.mark.deep) for case in CASES)], ids=lambda case: case.name
)
def test_the_estimate_is_within_a_fifth_of_what_libmtmd_takes(case: Case, tmp_path: Path) -> None:
    seen = measure(case, tmp_path)
    assert abs(seen.error) < 0.2, f"estimate {seen.estimate}, measured {seen.peak_bytes}"


def test_the_largest_picture_is_bounded(tmp_path: Path) -> None:
    parts = parts_of("qwen2vl_merger", 64)
    for entries, patches in (
        ({}, 4_096 * 4),
        ({"clip.vision.image_max_pixels": 64 * 100}, 100),
        ({"clip.vision.image_max_pixels": 2_000_000_000}, MOST_PATCHES),
    ):
        header = read_header(write_parts(tmp_path / "mmproj.gguf", changed(parts, entries)), kind="projector")
        assert most_patches(header) == patches
        assert projector_memory(header).compute_bytes > patches * 32 * 4
    assert most_patches(read_header(write_parts(tmp_path / "j.gguf", another("janus_pro", 64)), kind="projector")) == 16
