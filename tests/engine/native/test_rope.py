"""Rope settings on a synthesized model: in effect in every context, beyond the trained one, and apart on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from localrun.engine.cache.disk import open_disk
from localrun.engine.native.context import OWN_ROPE, Rope
from localrun.engine.native.embedder import LlamaEmbedder
from localrun.engine.native.llama import LlamaBackend
from localrun.wire import Open, Pooling
from tests.engine.conftest import compute
from tests.fakes.backend import FakeBackend

PROMPT = list(range(300, 320))
SCALED = Rope(frequency_scale=0.5)
ROPES = (OWN_ROPE, Rope(frequency_base=1e6), SCALED, Rope(frequency_scale=0.25, scaling="yarn", yarn_orig_ctx=2048))


def opened(model: Path, rope: Rope, **fields: Any) -> LlamaBackend:
    said: dict[str, Any] = {"n_cells": 512, "n_seqs": 2, "n_batch": 64, "may_split": False} | fields
    return LlamaBackend(str(model), n_threads=1, n_gpu_layers=0, kv_type="f16", rope=rope, **said)


def logits(model: Path, rope: Rope, *, rebuild: bool = False) -> np.ndarray:
    backend = opened(model, rope)
    if rebuild:
        backend.rebuild()
    found = compute(backend, 0, PROMPT).copy()
    backend.close()
    return found


def test_every_rope_has_answers_of_its_own(tiny_gguf: Path) -> None:
    found = [logits(tiny_gguf, rope) for rope in ROPES]
    for at, one in enumerate(found):
        assert all(not np.allclose(one, other, atol=1e-3) for other in found[at + 1 :])


def test_what_the_file_says_itself_changes_nothing(tiny_gguf: Path) -> None:
    same = Rope(frequency_base=10_000.0, frequency_scale=1.0)
    assert np.array_equal(logits(tiny_gguf, OWN_ROPE), logits(tiny_gguf, same))


def test_a_context_that_is_opened_anew_has_the_same(tiny_gguf: Path) -> None:
    assert np.allclose(logits(tiny_gguf, SCALED), logits(tiny_gguf, SCALED, rebuild=True), atol=1e-2)


def test_no_scaling_takes_the_scale_back(tiny_gguf: Path) -> None:
    assert np.array_equal(logits(tiny_gguf, OWN_ROPE), logits(tiny_gguf, SCALED._replace(scaling="none")))


def test_one_request_has_the_context_that_was_asked_for(tiny_gguf: Path) -> None:
    trained = opened(tiny_gguf, SCALED, n_cells=8192, n_seqs=1)
    assert trained.n_ctx == trained.n_ctx_train == 4096
    trained.close()
    longer = opened(tiny_gguf, SCALED, n_cells=8192, n_seqs=1, n_ctx=6000)
    assert longer.n_ctx == 6000
    row = longer.batch
    row.token[0], row.pos[0], row.seq[0], row.wants_logits[0] = 300, 5000, 0, 1
    longer.decode(1)
    assert np.isfinite(longer.logits(0)).all()
    longer.close()


def test_vectors_depend_on_it_too(tiny_gguf: Path) -> None:
    found = []
    for rope in (OWN_ROPE, SCALED):
        embedder = LlamaEmbedder(
            str(tiny_gguf), pooling=Pooling.LAST, n_ctx=8192, n_rows=64, n_threads=1, rope=rope, n_ctx_most=5000
        )
        assert embedder.n_ctx == 5000
        batch = embedder.batch
        n_rows = len(PROMPT)
        batch.token[:n_rows], batch.pos[:n_rows], batch.seq[:n_rows] = PROMPT, range(n_rows), 0
        batch.wants_logits[:n_rows] = 1
        embedder.compute(n_rows)
        found.append(embedder.vector(0))
        embedder.close()
    assert not np.allclose(*found, atol=1e-3)


@pytest.mark.parametrize("changes", [
    *({"rope": rope} for rope in ((1e6, 0.0, "", 0), (0.0, 0.5, "", 0), (0.0, 0.0, "none", 0), (0.0, 0.0, "", 64))),
    {"kv_type": "q8_0"},
])  # fmt: skip
def test_state_on_disk_belongs_to_it_too(tiny_gguf: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    plain = Open(
        model_path=str(tiny_gguf), n_slots=1, n_kv_cells=256, n_batch=32, n_threads=1, n_gpu_layers=0, kv_type="f16",
        target_itl_s=0.0, ram_cache_bytes=0, max_queue=1, disk_cache_bytes=1 << 20, kv_folder=str(tmp_path / "kv"),
    )  # fmt: skip
    for wanted in (plain, replace(plain, **changes), replace(plain, n_ctx=512)):
        disk = open_disk(wanted, FakeBackend(n_cells=256, n_seqs=2, n_batch=32), lambda: "build")
        assert disk is not None
        disk.close()
    assert len(list((tmp_path / "kv").glob("*"))) == 2
