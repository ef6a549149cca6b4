"""The whole runtime: starting, serving several models, stopping with and without grace, and real weights."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from localrun import wire
from localrun.config import Settings
from localrun.errors import LocalrunError, Unavailable
from localrun.server import runtime as runtime_module
from localrun.server.app import build
from localrun.server.jobs.job import JobRequest
from localrun.server.runtime import Runtime
from localrun.snapshot import RequestState


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


async def test_stop_leaves_no_process_behind(running: Any, generate: Any) -> None:
    before = _children()  # a library that another test used may have one for good
    async with running() as runtime:
        await asyncio.gather(*(generate(runtime, model) for model in ("alpha", "beta", "gamma")))
        assert len(runtime.supervisor.loaded()) == 3
        assert len(_children() - before) >= 3
    assert _children() <= before


async def test_running_jobs_may_end_in_peace(running: Any, submit: Any) -> None:
    async with running(step_ms=5) as runtime:
        async with runtime.job(JobRequest(model="alpha", api="/test")) as job:
            await submit(job, n_predict=60)
            await anext(job)
            stopping = asyncio.create_task(runtime.stop())
            deltas = [delta async for delta in job]
        assert deltas[-1].finish is wire.Finish.LENGTH
        await stopping


async def test_jobs_that_take_too_long_end_with_unavailable(
    running: Any, submit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "STOP_GRACE_S", 0.2)
    async with running(step_ms=5) as runtime:
        async with runtime.job(JobRequest(model="alpha", api="/test")) as job:
            await submit(job, n_predict=100_000)
            await anext(job)
            stopping = asyncio.create_task(runtime.stop())
            with pytest.raises(Unavailable):
                async for _ in job:
                    pass
        await stopping
        assert job.record.state is RequestState.FAILED


async def test_no_new_jobs_during_shutdown_and_stopping_again_is_the_same_stop(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as runtime:
        n_stops = 0
        stop = runtime.supervisor.stop

        async def counted() -> None:
            nonlocal n_stops
            n_stops += 1
            await stop()

        monkeypatch.setattr(runtime.supervisor, "stop", counted)
        runtime.request_shutdown()
        with pytest.raises(Unavailable, match="shutting down"):
            runtime.job(JobRequest(model="alpha", api="/test"))
        await asyncio.gather(runtime.stop(), runtime.stop())
        await runtime.stop()
        assert n_stops == 1


async def test_a_damaged_file_is_an_error_and_others_go_on(running: Any, generate: Any, models_dir: Path) -> None:
    (models_dir / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 200)
    async with running() as runtime:
        with pytest.raises(LocalrunError) as caught:
            await generate(runtime, "bad")
        assert caught.value.status in (400, 422)
        assert (await generate(runtime, "alpha"))[-1].finish is wire.Finish.LENGTH


ASKED = [{"role": "user", "content": "hello"}]


async def test_every_api_answers_with_a_loaded_model_while_no_thread_is_free(running: Any, generate: Any) -> None:
    async with running() as runtime:
        await generate(runtime)
        is_over = threading.Event()
        pool = ThreadPoolExecutor(max_workers=1)
        asyncio.get_running_loop().set_default_executor(pool)
        blocking = pool.submit(is_over.wait)
        transport = httpx2.ASGITransport(app=build(runtime.settings, runtime))
        try:
            async with httpx2.AsyncClient(base_url="http://localhost", transport=transport) as client:
                for path, asked in {
                    "/api/chat": {"messages": ASKED, "stream": False, "options": {"num_predict": 4}},
                    "/api/generate": {"prompt": "hello", "stream": False, "options": {"num_predict": 4}},
                    "/v1/chat/completions": {"messages": ASKED, "max_tokens": 4},
                    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
                    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
                    "/v1/messages": {
                        "messages": ASKED, "max_tokens": 1100, "stop_sequences": ["e"],
                        "thinking": {"type": "enabled", "budget_tokens": 1024},
                    },
                }.items():  # fmt: skip
                    answering = client.post(path, json={"model": "alpha", **asked})
                    answer = await asyncio.wait_for(answering, 60)
                    assert answer.status_code == 200, answer.text
                    assert not blocking.done()
        finally:
            is_over.set()


async def test_real_weights_through_llama_cpp(models_dir: Path, submit: Any) -> None:
    before = _children()
    runtime = Runtime(Settings(models_dir=str(models_dir), threads=1))
    await runtime.start()
    try:

        async def one(number: int) -> list[wire.Delta]:
            async with runtime.job(JobRequest(model="alpha", api="/test")) as job:
                assert job.ready.n_ctx == job.model.header.n_ctx_train
                await submit(job, text=f"Once upon a time, number {number}", n_predict=16)
                return [delta async for delta in job]

        answers = await asyncio.gather(*(one(number) for number in range(4)))
        assert [answer[-1].finish for answer in answers] == [wire.Finish.LENGTH] * 4
        row = (await runtime.telemetry.snapshot()).engines[0]
        assert row.backend != "fake"
        assert row.size_bytes > 1_000_000
        await runtime.supervisor.unload("alpha")
        assert runtime.supervisor.loaded() == []
    finally:
        await runtime.stop()
    assert _children() <= before
