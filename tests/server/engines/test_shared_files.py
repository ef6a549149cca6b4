"""Models of several names: one engine for the same files and adapters, each lease with the model that was asked for."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from localrun.models import creation, naming
from localrun.models.creation import Changes
from localrun.models.store import Store
from tests.lora_file import write_lora


async def test_a_copy_shares_the_engine_and_keeps_its_own_parameters(supervising: Any, models_dir: Path) -> None:
    store = Store(models_dir)
    base = creation.base_of(store, "alpha", None)
    naming.point(store, "twin", creation.assemble(base, Changes(system="Be a twin."), now=datetime.now(UTC)))
    async with supervising() as (supervisor, watch):
        alpha, twin = await supervisor.acquire("alpha", -1), await supervisor.acquire("twin", -1)
        assert alpha.link is twin.link
        assert (alpha.model.name, alpha.model.system) == ("alpha", "")
        assert (twin.model.name, twin.model.system) == ("twin", "Be a twin.")
        alpha.release()
        twin.release()
        assert watch.loaded == ["alpha"]
        assert await supervisor.unload("twin")
        assert watch.ended == ["alpha"]


async def test_other_adapters_are_another_engine(supervising: Any, models_dir: Path, tmp_path: Path) -> None:
    store = Store(models_dir)
    write_lora(models_dir / "alpha.gguf", tmp_path / "lora.gguf")
    base = creation.base_of(store, "alpha", None)
    adapter = creation.adapter(store, base, "./lora.gguf", tmp_path)
    naming.point(store, "tuned", creation.assemble(base, Changes(adapters=(adapter,)), now=datetime.now(UTC)))
    async with supervising() as (supervisor, watch):
        alpha, tuned = await supervisor.acquire("alpha", -1), await supervisor.acquire("tuned", -1)
        assert alpha.link is not tuned.link
        alpha.release()
        tuned.release()
        await supervisor.unload("tuned")
        assert watch.ended == ["tuned"]
        assert [row.model for row in supervisor.loaded()] == ["alpha"]
