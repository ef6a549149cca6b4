"""Adapters in llama.cpp: each set gives the logits of a bare context with that set alone. What does not fit is refused
by name, and the process goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from localrun.engine.backend import BASE, AdapterSet, Batch
from localrun.engine.native.llama import LlamaBackend
from localrun.errors import BadModelFile
from localrun.wire import Adapter
from tests.engine.conftest import compute, open_tiny
from tests.engine.native.bare import bare
from tests.lora_file import write_lora, write_vector

PROMPT = list(range(300, 320))


def named(path: Path, scale: float = 1.0) -> Adapter:
    return Adapter(str(path), hashlib.sha256(path.read_bytes()).digest(), scale)


@pytest.fixture(scope="module")
def files(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "a": write_lora(tiny_gguf, folder / "a.gguf", seed=1),
        "b": write_lora(tiny_gguf, folder / "b.gguf", seed=2),
        "v": write_vector(tiny_gguf, folder / "v.gguf", seed=3),
        "w": write_vector(tiny_gguf, folder / "w.gguf", seed=4),
    }


SETS: tuple[dict[str, float], ...] = (
    {}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"a": -1}, {"a": 0.25}, {"v": 1}, {"v": -2}, {"v": 1, "w": 0.5},
    {"a": 1, "v": 1}, {"w": 1},
)  # fmt: skip


def set_of(files: dict[str, Path], which: dict[str, float]) -> AdapterSet:
    return AdapterSet.of(named(files[name], scale) for name, scale in which.items())


def loaded(backend: LlamaBackend, adapters: AdapterSet) -> AdapterSet:
    for adapter in adapters.adapters:
        backend.load_adapter(adapter)
    return adapters


def logits_with(backend: LlamaBackend, adapters: AdapterSet, seq: int = 0) -> np.ndarray:
    backend.seq_remove(seq, 0)
    backend.use(adapters)
    backend.batch.adapter_hash = adapters.hash
    return compute(backend, seq, PROMPT)


@pytest.fixture(scope="module")
def split(tiny_gguf: Path) -> Iterator[LlamaBackend]:
    backend = open_tiny(tiny_gguf, n_seqs=2, may_split=True)
    yield backend
    backend.close()


def test_every_set_gives_the_logits_of_a_context_with_that_set_alone(
    tiny_gguf: Path, files: dict[str, Path], split: LlamaBackend
) -> None:
    expected = []
    for which in SETS:
        with bare(tiny_gguf, [(files[name], scale) for name, scale in which.items()]) as alone:
            expected.append(alone.logits(PROMPT)[-1])
    for number, one in enumerate(expected):
        assert all(np.abs(one - other).max() > 0.1 for other in expected[:number]), "a mix-up could hide"
    order = [*range(len(SETS)), *reversed(range(len(SETS))), 0, 6, 0, 1, 9, 1, 8, 10]
    for number in order:
        found = logits_with(split, loaded(split, set_of(files, SETS[number])))
        assert np.allclose(found, expected[number], atol=2e-2), SETS[number]


def test_the_background_has_a_set_of_its_own(files: dict[str, Path], split: LlamaBackend) -> None:
    one, other = loaded(split, set_of(files, {"a": 1})), loaded(split, set_of(files, {"b": 1, "v": 1}))
    assert split.worker is not None
    worker, seq = split.worker, split.n_seqs
    expected = logits_with(split, other)
    split.use(one)
    worker.use(other)
    batch: Batch = worker.batch
    n_rows = len(PROMPT) - 1
    batch.token[:n_rows], batch.pos[:n_rows], batch.seq[:n_rows] = PROMPT[:-1], range(n_rows), seq - batch.first_seq
    batch.wants_logits[:n_rows] = 0
    batch.adapter_hash = one.hash
    with pytest.raises(ValueError, match="other adapters"):
        worker.start(n_rows)
    batch.seq[:n_rows], batch.adapter_hash = seq - batch.first_seq, other.hash
    worker.start(n_rows)
    assert not split.leave_adapter(named(files["b"]).digest), "it computes with it"
    worker.finish()
    split.seq_remove(0, 0)
    assert split.seq_copy(seq, 0)
    split.seq_remove(seq, 0)
    split.use(other)
    split.batch.adapter_hash = other.hash
    assert np.allclose(compute(split, 0, PROMPT[-1:], start=n_rows), expected, atol=2e-2)


def test_rows_for_other_adapters_are_refused(files: dict[str, Path], split: LlamaBackend) -> None:
    adapters = loaded(split, set_of(files, {"a": 1}))
    split.use(adapters)
    split.batch.adapter_hash = b""
    split.seq_remove(0, 0)
    with pytest.raises(ValueError, match="other adapters"):
        compute(split, 0, PROMPT)
    with pytest.raises(ValueError, match="not loaded"):
        split.use(AdapterSet.of([Adapter("/nowhere", b"?" * 32)]))
    split.batch.adapter_hash = adapters.hash
    compute(split, 0, PROMPT)


def test_a_freed_adapter_leaves_nothing_behind(tiny_gguf: Path, files: dict[str, Path]) -> None:
    backend = open_tiny(tiny_gguf, n_seqs=2, may_split=True)
    plain = logits_with(backend, BASE)
    for name in ("a", "v", "b", "a", "w"):
        adapters = loaded(backend, set_of(files, {name: 1}))
        assert not np.allclose(logits_with(backend, adapters), plain, atol=0.1)
        (digest,) = (adapter.digest for adapter in adapters.adapters)
        assert backend.leave_adapter(digest)
        backend.free_adapter(digest)
        with pytest.raises(ValueError, match="not loaded"):
            backend.use(adapters)
        assert np.allclose(logits_with(backend, BASE), plain, atol=1e-5)
    adapters = loaded(backend, set_of(files, {"a": 1}))
    backend.rebuild()
    assert not np.allclose(logits_with(backend, adapters), plain, atol=0.1)
    backend.close()


def written(
    out: Path, tensors: dict[str, np.ndarray], architecture: str = "controlvector",
    add: Callable[[gguf.GGUFWriter], None] = lambda to: None, **texts: str,
) -> Path:  # fmt: skip
    writer = gguf.GGUFWriter(out, architecture)
    for key, value in texts.items():
        writer.add_string(key.replace("__", "."), value)
    add(writer)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


LORA = {"general__type": "adapter", "adapter__type": "lora"}
Q = "blk.0.attn_q.weight"


def f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


BAD_LORAS: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "no tensors": ({}, "changes nothing"),
    "half": ({f"{Q}.lora_a": f32(4, 256)}, "only half"),
    "unknown": ({"blk.9.attn_q.weight.lora_a": f32(4, 256), "blk.9.attn_q.weight.lora_b": f32(256, 4)}, "blk.9"),
    "suffix": ({f"{Q}.lora_c": f32(4, 256)}, "no part of a LoRA"),
    "shape": ({f"{Q}.lora_a": f32(4, 255), f"{Q}.lora_b": f32(256, 4)}, "blk.0.attn_q"),
    "rank": ({f"{Q}.lora_a": f32(4, 256), f"{Q}.lora_b": f32(256, 3)}, "two halves"),
    "experts": ({f"{Q}.lora_a": f32(2, 4, 256), f"{Q}.lora_b": f32(2, 256, 4)}, "blk.0.attn_q"),
    "embeddings": (
        {"token_embd.weight.lora_a": f32(1024, 4), "token_embd.weight.lora_b": f32(256, 4)}, "token_embd",
    ),
    "infinity": (
        {f"{Q}.lora_a": f32(4, 256), f"{Q}.lora_b": np.inf * f32(256, 4)}, rf"NaN .*in '{Q}.lora_b'",
    ),
    "integers": (
        {f"{Q}.lora_a": np.ones((4, 256), np.int32), f"{Q}.lora_b": np.ones((256, 4), np.int32)}, "in I32",
    ),
}  # fmt: skip
BAD_VECTORS: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "no directions": ({}, "without vectors"),
    "name": ({"vector.1": f32(256)}, "direction.1, direction.2"),
    "layer 0": ({"direction.0": f32(256)}, "direction.1, direction.2"),
    "layer": ({"direction.4": f32(256)}, "layer 4"),
    "size": ({"direction.1": f32(128)}, "128 numbers"),
    "two dimensions": ({"direction.1": f32(2, 256)}, "no vector of 32-bit"),
    "type": ({"direction.1": np.ones(256, np.float16)}, "no vector of 32-bit"),
    "nan": ({"direction.1": np.full(256, np.nan, np.float32)}, "NaN .*in 'direction.1'"),
}


@pytest.mark.parametrize("case", BAD_LORAS)
def test_a_lora_that_does_not_fit_is_refused(case: str, tmp_path: Path, split: LlamaBackend) -> None:
    data, reason = BAD_LORAS[case]
    bad = written(tmp_path / "bad.gguf", data, "llama", **LORA)
    with pytest.raises(BadModelFile, match=rf"bad\.gguf .*{reason}"):
        split.load_adapter(named(bad))


@pytest.mark.parametrize("case", BAD_VECTORS)
def test_a_control_vector_that_does_not_fit_is_refused(case: str, tmp_path: Path, split: LlamaBackend) -> None:
    data, reason = BAD_VECTORS[case]
    bad = written(tmp_path / "bad.gguf", data)
    with pytest.raises(BadModelFile, match=rf"bad\.gguf .*{reason}"):
        split.load_adapter(named(bad))


def test_files_that_are_no_adapters_for_this_model_are_refused(
    tiny_gguf: Path, files: dict[str, Path], tmp_path: Path, split: LlamaBackend
) -> None:
    whole = files["a"].read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.gguf").write_text("no GGUF at all")
    pair = {f"{Q}.lora_a": f32(4, 256), f"{Q}.lora_b": f32(256, 4)}
    written(tmp_path / "alpha.gguf", pair, "llama", lambda to: to.add_float64("adapter.lora.alpha", 1.0), **LORA)
    written(
        tmp_path / "active.gguf", pair, "llama",
        lambda to: to.add_array("adapter.alora.invocation_tokens", [1, 2, 3]), **LORA,
    )  # fmt: skip
    write_lora(tiny_gguf, tmp_path / "other.gguf", architecture="qwen2")
    written(tmp_path / "hint.gguf", {"direction.1": f32(256)}, controlvector__model_hint="gemma3")
    written(tmp_path / "kind.gguf", {}, "llama", general__type="adapter", adapter__type="prompt")
    for name, reason in {
        "short": "truncated", "text": "not a GGUF file", "alpha": "adapter.lora.alpha", "active": "aLoRA",
        "other": "for qwen2, and the model is llama", "hint": "for gemma3", "kind": "only LoRA is",
    }.items():  # fmt: skip
        with pytest.raises(BadModelFile, match=rf"{name}\.gguf.*{reason}"):
            split.load_adapter(named(tmp_path / f"{name}.gguf"))
    with pytest.raises(BadModelFile, match="no adapter but a model"):
        split.load_adapter(named(tiny_gguf))
    with pytest.raises(BadModelFile, match="nowhere"):
        split.load_adapter(Adapter("/nowhere.gguf", b"?" * 32))


@pytest.mark.parametrize("write", [write_lora, write_vector])
def test_a_file_that_was_replaced_since_it_was_named_is_refused(
    write: Callable[..., Path], tiny_gguf: Path, tmp_path: Path, split: LlamaBackend
) -> None:
    path = write(tiny_gguf, tmp_path / "x.gguf", seed=21)
    before = named(path)
    write(tiny_gguf, path, seed=22)
    with pytest.raises(BadModelFile, match=r"x\.gguf was replaced"):
        split.load_adapter(before)
    split.load_adapter(named(path))
