"""Adapters of requests: one engine for all of them, what it is told, and room for them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from localrun import wire
from localrun.errors import BadRequest, CannotFit, NotFound
from localrun.models import creation, naming
from localrun.models.adapters import Wanted
from localrun.models.creation import Changes
from localrun.models.name import MAX_ADAPTERS
from localrun.models.storage.store import Store
from localrun.server.engines.link import EngineLink
from localrun.server.engines.resident import Use
from localrun.server.jobs.job import Ask
from tests.lora_file import write_lora
from tests.server.waiting import error_of

Told = list[wire.Open | wire.Submit]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """What engines were told."""
    seen: Told = []
    opening, submitting = EngineLink.open, EngineLink.submit

    async def opened(self: EngineLink, message: wire.Open, timeout_s: float) -> None:
        seen.append(message)
        await opening(self, message, timeout_s)

    def submitted(self: EngineLink, message: Any, job: Any) -> None:
        seen.append(message)
        submitting(self, message, job)

    monkeypatch.setattr(EngineLink, "open", opened)
    monkeypatch.setattr(EngineLink, "submit", submitted)
    return seen


def add(folder: Path, name: str, seed: int = 0) -> Path:
    return write_lora(folder / "alpha.gguf", folder / f"{name}.gguf", seed=seed)


def on_wire(path: Path, scale: float = 1.0) -> wire.Adapter:
    return wire.Adapter(str(path), hashlib.sha256(path.read_bytes()).digest(), scale)


async def test_all_adapters_of_a_model_share_its_engine(
    running: Any, generate: Any, told: Told, models_dir: Path
) -> None:
    a, b = add(models_dir, "a", 1), add(models_dir, "b", 2)
    async with running() as runtime:
        for name in ("alpha+a", "alpha", "alpha:latest+b=-0.5+a=2", "alpha+a=0"):
            await generate(runtime, name, n_predict=2)
        lora = (Wanted("b", 0.25, "lora[0]"), Wanted("a", 3.0, "lora[1]"))
        await generate(runtime, "alpha+a", n_predict=2, lora=lora)
        assert [row.model for row in runtime.supervisor.loaded()] == ["alpha"]
        async with runtime.job(Ask(model="alpha+a+b=0.5", api="/test", lora=lora[1:])) as job:
            assert (job.model.name, job.record.row(0.0).model) == ("alpha", "alpha")
            assert job.record.row(0.0).adapters == ["a=3", "b=0.5"]
    opened, *submitted = told
    assert isinstance(opened, wire.Open)
    assert opened.adapters == ()
    assert [message.adapters for message in submitted] == [
        (on_wire(a),), None, (on_wire(b, -0.5), on_wire(a, 2.0)), (), (on_wire(a, 3.0), on_wire(b, 0.25)),
    ]  # fmt: skip


async def test_a_model_s_own_adapters_stay_in_effect(running: Any, generate: Any, told: Told, models_dir: Path) -> None:
    a, b = add(models_dir, "a", 1), add(models_dir, "b", 2)
    store = Store(models_dir)
    base = creation.base_of(store, "alpha", None)
    own = creation.adapter(store, base, "a", None)
    naming.point(store, "tuned", creation.assemble(base, Changes(adapters=(own,)), now=datetime.now(UTC)))
    async with running() as runtime:
        for name in ("tuned", "tuned+b", "alpha+a"):
            await generate(runtime, name, n_predict=2)
        # What is a model's own is opened with it; what is asked for is not.
        assert [row.model for row in runtime.supervisor.loaded()] == ["tuned", "alpha"]
    assert [message.adapters for message in told if isinstance(message, wire.Submit)] == [
        None, (on_wire(a), on_wire(b)), (on_wire(a),),
    ]  # fmt: skip


async def test_a_replaced_adapter_of_its_own_is_loaded_anew_when_idle(
    running: Any, generate: Any, told: Told, models_dir: Path
) -> None:
    add(models_dir, "a", 1)
    store = Store(models_dir)
    base = creation.base_of(store, "alpha", None)
    own = creation.adapter(store, base, "a", None)
    naming.point(store, "tuned", creation.assemble(base, Changes(adapters=(own,)), now=datetime.now(UTC)))
    async with running() as runtime:
        for seed in (2, 3):
            await generate(runtime, "tuned", n_predict=2)
            now = on_wire(add(models_dir, "a", seed))
            await generate(runtime, "tuned", n_predict=2)
            last = [message for message in told if isinstance(message, wire.Open)][-1]
            assert last.adapters == (now,)


async def test_what_cannot_be_met_loads_nothing(running: Any, generate: Any, models_dir: Path) -> None:
    add(models_dir, "a")
    write_lora(models_dir / "alpha.gguf", models_dir / "other.gguf", architecture="gemma")
    async with running() as runtime:
        for name, lora, kind, field in (
            ("alpha+nothing", (), NotFound, "model"),
            ("alpha+other", (), BadRequest, "model"),
            ("alpha", (Wanted(7, 1.0, "lora[0]"),), NotFound, "lora[0]"),
        ):
            refused = await error_of(generate(runtime, name, lora=lora))
            assert isinstance(refused, kind)
            assert refused.field == field
        embedding = await error_of(generate(runtime, "alpha+a", use=Use.EMBED))
        assert isinstance(embedding, BadRequest)
        assert "generate text" in embedding.message
        assert runtime.supervisor.loaded() == []


async def test_adapters_take_room_once(
    running: Any, generate: Any, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [add(models_dir, f"a{number}", number) for number in range(MAX_ADAPTERS + 2)]
    size_bytes = files[0].stat().st_size
    async with running() as runtime:
        await generate(runtime, "alpha", n_predict=2)
        (resident,) = runtime.supervisor.residents()
        alone = resident.needed_bytes
        for _ in range(2):
            await generate(runtime, "alpha+a0+a1", n_predict=2)
            assert resident.needed_bytes == alone + 2 * size_bytes
        for number in range(MAX_ADAPTERS + 2):
            await generate(runtime, f"alpha+a{number}", n_predict=2)
        assert list(resident.extra_adapters) == files[2:]
        monkeypatch.setattr(runtime.supervisor._room, "_available_bytes", lambda: 1_000)
        await generate(runtime, f"alpha+a{MAX_ADAPTERS}", n_predict=2)
        refused = await error_of(generate(runtime, "alpha+a0"))
        assert isinstance(refused, CannotFit)
        assert "the adapters need" in refused.message
        assert "beside 'alpha'" in refused.message
