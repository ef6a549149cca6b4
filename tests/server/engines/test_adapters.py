"""Adapters of requests: one engine for all of them, what it is told, and room for them."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from localrun import wire
from localrun.config import MAX_ADAPTERS, LoadSettings, ModelTable
from localrun.errors import BadModelFile, BadRequest, CannotFit, NotFound
from localrun.models import creation, naming
from localrun.models.adapters import AdapterChoice
from localrun.models.creation import Changes
from localrun.models.storage.store import Store
from localrun.server.engines.link import EngineLink
from localrun.server.engines.resident import Use
from localrun.server.jobs.job import JobRequest
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
        lora = (AdapterChoice("b", 0.25, "lora[0]"), AdapterChoice("a", 3.0, "lora[1]"))
        await generate(runtime, "alpha+a", n_predict=2, lora=lora)
        assert [row.model for row in runtime.supervisor.loaded()] == ["alpha"]
        async with runtime.job(JobRequest(model="alpha+a+b=0.5", api="/test", lora=lora[1:])) as job:
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
    own = creation.adapters(store, base, ["a"], None)[0]
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
    own = creation.adapters(store, base, ["a"], None)[0]
    naming.point(store, "tuned", creation.assemble(base, Changes(adapters=(own,)), now=datetime.now(UTC)))
    async with running() as runtime:
        for seed in (2, 3):
            await generate(runtime, "tuned", n_predict=2)
            now = on_wire(add(models_dir, "a", seed))
            await generate(runtime, "tuned", n_predict=2)
            last = [message for message in told if isinstance(message, wire.Open)][-1]
            assert last.adapters == (now,)


def tables(models_dir: Path, **adapters: list[str]) -> dict[str, Any]:
    """Settings of a file in the models folder."""
    file = models_dir / "localrun.toml"
    said = [ModelTable(name, LoadSettings(adapters=tuple(texts)), file) for name, texts in adapters.items()]
    return {"models": tuple(said)}


async def test_a_table_s_adapters_are_the_model_s_own(
    running: Any, generate: Any, told: Told, models_dir: Path
) -> None:
    a, b = add(models_dir, "a", 1), add(models_dir, "b", 2)
    naming.copy(Store(models_dir), "alpha", "weak")
    naming.copy(Store(models_dir), "alpha", "plain")
    settings = tables(models_dir, alpha=["a"], weak=["./a.gguf=0.5", f"{b}=0"], beta=[])
    async with running(max_models=0, **settings) as runtime:
        for name in ("alpha", "weak", "plain", "alpha+b", "alpha+a=0", "alpha"):
            await generate(runtime, name, n_predict=2)
        # One file, but with other adapters or other strengths it gives other answers.
        assert [row.model for row in runtime.supervisor.loaded()] == ["alpha", "weak", "plain"]
        assert runtime.supervisor.loaded()[0].load == {"adapters": ("a",)}
        alpha, weak, plain = runtime.supervisor.residents()
        size_bytes = a.stat().st_size
        assert alpha.needed_bytes == plain.needed_bytes + size_bytes + b.stat().st_size, "its own and the asked one"
        assert weak.needed_bytes == plain.needed_bytes + size_bytes
        assert await runtime.supervisor.unload("weak")
        assert len(runtime.supervisor.residents()) == 2
    assert [message.adapters for message in told if isinstance(message, wire.Open)] == [
        (on_wire(a),), (on_wire(a, 0.5),), (),
    ]  # fmt: skip
    assert [message.adapters for message in told if isinstance(message, wire.Submit)] == [
        None, None, None, (on_wire(a), on_wire(b)), (), None,
    ]  # fmt: skip


async def test_adapters_of_a_modelfile_count_over_those_of_its_table(
    running: Any, generate: Any, told: Told, models_dir: Path
) -> None:
    a, _ = add(models_dir, "a", 1), add(models_dir, "b", 2)
    store = Store(models_dir)
    base = creation.base_of(store, "alpha", None)
    own = creation.adapters(store, base, ["a"], None)[0]
    naming.point(store, "tuned", creation.assemble(base, Changes(adapters=(own,)), now=datetime.now(UTC)))
    async with running(**tables(models_dir, tuned=["b"], alpha=["a"])) as runtime:
        for name in ("tuned", "alpha"):
            await generate(runtime, name, n_predict=2)
        assert [row.model for row in runtime.supervisor.loaded()] == ["tuned"], "the same files at the same strength"
        assert runtime.supervisor.loaded()[0].load == {}
    assert [message.adapters for message in told if isinstance(message, wire.Open)] == [(on_wire(a),)]


async def test_a_name_in_a_table_that_comes_to_mean_another_file(
    running: Any, generate: Any, told: Told, models_dir: Path
) -> None:
    files = add(models_dir, "a", 1), add(models_dir, "b", 2)
    store = Store(models_dir)
    async with running(**tables(models_dir, alpha=["style"])) as runtime:
        for name in ("a", "b"):
            said = creation.named_adapter(store, name, None, licence_text=None, now=datetime.now(UTC))
            naming.point(store, "style", said)
            await generate(runtime, "alpha", n_predict=2)
    opened = [message.adapters for message in told if isinstance(message, wire.Open)]
    assert opened == [(on_wire(file),) for file in files]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nothing=2", "adapter 'nothing' not found"),
        ("beta", "'beta' is no adapter but a model"),
        ("./beta.gguf", "beta.gguf is no adapter but a model"),
        ("./nothing.gguf", "is not there"),
        ("other", "it cannot be used with 'alpha': it is for gemma"),
        ("twin", "appears twice"),
        ("nan", "NaN or infinite numbers"),
        ("a b", "the adapter's name 'a b' is neither"),
        ("../../etc/passwd.gguf", "is not there"),
    ],
)
async def test_a_wrong_entry_of_a_table_is_the_error_of_its_model_alone(
    running: Any, generate: Any, models_dir: Path, text: str, problem: str
) -> None:
    shutil.copyfile(add(models_dir, "a"), models_dir / "twin.gguf")
    write_lora(models_dir / "alpha.gguf", models_dir / "nan.gguf", strength=math.nan)
    write_lora(models_dir / "alpha.gguf", models_dir / "other.gguf", architecture="gemma")
    async with running(**tables(models_dir, alpha=["a", text])) as runtime:
        for name in ("alpha", "alpha+a"):
            refused = await error_of(generate(runtime, name, n_predict=2))
            assert isinstance(refused, BadModelFile)
            assert f"{models_dir / 'localrun.toml'}: [models.\"alpha\"]: adapters has '{text}': " in refused.message
            assert problem in refused.message
            assert "take it out of the table" in refused.message
        await generate(runtime, "beta", n_predict=2)
        assert [row.model for row in runtime.supervisor.loaded()] == ["beta"]


async def test_a_model_whose_table_became_wrong_can_be_unloaded(running: Any, generate: Any, models_dir: Path) -> None:
    a = add(models_dir, "a")
    async with running(**tables(models_dir, alpha=["a"])) as runtime:
        await generate(runtime, "alpha", n_predict=2)
        a.unlink()
        assert isinstance(await error_of(generate(runtime, "alpha", n_predict=2)), BadModelFile)
        assert await runtime.supervisor.unload("alpha")
        assert isinstance(await error_of(runtime.supervisor.unload("alpha")), BadModelFile)


async def test_refusals_of_what_a_table_says_name_it(running: Any, generate: Any, models_dir: Path) -> None:
    file = models_dir / "localrun.toml"
    wrong = ModelTable("alpha", LoadSettings(rope_frequency_base=0.5), file)
    large = ModelTable("beta", LoadSettings(kv_cells=2**31 - 1), file)
    async with running(models=(wrong, large)) as runtime:
        refused = await error_of(generate(runtime, "alpha"))
        assert refused.message.startswith(f'{file}: [models."alpha"]: rope_frequency_base is 0.5; use 1 or more')
        refused = await error_of(generate(runtime, "beta"))
        assert isinstance(refused, CannotFit)
        assert refused.message.endswith(f'({file}: [models."beta"] sets kv_cells)')


async def test_what_cannot_be_met_loads_nothing(running: Any, generate: Any, models_dir: Path) -> None:
    add(models_dir, "a")
    write_lora(models_dir / "alpha.gguf", models_dir / "other.gguf", architecture="gemma")
    async with running() as runtime:
        for name, lora, kind, field in (
            ("alpha+nothing", (), NotFound, "model"),
            ("alpha+other", (), BadRequest, "model"),
            ("alpha", (AdapterChoice(7, 1.0, "lora[0]"),), NotFound, "lora[0]"),
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
