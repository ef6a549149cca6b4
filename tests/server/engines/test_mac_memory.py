"""Macs: a GPU that computes in the machine's own memory, and whose free memory every look finds whole, whatever others
hold. Two models on machines of 8 to 64 GB."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localrun.config import LoadSettings, Settings
from localrun.errors import CannotFit
from localrun.models.fit import Fit, Gpu, Machine, choose
from localrun.models.gguf.header import Header, TensorInfo, Value
from localrun.server.engines import machine, room
from localrun.server.engines.placement import wish_of
from localrun.server.engines.resident import Resident, ResidentState
from localrun.server.engines.room import Room

GB = 1_000_000_000
SYSTEM_BYTES = 3 * GB


def header(n_layers: int, n_embd: int, layer_bytes: int) -> Header:
    metadata: dict[str, Value] = {
        "llama.context_length": 32_768, "llama.block_count": n_layers, "llama.embedding_length": n_embd,
        "llama.feed_forward_length": n_embd * 7 // 2, "llama.attention.head_count": n_embd // 128,
        "llama.attention.head_count_kv": 8, "llama.vocab_size": 32_000,
    }  # fmt: skip
    tensors = [TensorInfo(f"blk.{layer}.ffn_up.weight", (n_embd,), "Q4_0", 0, layer_bytes) for layer in range(n_layers)]
    tensors += [TensorInfo(name, (n_embd, 32_000), "Q4_0", 0, n_embd * 18_000) for name in ("token_embd.weight",)]
    return Header(
        path=Path("m.gguf"), size_bytes=0, version=3, architecture="llama", metadata=metadata, tensors=tuple(tensors),
        data_offset=0,
    )  # fmt: skip


LARGE, SMALL = header(40, 5120, 175_000_000), header(32, 4096, 130_000_000)  # 13B and 8B in four bits


class Mac:
    """What is asked of the system, and the models that are loaded; each engine holds what it was promised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        # recommendedMaxWorkingSetSize
        self.gpu_bytes = total_bytes * 2 // 3 if total_bytes <= 36 * GB else total_bytes * 3 // 4
        self.gpu = Gpu("Apple M2", self.gpu_bytes, True, self.gpu_bytes)
        self.residents: list[Resident] = []
        self.ended: list[str] = []
        self.room = Room(
            Settings(load_timeout_s=0.01), residents=lambda: self.residents, end=self._end, gpus=self._gpus,
            available_bytes=lambda: self.total_bytes - SYSTEM_BYTES - self.needed_bytes(),
        )  # fmt: skip
        monkeypatch.setattr(room, "sys", SimpleNamespace(platform="darwin"))
        monkeypatch.setattr(machine, "private_bytes", lambda pid: self.residents[pid].needed_bytes)

    def needed_bytes(self) -> int:
        return sum(each.needed_bytes for each in self.residents)

    async def _gpus(self) -> tuple[Gpu, ...]:
        return (self.gpu,)

    async def _end(self, resident: Resident) -> None:
        self.residents.remove(resident)
        self.ended.append(resident.model.name)

    async def load(self, name: str, header: Header, *, is_busy: bool = False, **settings: Any) -> Resident:
        model: Any = SimpleNamespace(
            name=name, full_name=f"{name}:latest", header=header, adapter_bytes=0, projector=None,
            projector_header=None,
        )  # fmt: skip
        link: Any = SimpleNamespace(pid=None)
        resident = Resident(
            key=Path(name), model=model, stamps=None, link=link, asked=LoadSettings(), load=LoadSettings(),  # type: ignore[arg-type]
            settings=Settings(**settings), n_waiting=1,
        )  # fmt: skip
        await self.room.make(resident)
        self.residents.append(resident)
        for pid, each in enumerate(self.residents):
            each.link = SimpleNamespace(pid=pid, is_preparing=False, n_requests=0, stats=None)  # type: ignore[assignment]
        resident.state = ResidentState.READY
        resident.n_waiting, resident.n_leases = 0, int(is_busy)
        return resident

    def shown(self, name: str, header: Header, **settings: Any) -> Fit:
        """What `localrun show NAME --fit` says."""
        here, _ = self.room.for_model(name, (self.gpu,))
        return choose(header, here, wish_of(Settings(**settings)))

    def check(self) -> None:
        """Nobody was promised what is not there."""
        assert self.needed_bytes() <= self.total_bytes - SYSTEM_BYTES
        assert sum(each.shared_bytes for each in self.residents) <= self.gpu_bytes


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Mac]:
    return lambda gigabytes: Mac(monkeypatch, gigabytes * GB)


def is_as_shown(resident: Resident, fit: Fit) -> bool:
    placed = resident.placement
    assert placed is not None
    shown = (fit.n_gpu_layers, fit.n_kv_cells, fit.kv_type, fit.n_slots, sum(use.total_bytes for use in fit.devices))
    told = (placed.n_gpu_layers, placed.n_kv_cells, placed.kv_type, placed.n_slots, placed.needed_bytes)
    return shown == told


@pytest.mark.parametrize(("gigabytes", "stay"), [(16, ["small"]), (32, ["small"]), (64, ["large", "small"])])
async def test_a_second_model_goes_beside_the_first_or_in_its_place(
    mac: Callable[[int], Mac], gigabytes: int, stay: list[str]
) -> None:
    one = mac(gigabytes)
    shown = one.shown("large", LARGE)
    large = await one.load("large", LARGE)
    assert is_as_shown(large, shown)
    one.check()
    assert is_as_shown(large, one.shown("large", LARGE)), "its own memory is no obstacle to itself"
    shown = one.shown("small", SMALL)
    small = await one.load("small", SMALL)
    assert is_as_shown(small, shown)
    assert [each.model.name for each in one.residents] == stay
    one.check()
    # What people see of it while it loads, of all models together no more than there is.
    small.state = ResidentState.LOADING
    row = small.row(0.05)
    assert row.size_bytes == sum(use.total_bytes for use in shown.devices)


async def test_eight_gigabytes_are_too_few_for_the_large_one(mac: Callable[[int], Mac]) -> None:
    one = mac(8)
    assert not one.shown("large", LARGE).fits
    with pytest.raises(CannotFit, match=r"5\.0 GB is available, of which 80% may be used, at most 5\.3 GB on Apple M2"):
        await one.load("large", LARGE)
    assert not one.shown("small", SMALL).fits
    tiny = header(16, 2048, 40_000_000)
    shown = one.shown("tiny", tiny)
    assert is_as_shown(await one.load("tiny", tiny), shown)
    assert shown.n_gpu_layers == 17
    one.check()


@pytest.mark.parametrize("gigabytes", [16, 32, 64])
async def test_a_busy_model_keeps_its_memory(mac: Callable[[int], Mac], gigabytes: int) -> None:
    one = mac(gigabytes)
    large = await one.load("large", LARGE, is_busy=True)
    shown = one.shown("small", SMALL)
    try:
        small = await one.load("small", SMALL)
    except CannotFit:
        assert not shown.fits
    else:
        assert is_as_shown(small, shown)
    assert large in one.residents
    assert not one.ended
    one.check()


def test_what_lies_on_a_shared_gpu_comes_out_of_the_same_memory() -> None:
    """Half of the machine is free: it does not help that the GPU says it has twice that."""
    gpu = Gpu("Apple M2", 24 * GB, True, 24 * GB)
    wish = wish_of(Settings())
    tight = choose(LARGE, Machine(12 * GB, (gpu,)), wish)
    roomy = choose(LARGE, Machine(12 * GB, (gpu._replace(is_shared=False),)), wish)
    needed, too_much = (sum(use.total_bytes for use in fit.devices) for fit in (tight, roomy))
    assert needed <= 12 * GB * 0.8 < too_much
    assert any("Apple M2 computes in the machine's own memory" in note for note in tight.notes)
