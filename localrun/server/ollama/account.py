"""What Ollama's API has of its own company's services: accounts, models that run there, and a search of the web.

Clients ask to know what to offer. Nothing here leaves the machine.
"""

from __future__ import annotations

from localrun.errors import NotSupported, Unauthorized
from localrun.server.http.exchange import Exchange
from localrun.server.runtime import Runtime


async def status(_: Runtime, exchange: Exchange) -> None:
    """GET /api/status: whether there are remote models."""
    await exchange.answer_json({"cloud": {"disabled": True, "source": "config"}})


async def me(_: Runtime, exchange: Exchange) -> None:
    """POST /api/me: who is signed in."""
    await exchange.read_body()
    raise Unauthorized("nobody is signed in; localrun has no accounts and needs none")


async def sign_out(_: Runtime, exchange: Exchange) -> None:
    """POST /api/signout."""
    await exchange.read_body()
    await exchange.answer(b"")


async def experimental(_: Runtime, exchange: Exchange) -> None:
    """`/api/experimental/*`."""
    await exchange.read_body()
    raise NotSupported(f"{exchange.path} is a service of ollama.com, which localrun does not use")
