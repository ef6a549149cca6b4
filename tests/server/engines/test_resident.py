"""What a loaded model's row says, and when a file counts as another one."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.config import Settings, latency_target_s
from localrun.errors import BadRequest, CannotFit
from localrun.models.fit import USABLE_RAM
from localrun.models.gguf.header import TensorInfo
from localrun.models.storage.model import Model
from localrun.server.engines.placement import place_embeddings
from localrun.server.engines.resident import Use, pooling_for
from localrun.stored import FileStamp
from localrun.wire import Pooling
from tests.models.gguf.test_header import of_kind as header
from tests.says import says


def test_a_stamp_tells_a_replaced_or_changed_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"one")
    first = FileStamp.of(path)
    assert FileStamp.of(path) == first
    os.utime(path, (1, 1))
    assert FileStamp.of(path) != first
    (tmp_path / "n.gguf").write_bytes(b"one")
    os.replace(tmp_path / "n.gguf", path)
    assert FileStamp.of(path) != first
    last, status = FileStamp.of(path), path.stat()
    with path.open("r+b") as file:
        file.write(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert FileStamp.of(path) != last, "edited in place, and its time put back"
    path.unlink()
    with pytest.raises(OSError):  # noqa: PT011 - any of them
        FileStamp.of(path)


async def test_a_row_from_loading_to_idle(supervising: Any) -> None:
    async with supervising(keep_alive_s=50, slots=3) as (supervisor, _):
        lease = await supervisor.acquire("alpha", 70)
        busy = supervisor.loaded()[0]
        assert (busy.state, busy.pid, busy.slots, busy.n_ctx) == ("ready", lease.link.pid, 3, 3 * 1536)
        assert busy.expires_in_s == 70, "all of it is still to come"
        assert busy.target_itl_s == latency_target_s("balanced")
        lease.release()
        idle = supervisor.loaded()[0]
        assert idle.expires_in_s is not None
        assert 60 < idle.expires_in_s <= 70
        (await supervisor.acquire("alpha", float("inf"))).release()
        assert supervisor.loaded()[0].expires_in_s is None


async def test_the_latency_mode_shows_as_a_target(supervising: Any) -> None:
    async with supervising(latency="throughput") as (supervisor, _):
        (await supervisor.acquire("alpha", None)).release()
        assert supervisor.loaded()[0].target_itl_s == latency_target_s("throughput")


GIB = 1024**3


def model(architecture: str, **metadata: Any) -> Model:
    return Model("some:model", Path("m.gguf"), 0, datetime.now(UTC), header(architecture, **metadata))


def test_a_chat_model_generates_and_can_be_asked_for_embeddings():
    chat = model("llama")
    assert pooling_for(chat, Use.TEXT) is None
    assert pooling_for(chat, Use.EMBED) is Pooling.LAST
    with pytest.raises(BadRequest, match='"some:model" does not support reranking'):
        pooling_for(chat, Use.RERANK)


@pytest.mark.parametrize("made", [model("bert", pooling_type=2), model("qwen3", pooling_type=2)])
def test_an_embedding_model_does_nothing_else(made: Model):
    assert pooling_for(made, Use.EMBED) is Pooling.CLS
    with pytest.raises(BadRequest, match="embedding model: use /api/embed"):
        pooling_for(made, Use.TEXT)


def test_a_reranker_does_nothing_else():
    ranker = model("bert", pooling_type=4)
    with pytest.raises(BadRequest, match=r"has no ranking head \(cls.output.weight or cls.weight\)"):
        pooling_for(ranker, Use.RERANK)
    head = TensorInfo("cls.output.weight", (1,), "F32", 0, 4)
    ranker = replace(ranker, header=replace(ranker.header, tensors=(head,)))
    assert pooling_for(ranker, Use.RERANK) is Pooling.RANK
    with pytest.raises(BadRequest, match="does not support embeddings; it ranks documents: use /v1/rerank"):
        pooling_for(ranker, Use.EMBED)
    with pytest.raises(BadRequest, match="does not support chat"):
        pooling_for(ranker, Use.TEXT)


DIMENSIONS = {
    "context_length": 32_768, "embedding_length": 1024, "block_count": 28, "attention__head_count": 16,
    "attention__head_count_kv": 8, "feed_forward_length": 3072, "vocab_size": 151_936,
}  # fmt: skip


def test_the_longest_input_is_that_of_the_kind_or_of_the_setting_and_halved_until_it_fits():
    made = model("qwen3", pooling_type=3, **DIMENSIONS)
    roomy = place_embeddings(made, Settings(), 16 * GIB)
    assert roomy.n_kv_cells == 8192
    assert place_embeddings(made, Settings(kv_cells=1000), 16 * GIB).n_kv_cells == 1000
    assert place_embeddings(model("bert", **(DIMENSIONS | {"context_length": 514})), Settings(), GIB).n_kv_cells == 514
    tight = place_embeddings(made, Settings(), roomy.needed_bytes)
    assert tight.n_kv_cells < 8192
    assert tight.needed_bytes <= roomy.needed_bytes * 0.8
    with pytest.raises(CannotFit, match="some:model"):
        place_embeddings(made, Settings(), GIB // 8)


def test_a_refusal_has_both_numbers_and_a_way_out():
    with pytest.raises(CannotFit) as caught:
        place_embeddings(model("qwen3", pooling_type=3, **DIMENSIONS), Settings(), GIB // 8)
    assert says(caught.value.message, "of memory (weights ", "0.1 GB is available", "80%", "smaller model")


def test_a_refusal_names_the_largest_number_of_cells_that_fits():
    made = model("qwen3", pooling_type=3, **DIMENSIONS)
    fitting = place_embeddings(made, Settings(kv_cells=1024), 16 * GIB)
    with pytest.raises(CannotFit, match="--kv-cells 1024 would fit"):
        place_embeddings(made, Settings(), int(fitting.needed_bytes / USABLE_RAM) + 1)


@given(available_bytes=st.integers(0, 2 * GIB), n_ctx_train=st.integers(1, 200_000), kv_cells=st.integers(0, 100_000))
def test_what_is_placed_fits_and_is_within_what_the_model_was_trained_for(
    available_bytes: int, n_ctx_train: int, kv_cells: int
) -> None:
    made = model("qwen3", pooling_type=3, **(DIMENSIONS | {"context_length": n_ctx_train}))
    try:
        placement = place_embeddings(made, Settings(kv_cells=kv_cells), available_bytes)
    except CannotFit:
        return
    assert placement.needed_bytes <= available_bytes * USABLE_RAM
    assert min(n_ctx_train, kv_cells or 256, 256) <= placement.n_kv_cells <= n_ctx_train
