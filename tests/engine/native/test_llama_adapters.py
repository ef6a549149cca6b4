"""LoRA adapters on a synthesized model: in effect in every context, and refused when they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from localrun.engine.cache.disk import open_disk
from localrun.engine.fake import FakeBackend
from localrun.engine.native.llama import LlamaBackend
from localrun.errors import BadModelFile
from localrun.wire import Open
from tests.engine.conftest import compute
from tests.lora_file import write_lora

PROMPT = list(range(300, 320))


def logits(model: Path, adapters: Sequence[Path], *, rebuild: bool = False) -> np.ndarray:
    backend = LlamaBackend(
        str(model), n_cells=512, n_seqs=2, n_batch=64, n_threads=1, n_gpu_layers=0, kv_type="f16",
        may_split=rebuild, adapters=[str(path) for path in adapters],
    )  # fmt: skip
    if rebuild:
        backend.rebuild(split=False)
    found = compute(backend, 0, PROMPT).copy()
    backend.close()
    return found


def test_an_adapter_changes_what_the_model_says(tiny_gguf: Path, tmp_path: Path) -> None:
    one = write_lora(tiny_gguf, tmp_path / "one.gguf", seed=1)
    two = write_lora(tiny_gguf, tmp_path / "two.gguf", seed=2)
    plain, with_one = logits(tiny_gguf, []), logits(tiny_gguf, [one])
    assert not np.allclose(plain, with_one, atol=1e-3)
    assert not np.allclose(with_one, logits(tiny_gguf, [one, two]), atol=1e-3)
    assert np.allclose(with_one, logits(tiny_gguf, [one], rebuild=True), atol=1e-2)


def test_an_adapter_for_another_model_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    other = write_lora(tiny_gguf, tmp_path / "other.gguf", architecture="qwen2")
    with pytest.raises(BadModelFile, match=r"adapter.*other\.gguf"):
        logits(tiny_gguf, [other])
    with pytest.raises(BadModelFile, match="cannot load the adapter"):
        logits(tiny_gguf, [tiny_gguf])


def test_state_on_disk_belongs_to_the_adapters_too(tiny_gguf: Path, tmp_path: Path) -> None:
    def folder(*adapters: Path) -> str:
        opened = Open(
            model_path=str(tiny_gguf), n_slots=1, n_kv_cells=256, n_batch=32, n_threads=1, n_gpu_layers=0,
            kv_type="f16", target_itl_s=0.0, ram_cache_bytes=0, max_queue=1, disk_cache_bytes=1 << 20,
            kv_folder=str(tmp_path / "kv"), adapters=tuple(str(path) for path in adapters),
        )  # fmt: skip
        before = set((tmp_path / "kv").glob("*"))
        disk = open_disk(opened, FakeBackend(n_cells=256, n_seqs=2, n_batch=32), lambda: "build")
        assert disk is not None
        disk.close()
        (new,) = set((tmp_path / "kv").glob("*")) - before
        return new.name

    one = write_lora(tiny_gguf, tmp_path / "one.gguf", seed=1)
    two = write_lora(tiny_gguf, tmp_path / "two.gguf", seed=2)
    assert len({folder(), folder(one), folder(two), folder(one, two)}) == 4
