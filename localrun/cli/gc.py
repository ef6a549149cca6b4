"""`localrun gc`: delete files that no model needs."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from localrun.cli.columns import size
from localrun.cli.connection import with_settings
from localrun.cli.daemon import ensure_daemon
from localrun.cli.visible import visible
from localrun.client import Client
from localrun.config import Settings


@click.command("gc")
@click.option("--all", "is_all", is_flag=True, help="Also pulls that were broken off of late, and fresh uploads.")
@with_settings
def command(is_all: bool, settings: Settings) -> None:
    """Delete what nobody needs any more: what killed programs left half done, and files without a model."""
    collected = asyncio.run(_collect(ensure_daemon(settings), is_all=is_all))
    for path in collected["deleted"]:
        print(f"deleted {visible(path)}")
    print(f"freed {size(collected['freed_bytes'])}")
    if collected["kept_blobs"]:
        print(f"kept {collected['kept_blobs']} recently uploaded files that no model names; --all deletes them")


async def _collect(base_url: str, *, is_all: bool) -> dict[str, Any]:
    async with Client(base_url) as client:
        return await client.collect_garbage(is_all=is_all)
