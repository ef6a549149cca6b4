"""What an engine takes of a device and of the host beside it is what `show --fit` says before it is loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from localrun.engine.native.library import native
from localrun.engine.native.llama import DRAFT_ROWS, LlamaBackend
from localrun.models import memory
from localrun.models.fit import FitRequest, Gpu, Machine, choose
from localrun.models.gguf.reader import read_header
from tests.support.synthesis.synthesize import write_model
from tests.support.synthesis.synthetic_tokenizer import make_vocabulary
from tests.support.synthesis.tensor_plan import SHAPES, plan_tensors

MIB = 1 << 20
N_CELLS = 2_048


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines in which llama.cpp says what it reserves."""
    lines: list[str] = []
    callback = native.llama_log_callback(lambda _level, text, _data: lines.append(text.decode(errors="replace")))
    native.llama_log_set(callback, None)
    monkeypatch.setattr(native, "llama_log_set", lambda *_: None)
    lines.append("")
    monkeypatch.setattr(pytest, "_kept_for_native_code", callback, raising=False)
    return lines


@pytest.mark.parametrize("n_slots", [1, 8])
@pytest.mark.parametrize("shape", ["tiny", "tiny-gemma3"])
def test_show_fit_knows_the_buffers_of_a_device(shape: str, n_slots: int, tmp_path: Path, reserved: list[str]) -> None:
    """With as large a vocabulary as new models have beside their width."""
    path = tmp_path / "model.gguf"
    large = replace(SHAPES[shape], n_vocab=49_152)
    write_model(path, large, list(plan_tensors(large, "Q8_0")), "Q8_0", make_vocabulary(large.n_vocab), 1)
    header = read_header(path)
    machine = Machine(64 << 30, (Gpu("card", 64 << 30),))
    fit = choose(header, machine, FitRequest(n_slots=n_slots, n_kv_cells=N_CELLS, kv_type="f16"))
    ram, card = fit.devices
    n_spare = memory.SPARE_SEQUENCES
    backend = LlamaBackend(
        str(path), n_cells=fit.n_kv_cells, n_seqs=n_slots, n_spare_seqs=n_spare, n_batch=512, n_threads=1,
        n_gpu_layers=0, kv_type="f16", may_split=False, samples_on_device=True,
    )  # fmt: skip
    backend.close()
    said = "".join(reserved)
    [compute_mib] = re.findall(r"compute buffer size =\s*([\d.]+) MiB", said)
    [output_mib] = re.findall(r"output buffer size =\s*([\d.]+) MiB", said)
    assert card.compute_bytes == pytest.approx(float(compute_mib) * MIB, rel=0.05)
    assert fit.estimate.output_bytes == pytest.approx(float(output_mib) * MIB, rel=0.05)
    assert ram.compute_bytes > fit.estimate.output_bytes, "the host has them"


def test_the_engine_has_as_many_rows_of_drafts_as_the_estimate_counts() -> None:
    assert memory.DRAFT_ROWS == DRAFT_ROWS
