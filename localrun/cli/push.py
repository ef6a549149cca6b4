"""`localrun push`: not supported, and what to do instead."""

from __future__ import annotations

import asyncio

import click

from localrun.cli.connection import with_settings
from localrun.cli.daemon import ensure_daemon
from localrun.client import Client
from localrun.config import Settings


@click.command("push")
@click.argument("model")
@with_settings
def command(model: str, settings: Settings) -> None:
    """Not supported: localrun uploads nothing. Says how to share MODEL instead."""
    asyncio.run(_push(ensure_daemon(settings), model))


async def _push(base_url: str, model: str) -> None:
    async with Client(base_url) as client:
        await client.push(model)
