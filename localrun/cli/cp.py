"""`localrun cp`: a second name for a model."""

from __future__ import annotations

import asyncio

import click

from localrun.cli.connection import with_settings
from localrun.cli.daemon import ensure_daemon
from localrun.cli.model_name import for_daemon
from localrun.client import Client
from localrun.config import Settings


@click.command("cp")
@click.argument("source")
@click.argument("destination")
@with_settings
def command(source: str, destination: str, settings: Settings) -> None:
    """Give the model SOURCE a second name, DESTINATION. Both share their files; either may be removed."""
    asyncio.run(_copy(ensure_daemon(settings), for_daemon(source), destination))
    print(f"copied '{source}' to '{destination}'")


async def _copy(base_url: str, source: str, destination: str) -> None:
    async with Client(base_url) as client:
        await client.copy(source, destination)
