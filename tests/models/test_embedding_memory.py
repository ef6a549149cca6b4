"""Memory of engines for embeddings, against what such a process really takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from localrun.models.gguf import read_header
from localrun.models.memory import MOST_TOKENS, MOST_WHOLE_TOKENS, embedding_estimate, most_embedding_tokens
from tests.models.synthesize_embedding import synthesize_embedding
from tests.models.test_pooling import header

# Prints the bytes that opening a model and computing one full step took.
PROBE = """
import sys
from localrun.engine.native.embedder import LlamaEmbedder
from localrun.wire import Pooling
import psutil
before = psutil.Process().memory_info().rss
path, pooling, n_ctx, n_rows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
made = LlamaEmbedder(path, pooling=Pooling(pooling), n_ctx=n_ctx, n_rows=n_rows, n_threads=1)
count = made.n_rows if made.can_split else made.n_ctx
made.batch.token[:count] = 5
made.batch.pos[:count] = range(count)
made.batch.seq[:count] = 0
made.batch.wants_logits[:count] = 1
made.compute(count)
print(psutil.Process().memory_info().rss - before)
"""


def test_the_longest_input_follows_the_kind_and_the_file():
    assert most_embedding_tokens(header("bert", context_length=512)) == 512
    assert most_embedding_tokens(header("modern-bert", context_length=8192)) == MOST_WHOLE_TOKENS
    assert most_embedding_tokens(header("qwen3", context_length=32_768)) == MOST_TOKENS
    assert most_embedding_tokens(header("qwen3", context_length=32_768), 16_384) == 16_384
    assert most_embedding_tokens(header("bert", context_length=512), 16_384) == 512


def test_an_encoder_has_no_kv_cache_and_a_decoder_one_for_an_input_and_a_step(tmp_path: Path):
    for kind in ("tiny-bert", "tiny-qwen3-embedding"):
        synthesize_embedding(kind, tmp_path / f"{kind}.gguf")
    encoder = embedding_estimate(read_header(tmp_path / "tiny-bert.gguf"), n_tokens=128, n_rows=512, kv_type="f16")
    decoder = embedding_estimate(
        read_header(tmp_path / "tiny-qwen3-embedding.gguf"), n_tokens=1024, n_rows=512, kv_type="f16"
    )
    assert encoder.kv_bytes == 0
    assert encoder.process_bytes > 0
    # Three layers, two heads of 16 numbers for keys and as many for values, two bytes each.
    assert decoder.kv_bytes == 3 * 2 * 16 * 2 * 2 * (1024 + 512)


@pytest.mark.parametrize(
    ("kind", "pooling", "n_tokens", "n_rows"),
    [("tiny-bert", "mean", 128, 2048), ("tiny-qwen3-embedding", "last", 2048, 2048)],
)
def test_the_estimate_is_about_what_a_full_step_takes(
    kind: str, pooling: str, n_tokens: int, n_rows: int, tmp_path: Path
):
    path = tmp_path / "model.gguf"
    synthesize_embedding(kind, path)
    arguments = [sys.executable, "-c", PROBE, str(path), pooling, str(n_tokens), str(n_rows)]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    taken = int(run.stdout.split()[-1])
    needed = embedding_estimate(read_header(path), n_tokens=n_tokens, n_rows=n_rows, kv_type="f16")
    expected = needed.total_bytes - needed.process_bytes  # the process was there before
    mib = 1024 * 1024
    # The library's own structures come on top, and pages that nobody touched do not count.
    assert taken < expected + 24 * mib
    assert expected < 2 * taken + 24 * mib
