"""`localrun rm`: remove models."""

from __future__ import annotations

import asyncio

import click

from localrun.cli.columns import size
from localrun.cli.connection import with_settings
from localrun.cli.daemon import ensure_daemon
from localrun.cli.model_name import for_daemon
from localrun.cli.visible import visible
from localrun.client import Client
from localrun.config import Settings


@click.command("rm")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@with_settings
def command(models: tuple[str, ...], settings: Settings) -> None:
    """Remove MODELs: their names, and the files that nothing else uses. A loaded one is unloaded first."""
    asyncio.run(_remove(ensure_daemon(settings), models))


async def _remove(base_url: str, models: tuple[str, ...]) -> None:
    async with Client(base_url) as client:
        for model in models:
            removed = await client.remove(for_daemon(model))
            print(f"deleted '{visible(model)}', freed {size(removed['freed_bytes'])}")
            for kept in removed["kept"]:
                print(f"  kept {visible(kept['path'])}: {visible(kept['reason'])}")
