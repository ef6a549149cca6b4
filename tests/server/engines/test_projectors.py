"""Engines and projectors: what they are opened with, what that takes, and what happens when it cannot be opened."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from localrun import wire
from localrun.errors import BadModelFile
from localrun.models.gguf.reader import read_header
from localrun.models.memory import projector_memory
from localrun.server.engines.link import EngineLink
from localrun.server.engines.resident import Use
from tests.projector_file import write_projector


@pytest.fixture
def projector(models_dir: Path) -> Path:
    width = read_header(models_dir / "alpha.gguf").n_embd
    return write_projector(models_dir / "mmproj-alpha.gguf", width=width)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The projectors of the engines that were asked to open, "" for none; those named `bad` cannot be opened."""
    seen: list[str] = []
    open_it = EngineLink.open

    async def opening(link: EngineLink, message: wire.Open, timeout_s: float) -> Any:
        seen.append(Path(message.projector_path).name)
        if "bad" in message.projector_path:
            raise BadModelFile(f"{Path(message.projector_path).name} cannot be opened")
        return await open_it(link, message, timeout_s)

    monkeypatch.setattr(EngineLink, "open", opening)
    return seen


async def test_a_model_is_opened_with_its_projector_which_takes_room(
    supervising: Any, projector: Path, opened: list[str]
) -> None:
    async with supervising() as (supervisor, _):
        for name in ("alpha", "beta"):
            (await supervisor.acquire(name, None)).release()
        seeing, blind = supervisor.residents()
        assert (seeing.projector, blind.projector) == (projector, None)
        needed = projector_memory(read_header(projector, kind="projector"))
        assert seeing.placement.projector_bytes == needed.total_bytes
        assert seeing.placement.needed_bytes - blind.placement.needed_bytes == needed.total_bytes
        rows = [resident.row(0.0).size_bytes for resident in (seeing, blind)]
        assert rows[0] - rows[1] == needed.total_bytes
    assert opened == [projector.name, ""]


async def test_vectors_are_made_with_the_projector_too(supervising: Any, projector: Path, opened: list[str]) -> None:
    async with supervising() as (supervisor, _):
        (await supervisor.acquire("alpha", None, Use.EMBED)).release()
    assert opened == ["mmproj-alpha.gguf"]


async def test_one_that_cannot_be_opened_leaves_the_model_for_text(
    supervising: Any, projector: Path, opened: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    os.rename(projector, projector.with_name("mmproj-alpha-bad.gguf"))
    for other in ("beta.gguf", "gamma.gguf"):  # or it could be anybody's
        os.unlink(projector.with_name(other))
    with caplog.at_level(logging.WARNING):
        async with supervising() as (supervisor, _):
            (await supervisor.acquire("alpha", None)).release()
            (resident,) = supervisor.residents()
            assert (resident.projector, resident.is_quick) == (None, True)
    assert opened == ["mmproj-alpha-bad.gguf", ""]
    assert "used without its projector mmproj-alpha-bad.gguf, for text only" in caplog.text


async def test_a_model_that_cannot_be_opened_fails_with_its_own_error(
    supervising: Any, projector: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    async def refusing(link: EngineLink, message: wire.Open, timeout_s: float) -> Any:
        opened.append(Path(message.projector_path).name)
        raise BadModelFile("broken weights")

    monkeypatch.setattr(EngineLink, "open", refusing)
    async with supervising() as (supervisor, _):
        with pytest.raises(BadModelFile, match="broken weights"):
            await supervisor.acquire("alpha", None)
    assert opened == [projector.name, ""]


async def test_a_projector_that_was_replaced_is_opened_anew(
    supervising: Any, projector: Path, opened: list[str]
) -> None:
    async with supervising() as (supervisor, _):
        (await supervisor.acquire("alpha", None)).release()
        assert supervisor.lend("alpha", None) is not None
        os.utime(projector, (1, 1))
        assert supervisor.lend("alpha", None) is None
    assert opened == [projector.name]
