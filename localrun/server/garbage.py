"""POST /localrun/v1/gc: deletes what nobody needs any more of the models folder and the hub's cache.

    {"min_age_s": 3600, "partial_min_age_s": 1209600}  ->  {"freed_bytes": 123, "deleted": ["..."], "kept_blobs": 1}

Does not: know what garbage is (models/naming.py).
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.routing import Route

from localrun.models import naming
from localrun.server.http import bodies
from localrun.server.http.endpoint import route
from localrun.server.http.exchange import Exchange
from localrun.server.runtime import Runtime


class GarbageBody(msgspec.Struct, frozen=True, kw_only=True):
    """Uploaded files that no model names are spared until they are `min_age_s` old, downloads that were broken off
    until `partial_min_age_s` after their last byte."""

    min_age_s: Annotated[float, Meta(ge=0.0)] = naming.MIN_AGE_S
    partial_min_age_s: Annotated[float, Meta(ge=0.0)] = naming.PARTIAL_MIN_AGE_S


def routes(runtime: Runtime) -> list[Route]:
    """The route, bound to a runtime."""
    return [route("/localrun/v1/gc", runtime, _collect, methods=["POST"])]


async def _collect(runtime: Runtime, exchange: Exchange) -> None:
    body = bodies.decode(await exchange.read_body() or b"{}", GarbageBody)
    collected = await asyncio.to_thread(
        naming.collect_garbage,
        runtime.store,
        now_s=time.time(),
        min_age_s=body.min_age_s,
        partial_min_age_s=body.partial_min_age_s,
    )
    answer = {
        "freed_bytes": collected.freed_bytes,
        "deleted": [str(path) for path in collected.files],
        "kept_blobs": collected.kept_blobs,
    }
    await exchange.answer_json(answer)
