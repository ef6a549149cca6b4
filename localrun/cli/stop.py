"""`localrun stop`: unload one model, or end the daemon."""

from __future__ import annotations

import asyncio

import click

from localrun.cli.connection import with_settings
from localrun.cli.daemon import require_daemon, wait_until_gone
from localrun.cli.model_name import for_daemon
from localrun.client import Client
from localrun.config import Settings

END_TIMEOUT_S = 60.0


@click.command("stop")
@click.argument("model", required=False)
@click.option("--daemon", is_flag=True, help="End the daemon instead of unloading a model.")
@with_settings
def command(model: str | None, daemon: bool, settings: Settings) -> None:
    """Unload MODEL once its running requests have ended, or end the daemon."""
    if daemon == (model is not None):
        raise click.UsageError("give either a MODEL or --daemon")
    url = require_daemon(settings)
    if model is not None:
        print(asyncio.run(_unload(url, for_daemon(model))))
    else:
        asyncio.run(_shut_down(url))
        wait_until_gone(settings, END_TIMEOUT_S)
        print("the daemon has ended")


async def _unload(url: str, model: str) -> str:
    """Unload a model; what to tell the user."""
    async with Client(url) as client:
        before = {row["name"] for row in await client.loaded()}
        await client.unload(model)
        after = {row["name"] for row in await client.loaded()}
    if before - after:
        return f"unloaded {model}"
    is_loaded = model.removesuffix(":latest") in after
    return f"{model} unloads when its requests have ended" if is_loaded else f"{model} was not loaded"


async def _shut_down(url: str) -> None:
    async with Client(url) as client:
        await client.shutdown()
