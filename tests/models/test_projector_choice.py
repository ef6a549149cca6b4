"""Which projector belongs to a model, by the names of files."""

from __future__ import annotations

import pytest

from localrun.errors import NotFound
from localrun.models.quant_choice import RemoteFile, is_projector, projector_in_folder, projector_of_repository
from tests.says import says


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("mmproj-F16.gguf", True), ("MMPROJ.gguf", True), ("fox-mmproj-f16.gguf", True), ("fox.mmproj-Q8_0.gguf", True),
        ("fox.gguf", False), ("mmprojector.gguf", False), ("mmproj-F16.bin", False), ("commproj-x.gguf", False),
    ],
)  # fmt: skip
def test_names_of_projectors(name: str, is_one: bool):
    assert is_projector(name) is is_one


def chosen(model: str, *projectors: str, wanted: str = "", others: tuple[str, ...] = ()) -> str | None:
    files = [RemoteFile(path, 1000 - index) for index, path in enumerate((model, *others, *projectors))]
    found = projector_of_repository(model, files, wanted=wanted)
    return found.path if found else None


@pytest.mark.parametrize(
    ("model", "projectors", "expected"),
    [
        ("fox-Q4_K_M.gguf", (), None),
        ("fox-Q4_K_M.gguf", ("mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"), "mmproj-F16.gguf"),
        ("fox-Q4_K_M.gguf", ("mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-Q8_0.gguf"), "mmproj-BF16.gguf"),
        ("fox-Q4_K_M.gguf", ("mmproj-F32.gguf", "mmproj-Q8_0.gguf"), "mmproj-Q8_0.gguf"),
        ("fox-Q4_K_M.gguf", ("mmproj-F32.gguf", "mmproj.gguf"), "mmproj.gguf"),
        ("fox-Q4_K_M.gguf", ("mmproj-Q4_0.gguf", "mmproj-F32.gguf"), "mmproj-F32.gguf"),
        ("ggml-model-Q4_K_M.gguf", ("mmproj-model-f16.gguf",), "mmproj-model-f16.gguf"),
        ("gemma-3-4b-it-Q4_0.gguf", ("mmproj-gemma-3-12b-F16.gguf", "mmproj-gemma-3-4b-F32.gguf"),
         "mmproj-gemma-3-4b-F32.gguf"),
        ("fox-4b-Q4_0.gguf", ("mmproj-fox-F16.gguf", "mmproj-fox-4b-F32.gguf"), "mmproj-fox-4b-F32.gguf"),
        ("Q4_K_M/fox-Q4_K_M-00001-of-00003.gguf", ("mmproj-F16.gguf",), "mmproj-F16.gguf"),
        ("4b/fox-Q4_K_M.gguf", ("12b/mmproj-F16.gguf", "4b/mmproj-F32.gguf"), "4b/mmproj-F32.gguf"),
        ("fox-Q4_K_M.gguf", ("mmproj/mmproj-F16.gguf",), "mmproj/mmproj-F16.gguf"),
        ("moondream2-text-model-f16.gguf", ("moondream2-mmproj-f16.gguf",), "moondream2-mmproj-f16.gguf"),
        ("fox-Q4_K_M.gguf", ("mmproj-siglip-so400m-F16.gguf",), "mmproj-siglip-so400m-F16.gguf"),
    ],
)  # fmt: skip
def test_of_a_repository(model: str, projectors: tuple[str, ...], expected: str | None):
    assert chosen(model, *projectors) == expected


def test_of_a_repository_with_several_models_another_one_s_is_none():
    assert chosen("fox-Q4_0.gguf", "mmproj-owl-F16.gguf", others=("owl-Q4_0.gguf",)) is None
    assert chosen("owl-Q4_0.gguf", "mmproj-owl-F16.gguf", others=("fox-Q4_0.gguf",)) == "mmproj-owl-F16.gguf"


def test_what_a_person_asks_for():
    there = ("mmproj-F32.gguf", "sub/mmproj-F16.gguf", "sub/mmproj-owl-Q8_0.gguf")
    for wanted, expected in (
        ("none", None), ("NONE", None), ("mmproj-F32.gguf", there[0]), ("sub/mmproj-f16.gguf", there[1]),
        ("F32", there[0]), ("fp16", there[1]), ("q8_0", there[2]),
    ):  # fmt: skip
        assert chosen("fox-Q4_0.gguf", *there, wanted=wanted, others=("owl-Q4_0.gguf",)) == expected
    with pytest.raises(NotFound) as refused:
        chosen("fox-Q4_0.gguf", *there, wanted="BF16")
    assert says(refused.value.message, "BF16", *there)
    with pytest.raises(NotFound, match="it has none"):
        chosen("fox-Q4_0.gguf", wanted="BF16")


@pytest.mark.parametrize(
    ("model", "names", "expected"),
    [
        ("fox-Q4_0.gguf", ("mmproj-F16.gguf", "fox-Q4_0.gguf", "fox-Q8_0.gguf"), "mmproj-F16.gguf"),
        ("fox-Q4_0.gguf", ("mmproj-F16.gguf", "fox-Q4_0.gguf", "owl-Q8_0.gguf"), None),
        ("fox-Q4_0.gguf", ("mmproj-fox-F16.gguf", "fox-Q4_0.gguf", "owl-Q8_0.gguf"), "mmproj-fox-F16.gguf"),
        ("owl-Q8_0.gguf", ("mmproj-fox-F16.gguf", "fox-Q4_0.gguf", "owl-Q8_0.gguf"), None),
        ("fox-Q4_0.gguf", ("mmproj-wolf-F16.gguf", "fox-Q4_0.gguf", "readme.md"), "mmproj-wolf-F16.gguf"),
        ("fox-Q4_0.gguf", ("fox-Q4_0.gguf",), None),
    ],
)
def test_of_a_folder(model: str, names: tuple[str, ...], expected: str | None):
    assert projector_in_folder(model, names) == expected
