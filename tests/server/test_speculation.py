"""What clients say about speculation, and what is said of it everywhere, with an engine that says that it drafted."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import uvicorn

from localrun import wire
from localrun.server import app
from localrun.server.runtime import Runtime
from localrun.snapshot import Aggregate, RequestState
from tests.server import drafting_engine
from tests.server.openai import shapes
from tests.server.openai.test_fim_routes import write_model

HELLO = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": "alpha", "messages": HELLO}
TEXT: dict[str, Any] = {"model": "alpha", "prompt": "hello"}
PREDICTION = {"type": "content", "content": "once"}
# Both sources together.
N_DRAFTED, N_ACCEPTED = 10, 7
# Of the prediction alone.
N_PREDICTED, N_PREDICTED_ACCEPTED = 4, 3
# What the engine that died had drafted comes on top.
N_DRAFTED_TWICE, N_ACCEPTED_TWICE = 14, 10


class Served:
    """A daemon's runtime, and its app over HTTP."""

    def __init__(self, runtime: Runtime, http: httpx2.AsyncClient) -> None:
        self.runtime = runtime
        self.http = http

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        answer = await self.http.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refusal(self, path: str, body: dict[str, Any], **headers: str) -> str:
        answer = await self.http.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        return str(error if isinstance(error, str) else error["message"])

    async def metrics(self) -> list[str]:
        return (await self.http.get("/metrics")).text.split("\n")

    async def row(self) -> dict[str, Any]:
        """Of the newest request."""
        row: dict[str, Any] = (await self.http.get("/localrun/v1/requests")).json()["requests"][-1]
        return row


Serving = AbstractAsyncContextManager[Served]


@pytest.fixture
def serving(running: Any, settings: Any, models_dir: Path) -> Serving:
    command = [sys.executable, drafting_engine.__file__]
    write_model(models_dir / "code.gguf")

    @asynccontextmanager
    async def start() -> AsyncIterator[Served]:
        async with running(engine=command) as runtime:
            listener = socket.create_server(("127.0.0.1", 0))
            built = app.build(settings(), runtime)
            server = uvicorn.Server(uvicorn.Config(built, log_level="warning", lifespan="off"))
            task = asyncio.create_task(server.serve(sockets=[listener]))
            base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            try:
                async with httpx2.AsyncClient(base_url=base_url, timeout=60, trust_env=False) as http:
                    yield Served(runtime, http)
            finally:
                runtime.request_shutdown()
                server.should_exit = True
                await task
                listener.close()

    return start()


async def test_who_says_whether_to_speculate(serving: Serving) -> None:
    async with serving as served:

        async def asked(path: str, body: dict[str, Any], **headers: str) -> str:
            return re.findall(r"speculates (\w+)", str(await served.post(path, body, **headers)))[0]

        ollama = {"stream": False}
        claude = CHAT | {"max_tokens": 20}
        for path, body in (
            ("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/v1/messages", claude),
            ("/v1/responses", {"model": "alpha", "input": "hello"}),
            ("/api/chat", CHAT | ollama), ("/api/generate", TEXT | ollama),
            ("/infill", {"model": "code", "input_prefix": "x"}),
        ):  # fmt: skip
            assert await asked(path, body) == "None", path
            assert await asked(path, body | {"speculation": False}) == "False", path
            assert await asked(path, body | {"speculation": "on"}, X_Localrun_Speculation="off") == "True", path
            assert await asked(path, body, X_Localrun_Speculation="off") == "False", path
        for path, body in (("/api/chat", CHAT | ollama), ("/api/generate", TEXT | ollama)):
            said = body | {"options": {"speculation": "off"}}
            assert await asked(path, said, X_Localrun_Speculation="on") == "False"
            assert await asked(path, said | {"speculation": True}) == "True"


async def test_what_is_neither_on_nor_off(serving: Serving) -> None:
    async with serving as served:
        claude = CHAT | {"max_tokens": 20}
        for path, body in (("/v1/chat/completions", CHAT), ("/api/chat", CHAT), ("/v1/messages", claude)):
            refusal = await served.refusal(path, body | {"speculation": "fast"})
            assert refusal == "speculation: 'fast' is not known; use on or off"
            assert await served.refusal(path, body | {"speculation": ""})
        assert (await served.refusal("/api/chat", CHAT | {"options": {"speculation": 1}})).startswith(
            "options.speculation: "
        )
        refusal = await served.refusal("/v1/completions", TEXT, X_Localrun_Speculation="fast")
        assert refusal == "X-Localrun-Speculation: 'fast' is not known; use on or off"


async def test_a_prediction_goes_to_the_engine(serving: Serving) -> None:
    async with serving as served:
        parts = [{"type": "text", "text": "def f():"}, {"type": "text", "text": "    pass"}]
        for content, text in (("once", "once"), ("", ""), (parts, "def f():\n    pass"), ([], "")):
            body = CHAT | {"prediction": {"type": "content", "content": content}}
            answer = await served.post("/v1/chat/completions", body)
            said = answer["choices"][0]["message"]["content"]
            assert said == f"speculates None, prediction {text!r}"
        answer = await served.post("/v1/chat/completions", CHAT | {"prediction": None})
        assert answer["choices"][0]["message"]["content"].endswith("prediction ''")


@pytest.mark.parametrize(
    ("prediction", "named"),
    [
        ("once", "prediction"),
        ({"content": "once"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "diff", "content": "once"}, "prediction.type"),
        ({"type": "content", "content": 7}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0]"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
    ],
)
async def test_a_prediction_that_is_none(serving: Serving, prediction: Any, named: str) -> None:
    async with serving as served:
        answer = await served.http.post("/v1/chat/completions", json=CHAT | {"prediction": prediction})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)


def _check_openai(answer: dict[str, Any], *, n_answers: int = 1) -> None:
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == n_answers * N_PREDICTED_ACCEPTED
    assert details["rejected_prediction_tokens"] == n_answers * (N_PREDICTED - N_PREDICTED_ACCEPTED)
    if n_answers == 1:
        assert (answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"]) == (N_DRAFTED, N_ACCEPTED)


async def test_openai_s_answers(serving: Serving) -> None:
    async with serving as served:
        for path, body, shape in (
            ("/v1/chat/completions", CHAT, shapes.Chat),
            ("/v1/completions", TEXT, shapes.Completion),
        ):
            answer = await served.post(path, body)
            msgspec.convert(answer, shape)
            _check_openai(answer)
            _check_openai(await served.post(path, body | {"n": 3}), n_answers=3)
            streamed = await served.http.post(
                path, json=body | {"stream": True, "stream_options": {"include_usage": True}}
            )
            chunks = [json.loads(line[6:]) for line in streamed.text.split("\n") if line.startswith("data: {")]
            _check_openai(chunks[-1])
        for stream in (False, True):
            text = (
                await served.http.post("/infill", json={"model": "code", "input_prefix": "x", "stream": stream})
            ).text
            timings = json.loads(text.strip().split("\n")[-1].removeprefix("data: "))["timings"]
            assert (timings["draft_n"], timings["draft_n_accepted"]) == (N_DRAFTED, N_ACCEPTED)
        answer = await served.post("/v1/responses", {"model": "alpha", "input": "hello"})
        assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


async def test_ollama_s_answers(serving: Serving) -> None:
    async with serving as served:
        for path, body in (("/api/chat", CHAT), ("/api/generate", TEXT)):
            for stream in (False, True):
                text = (await served.http.post(path, json=body | {"stream": stream})).text
                last = json.loads(text.strip().split("\n")[-1])
                said = last["draft_count"], last["draft_accepted_count"], last["speedup"]
                assert said == (N_DRAFTED, N_ACCEPTED, drafting_engine.SPEEDUP)


async def test_rows_and_totals(serving: Serving) -> None:
    async with serving as served:
        await served.post("/v1/chat/completions", CHAT)
        row = await served.row()
        assert (row["drafted_tokens"], row["accepted_tokens"], row["speedup"]) == (N_DRAFTED, N_ACCEPTED, 2.25)
        assert row["drafts"] == [
            {"source": "lookup", "drafts": 2, "drafted_tokens": 6, "accepted_tokens": 4, "seconds": 0.5},
            {"source": "prediction", "drafts": 1, "drafted_tokens": 4, "accepted_tokens": 3, "seconds": 0.125},
        ]
        aggregate: Aggregate = (await served.runtime.telemetry.snapshot()).aggregate
        assert (aggregate.drafted_tokens_total, aggregate.accepted_tokens_total) == (N_DRAFTED, N_ACCEPTED)
        assert aggregate.draft_hit_rate == 0.7


async def test_what_two_engines_drafted_adds_up(serving: Serving) -> None:
    """The second one counts from 0."""
    async with serving as served:
        answer = await served.post("/v1/completions", TEXT | {"prompt": "die"})
        timings = answer["timings"]
        assert (timings["draft_n"], timings["draft_n_accepted"]) == (N_DRAFTED_TWICE, N_ACCEPTED_TWICE)
        row = await served.row()
        assert (row["resumed"], row["state"]) == (1, RequestState.DONE)
        assert (row["drafted_tokens"], row["accepted_tokens"]) == (N_DRAFTED_TWICE, N_ACCEPTED_TWICE)
        aggregate: Aggregate = (await served.runtime.telemetry.snapshot()).aggregate
        assert (aggregate.drafted_tokens_total, aggregate.accepted_tokens_total) == (14, 10)
        page = await served.metrics()
        assert 'localrun_draft_tokens_total{model="alpha",source="lookup"} 10.0' in page


async def test_metrics_by_source(serving: Serving) -> None:
    async with serving as served:
        for _ in range(3):
            await served.post("/v1/chat/completions", CHAT)
        page = await served.metrics()
        for counts in drafting_engine.WHOLE:
            labels = f'{{model="alpha",source="{counts.source}"}}'
            for name, value in (
                ("localrun_drafts_total", counts.n_drafts),
                ("localrun_draft_tokens_total", counts.n_drafted),
                ("localrun_draft_tokens_accepted_total", counts.n_accepted),
                ("localrun_draft_seconds_total", counts.seconds),
            ):
                assert f"{name}{labels} {float(3 * value)}" in page
        assert 'localrun_request_speedup_ratio_count{model="alpha"} 3.0' in page
        assert 'localrun_request_speedup_ratio_sum{model="alpha"} 6.75' in page


async def test_without_drafts_nothing_is_said(running: Any, generate: Any) -> None:
    async with running() as runtime:
        await generate(runtime)
        row = runtime.registry.rows()[0]
        assert (row.drafted_tokens, row.drafts, row.speedup, row.draft_hit_rate) == (0, [], None, None)
        assert (await runtime.telemetry.snapshot()).aggregate.draft_hit_rate is None
        page = runtime.telemetry.metrics.page("")[0]
        assert b"localrun_draft_tokens_total{" not in page
        assert b'localrun_request_speedup_ratio_count{model="alpha"} 0.0' in page


def test_every_source_has_a_name_that_the_row_explains() -> None:
    from localrun.snapshot import DraftRow

    assert all(source.value in (DraftRow.__doc__ or "") for source in wire.DraftSource)
