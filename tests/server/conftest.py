"""Runtimes and supervisors on fake engines, over a folder of three small models (`alpha`, `beta`, `gamma`)."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from localrun import wire
from localrun.config import Settings
from localrun.models.storage.store import Store
from localrun.server.engines.supervisor import Supervisor
from localrun.server.jobs.job import Job, JobRequest
from localrun.server.runtime import Elsewhere, Runtime
from tests.fakes import ENGINE
from tests.support.synthesis.synthesize import synthesize

Running = Callable[..., AbstractAsyncContextManager[Runtime]]
Submit = Callable[..., Awaitable[None]]
Generate = Callable[..., Awaitable[list[wire.Delta]]]

SCRIPT = str(Path(__file__).with_name("scripted_engine.py"))
NAMES = ("alpha", "beta", "gamma")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file that llama.cpp can load, two megabytes of random weights."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    synthesize("tiny", "Q4_0", path)
    return path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which everything is kept, so that nobody's own cache is written to."""
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def models_dir(small_model: Path, tmp_path: Path) -> Path:
    return copies(small_model, tmp_path / "models")


def copies(model: Path, folder: Path) -> Path:
    """A new folder of models, all of them this one."""
    folder.mkdir()
    for name in NAMES:
        shutil.copy(model, folder / f"{name}.gguf")
    return folder


@pytest.fixture
def settings(models_dir: Path) -> Callable[..., Settings]:
    """Settings for that folder, with a small pool; arguments override."""

    def make(**changes: Any) -> Settings:
        return Settings(**{"models_dir": str(models_dir), "kv_cells": 4096, "port": 0, **changes})

    return make


@pytest.fixture
def running(settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> Running:
    """`async with running(slots=2, ...) as runtime`. `step_ms` slows the fake engines down; `engine` is the argv of
    others."""

    @asynccontextmanager
    async def start(
        *, step_ms: float = 0, engine: Sequence[str] = ENGINE, elsewhere: Elsewhere | None = None, **changes: Any
    ) -> AsyncIterator[Runtime]:
        monkeypatch.setenv("LOCALRUN_FAKE_STEP_MS", str(step_ms))
        runtime = Runtime(settings(**changes), engine_command=tuple(engine), elsewhere=elsewhere)
        await runtime.start()
        try:
            yield runtime
        finally:
            await runtime.stop()

    return start


@pytest.fixture
def submit() -> Submit:
    """`await submit(job, n_predict=5)`: a greedy request that does not end before its limit."""

    async def send(job: Job, *, text: str = "hello", n_predict: int = 8) -> None:
        asked = wire.Submit(id=0, sampling=wire.Sampling(temperature=0), n_predict=n_predict, ignore_eos=True)
        await job.submit(asked, segments=[wire.Segment(text)])

    return send


@pytest.fixture
def generate(submit: Submit) -> Generate:
    """`await generate(runtime, "alpha", n_predict=5)`: all deltas of one greedy request."""

    async def run(
        runtime: Runtime, model: str = "alpha", *, text: str = "hello", n_predict: int = 8, **ask: Any
    ) -> Any:
        job: Job
        async with runtime.job(JobRequest(**{"model": model, "api": "/test", **ask})) as job:
            await submit(job, text=text, n_predict=n_predict)
            return [delta async for delta in job]

    return run


class Watch:
    """Counts engines that came and went, and says how much memory there is."""

    def __init__(self) -> None:
        self.available_bytes = 64 * 1024**3
        self.loaded: list[str] = []
        self.ended: list[str] = []


@pytest.fixture
def supervising(settings: Callable[..., Settings], models_dir: Path) -> Callable[..., Any]:
    """`async with supervising(max_models=1) as (supervisor, watch)`; `script` names a misbehaving engine, or is
    the path of one. Others compute nothing, and start in a third of the time of those that do."""

    @asynccontextmanager
    async def start(*, script: str | Path = "ready", **changes: Any) -> Any:
        watch = Watch()
        command = [sys.executable, str(script)] if isinstance(script, Path) else [sys.executable, SCRIPT, script]
        supervisor = Supervisor(
            settings(**changes),
            Store(models_dir),
            command=command,
            on_step=lambda link, step: None,
            on_loaded=lambda link: watch.loaded.append(link.model),
            on_ended=lambda link: watch.ended.append(link.model),
            available_bytes=lambda: watch.available_bytes,
        )
        supervisor.start()
        try:
            yield supervisor, watch
        finally:
            await supervisor.stop()
            assert supervisor.residents() == []

    return start
