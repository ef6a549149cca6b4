"""POST /api/pull: brings a model here, and tells how it goes, line by line as Ollama does.

What lies here without having come from anywhere (the built-in model, files in place, models that were created) is
pulled already; clients pull before they use a model. A name that no model can have is refused before the stream begins;
what goes wrong later is the stream's last line.

Does not: keep pulls (server/pulls.py does).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from localrun.errors import BadModelFile, ModelNotFound
from localrun.models.name import Kind, ModelName
from localrun.models.store import Store
from localrun.server.http import bodies
from localrun.server.http.exchange import Exchange
from localrun.server.ollama import statuses
from localrun.server.ollama.bodies import ModelBody
from localrun.server.ollama.statuses import Status
from localrun.server.runtime import Runtime

_PULLED = frozenset(("hub", "registry"))


class PullBody(ModelBody, frozen=True, kw_only=True):
    """`insecure` allows plain http to a registry that is not on this machine. Ollama's `username` and `password` are
    not read: localrun signs in to no registry."""

    insecure: bool | None = None


async def pull(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await bodies.read(exchange, PullBody)
    name = body.model_name
    stream = body.stream is not False
    is_own = await asyncio.to_thread(_is_own, runtime.store, name)
    async with exchange.while_connected():
        if is_own:
            await statuses.send(exchange, _success(), stream=stream)
            return
        with runtime.pulls.joined(name, is_insecure=bool(body.insecure)) as progress:
            await statuses.send(exchange, progress.statuses(), stream=stream)


def _is_own(store: Store, name: str) -> bool:
    """Whether a model is here that did not come from a source that could have a newer one.

    Raises ModelNotFound for the path of a file that is not there, and BadRequest.
    """
    try:
        model = store.resolve(name)
    except (BadModelFile, ModelNotFound):
        if ModelName.parse(name).kind is Kind.STORED:
            return False
        raise
    return model.source.kind not in _PULLED


async def _success() -> AsyncGenerator[Status, None]:
    yield {"status": "success"}
