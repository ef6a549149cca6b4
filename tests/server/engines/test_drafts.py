"""Draft models: which one an engine is opened with, and which one a request gets."""

from __future__ import annotations

import asyncio
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from localrun import wire
from localrun.config import LoadSettings, ModelTable
from localrun.errors import BadModelFile, BadRequest, CannotFit
from localrun.models import creation, naming
from localrun.models.creation import Changes
from localrun.models.storage.store import Store
from localrun.server.engines import machine
from localrun.server.engines.link import EngineLink
from localrun.server.engines.resident import Use
from localrun.server.jobs.job import JobRequest
from tests.server.waiting import error_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Told:
    """What engines were told."""

    def __init__(self) -> None:
        self.opened: list[wire.Open] = []
        self.submitted: list[wire.Submit] = []

    @property
    def drafts(self) -> list[tuple[bool, str]]:
        """Of those that were opened: whether they speculate, and the name of the file that drafts."""
        return [(opened.speculates, Path(opened.draft_model_path).stem) for opened in self.opened]

    @property
    def asked(self) -> list[tuple[bool | None, str]]:
        """The same of the requests."""
        return [(asked.speculates, Path(asked.draft_model_path).stem) for asked in self.submitted]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    seen = Told()
    open_it, submit = EngineLink.open, EngineLink.submit

    async def opening(link: EngineLink, message: wire.Open, timeout_s: float) -> Any:
        seen.opened.append(message)
        return await open_it(link, message, timeout_s)

    def submitting(link: EngineLink, message: wire.Submit, job: Any) -> None:
        seen.submitted.append(message)
        submit(link, message, job)

    monkeypatch.setattr(EngineLink, "open", opening)
    monkeypatch.setattr(EngineLink, "submit", submitting)
    return seen


def make(models_dir: Path, name: str, base: str = "alpha", **changes: Any) -> None:
    """Another name for a model, with settings of its own."""
    store = Store(models_dir)
    naming.point(store, name, creation.assemble(creation.base_of(store, base, None), Changes(**changes), now=NOW))


async def test_a_draft_model_that_was_replaced_is_opened_anew(supervising: Any, models_dir: Path, told: Told) -> None:
    make(models_dir, "drafting", draft="beta")
    async with supervising() as (supervisor, _):
        for n_opened in (1, 2):
            (await supervisor.acquire("drafting", None)).release()
            assert told.drafts == [(True, "beta")] * n_opened
            lease = supervisor.lend("drafting", None)
            assert lease is not None
            lease.release()
            os.utime(models_dir / "beta.gguf", (n_opened, n_opened))
            assert supervisor.lend("drafting", None) is None
        # One that has no draft model shares its engine, and is none of another file.
        (await supervisor.acquire("alpha", None)).release()
        assert supervisor.lend("alpha", None) is not None


async def test_a_model_s_draft_model_is_loaded_with_it_and_takes_room(
    supervising: Any, models_dir: Path, told: Told
) -> None:
    make(models_dir, "drafting", draft="beta")
    async with supervising() as (supervisor, _):
        (await supervisor.acquire("drafting", None)).release()
        with_draft = supervisor.residents()[0].placement.needed_bytes
        await supervisor.unload("drafting")
        (await supervisor.acquire("alpha", None)).release()
        alone = supervisor.residents()[0].placement.needed_bytes
    assert told.drafts == [(True, "beta"), (True, "")]
    assert told.opened[0].draft_model_path == str((models_dir / "beta.gguf").resolve())
    assert with_draft - alone > (models_dir / "beta.gguf").stat().st_size * 0.9


@pytest.mark.parametrize(
    ("setting", "own", "opened"),
    [
        ("on", None, (True, "beta")),
        ("off", None, (False, "")),
        ("on", False, (False, "")),
        ("off", True, (True, "beta")),
    ],
)
async def test_a_model_s_own_setting_counts_before_the_daemon_s(
    setting: str, own: bool | None, opened: tuple[bool, str], supervising: Any, models_dir: Path, told: Told
) -> None:
    make(models_dir, "drafting", draft="beta", parameters={} if own is None else {"speculation": own})
    async with supervising(speculation=setting) as (supervisor, _):
        (await supervisor.acquire("drafting", None)).release()
    assert told.drafts == [opened]


async def test_without_its_draft_model_a_model_is_loaded_all_the_same(
    supervising: Any, models_dir: Path, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    make(models_dir, "drafting", draft="beta")
    (models_dir / "beta.gguf").unlink()
    with caplog.at_level(logging.WARNING):
        async with supervising() as (supervisor, _):
            lease = await supervisor.acquire("drafting", None)
            assert await lease.speculation(None, "") == (None, ""), "it was settled by the load"
            lease.release()
    assert told.drafts == [(True, "")]
    (warning,) = caplog.messages
    assert warning.startswith("drafting is used without its draft model: 'beta' is not here")


async def test_a_draft_model_without_room_is_left_out(
    supervising: Any, models_dir: Path, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    make(models_dir, "drafting", draft="beta")
    async with supervising() as (supervisor, watch):
        (await supervisor.acquire("alpha", None)).release()
        needed_bytes = supervisor.residents()[0].placement.needed_bytes
        await supervisor.unload("alpha")
        watch.available_bytes = int(needed_bytes / 0.8) + 100_000
        (await supervisor.acquire("drafting", None)).release()
    assert told.drafts[1:] == [(True, "")]
    assert caplog.messages == ["drafting is used without its draft model: there is no room for 'beta'"]


async def test_a_draft_model_that_the_engine_refuses_is_left_out(
    supervising: Any, models_dir: Path, told: Told, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(models_dir, "drafting", draft="beta")
    open_it = EngineLink.open

    async def refusing(link: EngineLink, message: wire.Open, timeout_s: float) -> Any:
        if message.draft_model_path:
            raise BadModelFile("beta.gguf cannot draft for this model")
        return await open_it(link, message, timeout_s)

    monkeypatch.setattr(EngineLink, "open", refusing)
    async with supervising() as (supervisor, _):
        (await supervisor.acquire("drafting", None)).release()
    assert told.drafts == [(True, "")]
    assert caplog.messages == [
        "drafting is used without its draft model: with it the model cannot be loaded: beta.gguf cannot draft for this "
        "model"
    ]


async def test_an_idle_model_goes_before_the_draft_model_does(
    supervising: Any, models_dir: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "private_bytes", lambda pid: 0)
    make(models_dir, "drafting", draft="beta")
    async with supervising() as (supervisor, watch):
        (await supervisor.acquire("drafting", None)).release()
        needed_bytes = supervisor.residents()[0].placement.needed_bytes
        await supervisor.unload("drafting")
        (await supervisor.acquire("gamma", None)).release()
        watch.available_bytes = int(needed_bytes / 0.8) + 100_000
        (await supervisor.acquire("drafting", None)).release()
        assert watch.ended[-1] == "gamma"
    assert told.drafts[-1] == (True, "beta")


async def test_a_request_brings_its_own_draft_model(running: Any, generate: Any, told: Told, models_dir: Path) -> None:
    make(models_dir, "drafting", draft="beta")
    async with running() as runtime:
        for ask in ({}, {"draft": "beta"}, {"draft": "gamma"}, {"draft": "gamma", "speculates": False}):
            await generate(runtime, "drafting", n_predict=2, **ask)
    assert told.drafts == [(True, "beta")]
    assert told.asked == [(None, ""), (None, ""), (None, "gamma"), (False, "")]
    assert told.submitted[2].draft_model_path == str((models_dir / "gamma.gguf").resolve())


async def test_a_request_s_draft_model_that_does_not_do_is_its_error(
    running: Any, generate: Any, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as runtime:
        for name, problem in (("nowhere", "localrun pull nowhere"), ("alpha", "'alpha' itself")):
            refused = await error_of(generate(runtime, draft=name))
            assert isinstance(refused, BadRequest)
            assert refused.field == "draft"
            assert problem in refused.message
        await generate(runtime, n_predict=2)
        monkeypatch.setattr(runtime.supervisor._room, "_available_bytes", lambda: 1_000_000)
        refused = await error_of(generate(runtime, draft="beta"))
        assert isinstance(refused, CannotFit)
        assert refused.message.startswith("draft: 'beta' needs ")
        assert "beside 'alpha'" in refused.message
        await generate(runtime, n_predict=2)
    assert told.asked == [(None, ""), (None, "")]


async def test_a_request_that_does_not_draft_needs_no_room_for_the_draft_model_that_it_names(
    running: Any, generate: Any, told: Told, monkeypatch: pytest.MonkeyPatch, models_dir: Path
) -> None:
    make(models_dir, "plain", parameters={"speculation": False})
    async with running() as runtime:
        await generate(runtime, "plain", n_predict=2)
        monkeypatch.setattr(runtime.supervisor._room, "_available_bytes", lambda: 0)
        await generate(runtime, "plain", n_predict=2, draft="beta")
        await generate(runtime, "alpha", n_predict=2, draft="beta", speculates=False)
        assert runtime.supervisor.residents()[0].extra_draft is None
        refused = await error_of(generate(runtime, draft="nowhere", speculates=False))
        assert isinstance(refused, BadRequest)
    assert {name for _, name in told.asked} == {""}


async def test_the_size_of_an_engine_includes_its_draft_models(running: Any, generate: Any, models_dir: Path) -> None:
    make(models_dir, "drafting", draft="beta")
    sizes = []
    async with running() as runtime:
        for name, draft in (("alpha", ""), ("alpha", "beta"), ("alpha", "gamma")):
            await generate(runtime, name, n_predict=2, draft=draft)
            sizes.append(runtime.supervisor.residents()[0].row(0.0).size_bytes)
        await runtime.supervisor.unload("alpha")
        await generate(runtime, "drafting", n_predict=2)
        sizes.append(runtime.supervisor.residents()[0].row(0.0).size_bytes)
    assert sizes[0] < sizes[1] == sizes[2] == sizes[3]


async def test_one_extra_draft_model_takes_the_place_of_another(
    running: Any, generate: Any, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "private_bytes", lambda pid: 0)
    async with running() as runtime:
        await generate(runtime, n_predict=2)
        (resident,) = runtime.supervisor.residents()
        alone = resident.needed_bytes
        await generate(runtime, n_predict=2, draft="beta")
        extra_bytes = resident.needed_bytes - alone
        assert extra_bytes > 0
        # Room for one, which is promised already: for the same again, or for another one in its place.
        room = alone + int(extra_bytes / 0.8) + 1
        monkeypatch.setattr(runtime.supervisor._room, "_available_bytes", lambda: room)
        await generate(runtime, n_predict=2, draft="beta")
        await generate(runtime, n_predict=2, draft="gamma")
        assert resident.needed_bytes == alone + extra_bytes
        monkeypatch.setattr(runtime.supervisor._room, "_available_bytes", lambda: room - 2)
        assert isinstance(await error_of(generate(runtime, draft="beta")), CannotFit)
    assert [name for _, name in told.asked] == ["", "beta", "beta", "gamma"]


async def test_names_with_other_settings_share_the_engine_and_keep_their_settings(
    running: Any, generate: Any, told: Told, models_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(models_dir, "drafting", draft="beta")
    make(models_dir, "plain", draft="beta", parameters={"speculation": False})
    make(models_dir, "wrong", draft="nowhere")
    async with running() as runtime:
        for name in ("alpha", "drafting", "plain", "wrong", "wrong"):
            await generate(runtime, name, n_predict=2)
        await generate(runtime, "plain", n_predict=2, speculates=True)
    assert told.drafts == [(True, "")]
    assert told.asked == [(None, ""), (None, "beta"), (False, ""), (None, ""), (None, ""), (True, "beta")]
    warnings = [message for message in caplog.messages if "draft model" in message]
    assert len(warnings) == 1
    assert "'nowhere' is not here" in warnings[0]


async def test_vectors_need_no_draft_model(running: Any, told: Told, models_dir: Path) -> None:
    make(models_dir, "drafting", draft="beta")
    async with running() as runtime, runtime.job(JobRequest(model="drafting", api="/test", use=Use.EMBED)) as job:
        await job.embed(["hello"])
        async for _ in job:
            pass
    assert [opened.draft_model_path for opened in told.opened] == [""]


async def test_a_busy_engine_is_asked_at_once_when_it_needs_nothing(running: Any, generate: Any, told: Told) -> None:
    """What every request without a draft model waits for: nothing."""
    async with running() as runtime:
        await generate(runtime, n_predict=2)
        lease = runtime.supervisor.lend("alpha", None)
        assert lease is not None
        waiting = asyncio.ensure_future(lease.speculation(None, ""))
        await asyncio.sleep(0)
        assert waiting.done()
        lease.release()


async def test_a_draft_model_of_a_table_that_is_not_here_is_a_warning_that_names_the_table(
    supervising: Any, models_dir: Path, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    table = ModelTable("alp*", LoadSettings(draft="nothing"), models_dir / "localrun.toml")
    with caplog.at_level(logging.WARNING):
        async with supervising(models=(table,)) as (supervisor, _):
            (await supervisor.acquire("alpha", None)).release()
    assert told.drafts == [(True, "")]
    (warning,) = caplog.messages
    assert warning.startswith("alpha is used without its draft model: 'nothing' is not here")
    assert warning.endswith(f'({models_dir / "localrun.toml"}: [models."alp*"] sets draft)')
