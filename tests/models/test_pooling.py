"""What a file says it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localrun.models import pooling
from localrun.models.header import Header


def header(architecture: str, **metadata: Any) -> Header:
    values = {f"{architecture}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return Header(
        path=Path("model.gguf"), size_bytes=0, version=3, architecture=architecture, metadata=values, tensors=(),
        data_offset=0,
    )  # fmt: skip


@pytest.mark.parametrize(("number", "name"), [(1, "mean"), (2, "cls"), (3, "last"), (4, "rank")])
def test_a_stated_pooling_counts_whatever_the_architecture(number: int, name: str):
    for architecture in ("bert", "qwen3"):
        assert pooling.pooling(header(architecture, pooling_type=number)) == name


@pytest.mark.parametrize("stated", [{}, {"pooling_type": 0}])
def test_without_one_encoders_take_the_mean_and_decoders_the_last_token(stated: dict[str, int]):
    assert pooling.pooling(header("bert", **stated)) == "mean"
    assert pooling.pooling(header("llama", attention__causal=False, **stated)) == "mean"
    assert pooling.pooling(header("llama", **stated)) == "last"


def test_what_generates():
    assert pooling.generates(header("llama"))
    assert pooling.generates(header("qwen3", pooling_type=0))
    assert not pooling.generates(header("qwen3", pooling_type=3))
    assert not pooling.generates(header("modern-bert"))
    assert not pooling.generates(header("llama", attention__causal=False))


def test_dimensions_are_those_of_what_comes_out():
    assert pooling.n_dimensions(header("bert", embedding_length=384)) == 384
    assert pooling.n_dimensions(header("gemma-embedding", embedding_length=768, embedding_length_out=512)) == 512
    assert pooling.is_reranker(header("bert", pooling_type=4))
