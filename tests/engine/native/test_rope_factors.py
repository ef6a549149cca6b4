"""LongRoPE in llama.cpp: a context for long sequences embeds positions in another way than one for short ones. So all
sequences are in contexts of one length, and nothing that was computed in the one way is used in the other."""

from __future__ import annotations

import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from localrun.engine.cache.tiers import DiskTier
from localrun.engine.engine import Limits
from localrun.engine.native.llama import LlamaBackend
from localrun.wire import Delta, Finish, Sampling, Submit
from tests.engine.memory_disk import MemoryDisk
from tests.engine.stepped import SteppedEngine

# Of one pool of 2048 cells, or of streams with a pool of 1024.
ORIGINAL = 1024
PROMPT = [300 + at * 7 % 200 for at in range(620)]


@pytest.fixture(params=["one file", "shards"])
def model(tiny_gguf: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The tiny model with factors for short and for long contexts; they are in the last of its files."""
    reader, out = gguf.GGUFReader(tiny_gguf), tmp_path / "long.gguf"
    n_in_shard = len(reader.tensors) if request.param == "shards" else 0
    writer = gguf.GGUFWriter(out, "llama", split_max_tensors=n_in_shard)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            sub_type = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(ORIGINAL)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    n_rot = int(reader.fields["llama.rope.dimension_count"].contents())
    for which, factor in (("short", 1.0), ("long", 4.0)):
        writer.add_tensor(f"rope_factors_{which}.weight", np.full(n_rot // 2, factor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "long-00001-of-00002.gguf" if n_in_shard else out


class Work:
    def __init__(self, model: Path, *, n_cells: int, n_slots: int = 4, disk: DiskTier | None = None) -> None:
        self.backend = LlamaBackend(
            str(model), n_cells=n_cells, n_seqs=n_slots, n_spare_seqs=4, n_batch=256, n_threads=1, n_gpu_layers=0,
            kv_type="f16",
        )  # fmt: skip
        self.engine = SteppedEngine(self.backend, Limits(n_slots, 64, 0.0, 1 << 28), time.monotonic, disk)
        self.said: list[int] = []

    def ask(self, tokens: list[int]) -> Delta:
        sampling = Sampling(temperature=0)
        self.engine.submit(Submit(id=1, sampling=sampling, n_predict=6, ignore_eos=True), list(tokens))
        self.said, final = [], None
        while not self.engine.is_idle:
            step = self.engine.step()
            for delta in step.deltas if step is not None else ():
                self.said += delta.tokens
                final = delta if delta.finish is not None else final
        assert final is not None
        assert final.finish is Finish.LENGTH, final.error_message
        return final

    def close(self) -> None:
        self.engine.close()
        self.engine.cache.tiers.flush(10.0, time.monotonic)
        self.backend.close()


def n_cached(final: Delta) -> int:
    assert final.usage is not None
    return final.usage.n_cached


def test_states_of_one_way_are_not_used_in_the_other(model: Path) -> None:
    disk = MemoryDisk()
    long, short = Work(model, n_cells=2 * ORIGINAL, disk=disk), Work(model, n_cells=ORIGINAL, disk=disk)
    assert (long.backend.state_salt, short.backend.state_salt) == (b"long factors", b"short factors")
    assert (long.backend.is_split, short.backend.is_split) == (False, True), (
        "a pool beside streams would be the other way"
    )
    for work in (long, short):
        assert n_cached(work.ask(PROMPT)) == 0
        said = work.said
        assert n_cached(work.ask(PROMPT)) > 500
        assert work.said == said
        work.close()
    for n_cells in (ORIGINAL, 2 * ORIGINAL):
        again = Work(model, n_cells=n_cells, disk=disk)
        assert n_cached(again.ask(PROMPT[:600])) >= 500
        again.close()


def test_there_are_no_streams_where_their_padding_makes_a_pool_as_long_as_that_the_other_way(model: Path) -> None:
    work = Work(model, n_cells=ORIGINAL, n_slots=3)  # three streams of 512, and a pool of 1536
    assert not work.backend.is_split
    assert work.backend.worker is None
    assert work.backend.n_cells == ORIGINAL
    assert work.backend.state_salt == b"short factors"
    work.close()
