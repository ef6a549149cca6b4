"""Which files of a repository are taken, and what is said about it."""

from __future__ import annotations

import pytest

from localrun.errors import BadRequest, NotFound
from localrun.models.quant_choice import QUALITY, QuantChoice, RemoteFile, candidates, choose, quant_of

GB = 1_000_000_000
EIGHT_B = {"F16": 16.4, "Q8_0": 8.7, "Q6_K": 6.7, "Q5_K_M": 5.9, "Q4_K_M": 5.0, "Q4_0": 4.8, "Q3_K_M": 4.1, "Q2_K": 3.3}


def files(sizes_gb: dict[str, float]) -> list[RemoteFile]:
    return [RemoteFile(f"model-{quant}.gguf", int(size * GB)) for quant, size in sizes_gb.items()]


def chosen(offered: list[RemoteFile], tag: str | None = None, memory_gb: float = 16) -> QuantChoice:
    return choose(offered, tag=tag, memory_bytes=int(memory_gb * GB), repo="org/repo")


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("model-UD-Q4_K_XL.gguf", "Q4_K_XL"),
        ("phi-4-Q4_K.gguf", "Q4_K"),
        ("BF16/model-BF16-00001-of-00002.gguf", "BF16"),
        ("Q4_0/model.gguf", "Q4_0"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model-NVFP4.gguf", "NVFP4"),
        ("model-Q1_0.gguf", "Q1_0"),
        ("nomic.f16.gguf", "F16"),
        ("bge-m3-FP16.gguf", "F16"),
        ("model-i1-IQ2_M.gguf", "IQ2_M"),
        ("model.gguf", ""),
        ("Q4U.gguf", ""),
    ],
)
def test_a_quantization_is_read_from_the_name(path: str, quant: str):
    assert quant_of(path) == quant
    assert not quant or quant in QUALITY


@pytest.mark.parametrize(
    ("memory_gb", "quant", "why"),
    [
        (4, "Q2_K", "slow"),
        (6, "Q2_K", "weaker answers"),
        (8, "Q4_0", "fits the 6.4 GB"),
        (12, "Q4_K_M", "fits the 9.6 GB"),
        (16, "Q4_K_M", "fits the 12.8 GB"),
        (24, "Q6_K", "19.2 GB"),
        (64, "Q8_0", "51.2 GB"),
        (1000, "Q8_0", "at most half"),
    ],
)
def test_without_a_tag_the_memory_decides(memory_gb: float, quant: str, why: str):
    choice = chosen(files(EIGHT_B), memory_gb=memory_gb)
    assert choice.quant == quant
    assert why in choice.reason
    assert quant in choice.reason
    assert chosen(files(EIGHT_B), "latest", memory_gb).files == choice.files


def test_more_memory_never_means_a_worse_quantization():
    ranks = [QUALITY.index(chosen(files(EIGHT_B), memory_gb=each / 2).quant) for each in range(16, 200)]
    assert ranks == sorted(ranks, reverse=True)


def test_full_weights_are_taken_only_where_nothing_else_is():
    assert chosen(files({"F16": 1.2}), memory_gb=64).quant == "F16"
    assert "the only one there" in chosen(files({"F16": 1.2})).reason
    assert chosen(files({"F16": 1.2, "Q2_K": 0.3}), memory_gb=64).quant == "Q2_K"


def test_a_tag_is_a_quantization_a_part_of_a_name_or_a_file():
    offered = [*files(EIGHT_B), RemoteFile("model-UD-Q4_K_XL.gguf", 5 * GB), RemoteFile("sub/Other.gguf", GB)]
    assert chosen(offered, "q4_k_m").quant == "Q4_K_M"
    assert chosen(offered, "Q4_K_M").reason == ""
    assert chosen(offered, "UD-Q4_K_XL").files[0].path == "model-UD-Q4_K_XL.gguf"
    assert chosen(offered, "model-q2_k.gguf").quant == "Q2_K"
    assert chosen(offered, "other.gguf").files[0].path == "sub/Other.gguf"


def test_a_tag_that_is_not_there_is_answered_with_those_that_are():
    with pytest.raises(NotFound, match=r"'org/repo'.*'Q7_K'.*F16, Q8_0, Q6_K"):
        chosen(files(EIGHT_B), "Q7_K")
    with pytest.raises(BadRequest, match="no GGUF model files"):
        chosen([RemoteFile("model.safetensors", GB), RemoteFile("mmproj-F16.gguf", GB)])


def test_shards_are_one_model_in_order():
    offered = [RemoteFile(f"Q4_K_M/m-Q4_K_M-0000{n}-of-00003.gguf", n * GB) for n in (3, 1, 2)]
    offered.append(RemoteFile("m-Q8_0-00001-of-00002.gguf", GB))
    (only,) = candidates(offered)
    assert [file.path[-19:-14] for file in only.files] == ["00001", "00002", "00003"]
    assert only.size_bytes == 6 * GB
    assert chosen(offered, "Q4_K_M", 4).files == only.files


def test_companions_are_no_models_and_stay_where_they_are():
    offered = [
        *(RemoteFile(f"{name}.gguf", 1000) for name in ("mmproj-BF16", "mmproj-model-F16", "mmproj-Q8_0", "imatrix")),
        *(RemoteFile(f"{name}.gguf", 1000) for name in ("mtp-model-Q8_0", "eagle3-model", "model.imatrix")),
        *files(EIGHT_B),
    ]
    assert [file.path for file in chosen(offered, "Q8_0").files] == ["model-Q8_0.gguf"]


@pytest.mark.parametrize(
    "quant",
    ["IQ4_KS", "IQ3_KSS", "IQ2_KL", "IQ5_K", "Q4_K_R4", "Q8_0_R8", "IQ4_K_R4", "i2_s", "Q6_0", "Q8_KV", "BF16_R16"],
)
def test_types_of_other_programs_are_not_offered(quant: str):
    foreign = RemoteFile(f"{quant}/model-{quant}.gguf", GB)
    assert chosen([foreign, *files(EIGHT_B)], memory_gb=24).quant == "Q6_K"
    with pytest.raises(BadRequest, match=rf"has only types that llama.cpp cannot read \({quant}/model-{quant}.gguf\)"):
        chosen([foreign, RemoteFile("mmproj-F16.gguf", GB)], quant)


def test_types_that_llama_cpp_does_not_read_any_more_are_not_offered():
    repacked = [RemoteFile(f"model-Q4_0_{rows}.gguf", GB) for rows in ("4_4", "4_8", "8_8")]
    assert [quant_of(file.path) for file in repacked] == ["Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8"]
    plain = RemoteFile("model-Q4_0.gguf", GB)
    assert chosen([*repacked, plain], "Q4_0").files == (plain,)
    with pytest.raises(NotFound, match=r"has no 'Q4_0_4_4'; it has Q4_0$"):
        chosen([*repacked, plain], "Q4_0_4_4")


@pytest.mark.parametrize(
    "name",
    [
        "Foo-27B-MTP-Q6_K.gguf", "Deep-DRAFT-0.6B-v2-Q6_K.gguf", "Foo-7B-imatrix-Q6_K.gguf", "foo-big-vocab-Q6_K.gguf",
        "Q6_K/Foo-MTP-Q6_K.gguf",
    ],
)  # fmt: skip
def test_a_word_in_its_name_makes_no_companion_of_a_model(name: str):
    file = RemoteFile(name, GB)
    for tag in (None, "Q6_K", name.rpartition("/")[2]):
        assert chosen([file], tag).files == (file,)
    assert chosen([file, RemoteFile("Foo-9B-Q6_K.gguf", 2 * GB)], name.rpartition("/")[2]).files == (file,)


def test_a_model_with_draft_heads_is_found_beside_its_twin():
    files = [RemoteFile("Foo-27B-MTP-Q6_K.gguf", GB), RemoteFile("Foo-9B-Q6_K.gguf", 2 * GB)]
    assert [chosen(files, tag).files[0].path for tag in ("MTP-Q6_K", "Q6_K", None)] == [
        "Foo-27B-MTP-Q6_K.gguf", "Foo-9B-Q6_K.gguf", "Foo-9B-Q6_K.gguf",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "companion",
    [
        "MTP/gem-9-E4B-it-Q8_0.gguf", "mtp-gem-9-Q8_0.gguf", "draft/gem-Q8_0.gguf", "imatrix/gem-Q8_0.gguf",
        "mmproj/model-Q8_0.gguf", "gem-eagle3-Q8_0.gguf", "gem-9.imatrix.gguf", "eagle3/gem-Q8_0.gguf",
    ],
)  # fmt: skip
def test_a_companion_is_taken_by_its_whole_name_alone(companion: str):
    files = [RemoteFile(companion, GB // 10), RemoteFile("gem-9-E4B-it-UD-Q4_K_XL.gguf", 3 * GB)]
    assert chosen(files).files == (files[1],)
    with pytest.raises(NotFound, match="has no 'Q8_0'; it has Q4_K_XL"):
        chosen(files, "Q8_0")
    assert chosen(files, companion.rpartition("/")[2]).files == (files[0],)


def test_of_one_type_the_file_nearer_to_the_root_is_taken():
    files = [RemoteFile("old/gem-Q8_0.gguf", GB), RemoteFile("gem-Q8_0.gguf", 2 * GB)]
    assert chosen(files, "Q8_0").files == (files[1],)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["F-Q8_0-00001-of-00003.gguf", "F-Q8_0-00003-of-00003.gguf"], "F-Q8_0-00002-of-00003.gguf is missing"),
        (
            ["F.Q6_K.gguf.part1of2", "F.Q6_K.gguf.part2of2"],
            r"has parts of GGUF files \(F.Q6_K.gguf.part1of2\).*join them",
        ),
        (["F.Q6_K.gguf-split-a"], "join them"),
        (["mmproj-F16.gguf", "imatrix.gguf"], "no GGUF model files; look for"),
    ],
)
def test_why_a_repository_has_no_model(names: list[str], said: str):
    for tag in (None, "Q8_0"):
        with pytest.raises(BadRequest, match=said):
            chosen([RemoteFile(name, GB) for name in names], tag)


def test_a_file_with_blanks_is_found_by_its_type_and_by_its_name_as_a_tag():
    files = [RemoteFile("sub/My Model (Q4_K_M) v2.gguf", GB), RemoteFile("My Model Q8_0.gguf", GB)]
    for tag, found in (("Q4_K_M", files[0]), ("My_Model__Q4_K_M__v2.gguf", files[0]), ("My_Model_Q8_0.gguf", files[1])):
        assert chosen(files, tag).files == (found,)


def test_a_part_of_a_name_means_the_file_that_says_the_least_besides():
    files = [RemoteFile(f"Step-APEX-{name}.gguf", n) for n, name in enumerate(["I-Mini", "I-Compact", "Compact"])]
    for tag, index in (("Compact", 2), ("i-compact", 1), ("mini", 0)):
        assert chosen(files, tag).files == (files[index],)
