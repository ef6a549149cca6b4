"""The cache under an engine at work, with blocks and pieces of a few tokens, so that short chats are moved in many.

The harness compares all books, and the cells with the backend's, after every step; the fake's tokens are a hash of all
that a row sees, so a row from the wrong place is another answer.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from localrun.engine.backend import MemoryKind
from localrun.engine.cache import cache, copies, tiers
from tests.engine.harness import Harness, expected_output
from tests.engine.memory_disk import MemoryDisk
from tests.fakes.backend import FakeBackend
from tests.fakes.tokens import IM_END

SHAPES: dict[str, dict[str, Any]] = {
    "one pool": {"n_cells": 400},
    "one pool, short of sequences": {"n_cells": 400, "n_seqs": 4},
    "one pool on a GPU": {"n_cells": 400, "wrap": lambda fake: on_gpu(fake)},
    "split": {"n_cells": 1200, "is_split": True},
    "split with a background": {"n_cells": 1200, "is_split": True, "n_background_seqs": 2},
    "split, and short of cells": {"n_cells": 480, "is_split": True, "n_background_seqs": 4},
    "hybrid": {"n_cells": 400, "memory_kind": MemoryKind.HYBRID},
}


def on_gpu(fake: FakeBackend) -> FakeBackend:
    fake.n_gpu_layers = 99
    return fake


@pytest.mark.parametrize("ram_cache_bytes", [0, 900, 1 << 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_chats_that_come_and_go_answer_as_if_alone(shape: str, ram_cache_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copies, "BLOCK_TOKENS", 8)
    monkeypatch.setattr(copies, "PIECE_TOKENS", 16)
    for module in (cache, copies, tiers):
        monkeypatch.setattr(module, "GAIN_TOKENS", 4)
    monkeypatch.setattr(cache, "QUICK_BYTES", 0)
    monkeypatch.setattr(copies, "RESTORE_PIECE_S", 0.0)
    random = Random(f"{shape} {ram_cache_bytes}")
    disk = MemoryDisk(limit_bytes=3000) if random.random() < 0.7 else None
    harness = Harness(**({"n_seqs": 9, "ram_cache_bytes": ram_cache_bytes, "disk": disk} | SHAPES[shape]))
    harness.engine.cache.tiers.recompute_s = lambda start, n_tokens: n_tokens * (1e-2 + start * 1e-5)
    systems = [[letter] * 30 + [IM_END] for letter in b"xyz"]
    chats = [systems[index % 3] + [97 + index, IM_END] for index in range(5)]
    asked: dict[int, tuple[int, list[int], int]] = {}
    for request_id in range(40):
        index = random.randrange(len(chats))
        if len(chats[index]) > 110:
            chats[index] = systems[index % 3] + [random.randrange(97, 123)]
        prompt = [*chats[index][: random.choice([None, None, -3])], random.randrange(97, 123)]
        asked[request_id] = index, prompt, random.randint(1, 25)
        harness.submit(request_id, prompt, n_predict=asked[request_id][2])
        for _ in range(random.randint(0, 14)):
            harness.step()
        if random.random() < 0.1:
            harness.engine.cancel(random.randrange(request_id + 1))
        if random.random() < 0.05:
            harness.engine.clear_cache(ram=random.random() < 0.5, disk=random.random() < 0.5)
            harness.check()
        if request_id % 8 == 7:
            harness.run()
        for done in [done for done in asked if done in harness.finals]:
            index, prompt, _ = asked.pop(done)
            output = harness.tokens[done]
            assert output == expected_output(prompt, len(output))
            chats[index] = [*prompt, *output, IM_END]
    harness.run()
    for done, (_, prompt, n_predict) in asked.items():
        assert harness.tokens[done] == expected_output(prompt, len(harness.tokens[done]))
        assert len(harness.tokens[done]) <= n_predict
    if ram_cache_bytes:
        assert harness.engine.cache.tiers.ram_hit_tokens > 0 or "GPU" in shape or "split" in shape
