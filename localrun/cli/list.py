"""`localrun list`: the models that can be run."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import click

from localrun.cli.columns import ago, columns, size
from localrun.cli.connection import with_settings
from localrun.cli.daemon import ensure_daemon
from localrun.client import Client
from localrun.config import Settings


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, as in the daemon's /api/tags.")
@with_settings
def command(as_json: bool, settings: Settings) -> None:
    """List the models that can be run."""
    rows = asyncio.run(_models(ensure_daemon(settings)))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    now = datetime.now(UTC)
    cells = [
        (
            row["name"],
            str(row.get("digest", "")).removeprefix("sha256:")[:12],
            size(row["size"]),
            ago(datetime.fromisoformat(row["modified_at"]), now),
        )
        for row in rows
    ]
    print(columns(("NAME", "ID", "SIZE", "MODIFIED"), cells))


async def _models(base_url: str) -> list[dict[str, Any]]:
    async with Client(base_url) as client:
        return await client.models()
