from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench import bare_loop
from localrun.engine.native.llama import LlamaBackend


def test_every_round_is_a_line_with_its_rate(tiny_gguf: Path, capfdbinary: pytest.CaptureFixture[bytes]):
    arguments = ["--streams", "3", "--prompt-tokens", "5", "--output-tokens", "6", "--kv-cells", "256"]
    assert bare_loop.main([str(tiny_gguf), *arguments, "--threads", "1", "--rounds", "2"]) == 0
    rows = [msgspec.json.decode(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [row["streams"] for row in rows] == [3, 3]
    assert all(row["decode_tokens_per_s"] > 0 for row in rows)


def test_the_loop_computes_every_token_it_counts_and_leaves_the_pool_empty(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
):
    rows: list[int] = []
    decode = backend.decode

    def counting(n_rows: int) -> None:
        rows.append(n_rows)
        assert np.all(backend.batch.wants_logits[n_rows - 1])
        decode(n_rows)

    monkeypatch.setattr(backend, "decode", counting)
    for _ in range(2):
        rows.clear()
        assert bare_loop.decode_rate(backend, 4, 10, 6) > 0
        assert rows == [10] * 4 + [4] * 5
