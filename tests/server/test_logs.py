"""The log route over real HTTP."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from localrun.snapshot import LogLine
from tests.server.test_native import serving

__all__ = ["serving"]


def _lines(text: str) -> list[LogLine]:
    return [msgspec.json.decode(line[5:], type=LogLine) for line in text.splitlines() if line.startswith("data:")]


async def test_what_is_kept_and_what_comes(serving: Any) -> None:
    log = logging.getLogger("localrun.test")
    async with serving() as (_, client):
        log.warning("first %d", 1)
        logging.getLogger("localrun.engine").warning("[tiny] n_ctx = 4096")
        kept = _lines((await client.get("/localrun/v1/logs?follow=0")).text)
        assert [(line.source, line.level, line.text) for line in kept[-2:]] == [
            ("localrun.test", "warning", "first 1"),
            ("tiny", "warning", "n_ctx = 4096"),
        ]
        since = kept[-1].number
        async with client.stream("GET", f"/localrun/v1/logs?since={since}") as response:
            chunks = response.aiter_text()
            await asyncio.to_thread(log.error, "from another thread")
            text = ""
            while "from another thread" not in text:
                text += await anext(chunks)
        assert [line.number for line in _lines(text)] == [since + 1]


async def test_bad_parameters_are_named(serving: Any) -> None:
    async with serving() as (_, client):
        for query, field in (("since=-1", "since"), ("since=x", "since"), ("follow=2", "follow")):
            answer = await client.get(f"/localrun/v1/logs?{query}")
            assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)


async def test_a_broken_record_harms_nobody_and_a_long_one_is_cut(serving: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log = logging.getLogger("localrun.test")
    async with serving() as (_, client):
        log.warning("%d", "not a number")
        log.warning("x" * 100_000)
        kept = _lines((await client.get("/localrun/v1/logs?follow=0")).text)
        assert len(kept[-1].text) == 4_000
