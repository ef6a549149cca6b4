"""Synthesized files are whole GGUF files that llama.cpp loads, tokenizes with and decodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.models.gguf.reader import read_header
from localrun.models.memory import MAX_SEQUENCES, SPARE_SEQUENCES, estimate
from tests.support.synthesis.synthesize import synthesize
from tests.support.synthesis.tensor_plan import SHAPES, TYPES, plan_tensors

PROBE = Path(__file__).parents[2] / "models/llama_probe.py"
CHAT = "<|im_start|>user\nTell me about the moon and the sea.<|im_end|>\n<|im_start|>assistant\n"
TEXTS = (CHAT, "  two spaces,\n\ttabs, it's 1984; and 12.5 %", "größe ☃ 日本語 😀", "The quick brown fox")
KINDS = ("tiny-gemma3", "tiny-mamba", "tiny-qwen35", "tiny-lfm2")
KV_NUMBERS = {"f16": 1, "q8_0": 8, "q4_0": 2}


class Probe:
    """llama.cpp in a process of its own, which is started once."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(
        self, path: Path, *, n_ctx: int = 512, n_slots: int = 8, n_ubatch: int = 512, kv_type: str = "f16"
    ) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps([str(path), n_ctx, n_slots, n_ubatch, KV_NUMBERS[kv_type], TEXTS]),
            file=self._process.stdin,
            flush=True,
        )
        said = self._process.stdout.readline()
        assert said, f"it ended; {path.name}"
        return json.loads(said)


@pytest.fixture(scope="module")
def probe() -> Iterator[Probe]:
    with subprocess.Popen(
        [sys.executable, str(PROBE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Probe(process)


def check_in_llama(probe: Probe, shape: str, file_type: str, path: Path) -> None:
    synthesize(shape, file_type, path)
    header = read_header(path)
    seen = probe(path)
    assert seen["n_vocab"] == header.n_vocab == SHAPES[shape].n_vocab
    assert seen["n_ctx_train"] == header.n_ctx_train == SHAPES[shape].n_ctx_train
    assert seen["n_params"] == header.n_params
    assert seen["size_bytes"] == header.weights_bytes
    assert seen["texts"] == list(TEXTS)
    control = header.control_tokens()
    assert control == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert seen["tokens"][0][0] == 1
    assert seen["tokens"][0].count(2) == 1
    assert not {0, 1, 2} & set(seen["plain_tokens"][0])
    assert seen["eos"] == 2
    assert seen["ends"] == [0, 2]
    assert seen["finite"]
    assert 0.5 < seen["logits_std"] < 2
    assert all(0 <= token < seen["n_vocab"] for token in seen["generated"])
    assert len(set(seen["generated"])) > 1, "random weights repeat themselves, but not one token alone"


@pytest.mark.parametrize("file_type", TYPES)
def test_the_tiny_shape_runs_in_llama(probe: Probe, file_type: str, tmp_path: Path) -> None:
    check_in_llama(probe, "tiny", file_type, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("shape", "file_type"), zip((*KINDS, "tiny-qwen35-nextn"), ("Q4_K", "Q4_0", "Q4_K", "Q8_0", "Q4_0"), strict=True)
)
def test_a_shape_of_every_memory_kind_runs_in_llama(probe: Probe, shape: str, file_type: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    check_in_llama(probe, shape, file_type, path)
    assert path.stat().st_size < 10e6


@pytest.mark.slow
@pytest.mark.parametrize(
    "file_type", ["Q4_K", *(pytest.param(each, marks=pytest.mark.deep) for each in TYPES if each != "Q4_K")]
)
def test_the_135m_shape_runs_in_llama(probe: Probe, file_type: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    check_in_llama(probe, "135m", file_type, path)
    path.unlink()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_a_large_shape_is_written_in_little_memory(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.support.synthesis.synthesize import synthesize;"
        "synthesize('0.5b', 'Q4_0', Path(sys.argv[1]));"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    path = tmp_path / "large.gguf"
    run = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    size_bytes = path.stat().st_size
    header = read_header(path)
    path.unlink()
    assert header.size_bytes == size_bytes > 300e6
    assert int(run.stdout) * 1024 < size_bytes / 2


def test_the_same_arguments_give_the_same_file(tmp_path: Path, tiny_gguf: Path) -> None:
    again, other = tmp_path / "again.gguf", tmp_path / "other.gguf"
    synthesize("tiny", "Q4_0", again)
    synthesize("tiny", "Q4_0", other, seed=1)
    assert again.read_bytes() == tiny_gguf.read_bytes() != other.read_bytes()


def test_quantization_labels(tmp_path: Path) -> None:
    labels = {}
    for file_type in TYPES:
        synthesize("tiny", file_type, tmp_path / "model.gguf")
        labels[file_type] = read_header(tmp_path / "model.gguf").quantization
    assert labels == {"Q4_0": "Q4_0", "Q4_K": "Q4_K_M", "Q8_0": "Q8_0", "F16": "F16"}


def test_parameter_counts_are_those_of_the_real_models() -> None:
    counts = {}
    for name, shape in SHAPES.items():
        plans = plan_tensors(shape, "F16")
        counts[name] = sum(plan.shape[0] * plan.n_rows for plan in plans)
    assert counts["135m"] == 134_515_008
    assert counts["1b"] == 1_235_814_400
    assert counts["8b"] == 8_030_261_248


def test_rows_that_are_no_multiple_of_256_fall_back_from_k_quants() -> None:
    types = {plan.name: plan.type.name for plan in plan_tensors(SHAPES["135m"], "Q4_K")}
    assert types["token_embd.weight"] == "Q8_0"
    assert types["blk.0.attn_q.weight"] == "Q5_0"
    assert types["blk.0.ffn_down.weight"] == "Q6_K"
    assert types["blk.4.ffn_down.weight"] == "Q4_K"
    assert set({plan.type.name for plan in plan_tensors(SHAPES["8b"], "Q4_K")}) == {"F32", "Q4_K", "Q6_K"}


def test_unknown_shapes_and_types_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="tiny, tiny-gemma3"):
        synthesize("7b", "Q4_0", tmp_path / "model.gguf")
    with pytest.raises(BadRequest, match="Q4_0, Q4_K, Q8_0, F16"):
        synthesize("tiny", "q4_0", tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tests.support.synthesis.synthesize.BlockPool", fail)
    with pytest.raises(OSError, match="No space left"):
        synthesize("tiny", "Q4_0", path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
    assert path.read_bytes() == b"old"


def check_estimate(
    probe: Probe, path: Path, *, n_ctx: int, n_ubatch: int, kv_type: str, is_whole: bool = False
) -> None:
    """llama.cpp reserves what the estimate says: the cache exactly, the rest never more and at most a tenth less.

    Without shared prefixes (`is_whole`) the engine has a sequence per slot, and windows or states for each.
    """
    n_slots = 8 if is_whole else 1  # several slots could have streams of cells instead of one pool
    header = read_header(path)
    needed = estimate(header, n_kv_cells=n_ctx, n_slots=n_slots, n_ubatch=n_ubatch, kv_type=kv_type)
    n_sequences = n_slots if is_whole else min(n_slots + SPARE_SEQUENCES, MAX_SEQUENCES)
    seen = probe(path, n_ctx=n_ctx, n_slots=n_sequences, n_ubatch=n_ubatch, kv_type=kv_type)
    mib = 1024 * 1024
    assert needed.kv_bytes == pytest.approx((seen["kv_mib"] + seen["state_mib"]) * mib, abs=0.02 * mib)
    compute_mib = seen["compute_mib"] + seen["output_mib"]
    least = 0.8 if is_whole else 0.9
    assert least * needed.compute_bytes / mib <= compute_mib <= needed.compute_bytes / mib + 0.1


@pytest.mark.parametrize(("n_ctx", "n_ubatch", "kv_type"), [(4096, 512, "f16"), (16384, 256, "q8_0")])
def test_the_memory_estimate_is_what_llama_reserves(
    probe: Probe, n_ctx: int, n_ubatch: int, kv_type: str, tiny_gguf: Path
) -> None:
    check_estimate(probe, tiny_gguf, n_ctx=n_ctx, n_ubatch=n_ubatch, kv_type=kv_type)


@pytest.mark.parametrize("shape", KINDS)
@pytest.mark.parametrize(("n_ctx", "n_ubatch", "kv_type"), [(4096, 512, "f16"), (16384, 256, "q8_0")])
def test_the_memory_estimate_is_what_llama_reserves_for_every_kind(
    probe: Probe, shape: str, n_ctx: int, n_ubatch: int, kv_type: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    synthesize(shape, "Q4_0", path)
    check_estimate(probe, path, n_ctx=n_ctx, n_ubatch=n_ubatch, kv_type=kv_type, is_whole=True)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["135m", pytest.param("0.5b", marks=pytest.mark.deep)])
def test_the_memory_estimate_holds_at_real_shapes(probe: Probe, shape: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    synthesize(shape, "Q4_0", path)
    for kv_type in KV_NUMBERS:
        check_estimate(probe, path, n_ctx=8192, n_ubatch=512, kv_type=kv_type)
    path.unlink()
