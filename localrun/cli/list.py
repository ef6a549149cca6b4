"""`localrun list`: the models that can be run."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from typing import Any

import click

from localrun.cli.columns import ago, columns, size
from localrun.cli.connection import with_settings
from localrun.cli.daemon import ensure_daemon
from localrun.cli.visible import visible
from localrun.client import Client
from localrun.config import Settings

_HEADER = ("NAME", "ID", "SIZE", "QUANT", "PARAMETERS", "CONTEXT", "MODIFIED", "SOURCE", "LOADED")


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, as in the daemon's /api/tags.")
@with_settings
def command(as_json: bool, settings: Settings) -> None:
    """List the models that can be run.

    Files that lie where models do and cannot be run are named on stderr, with the reason.
    """
    store = asyncio.run(_store(ensure_daemon(settings)))
    rows = store["models"]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    now = datetime.now(UTC)
    print(columns(_HEADER, [_cells(row, now) for row in rows]))
    for file in store.get("unusable", ()):
        print(f"not usable: {visible(file['path'])}: {visible(file['problem'])}", file=sys.stderr)


def _cells(row: dict[str, Any], now: datetime) -> tuple[str, ...]:
    details = row.get("details") or {}
    cells = (
        row["name"],
        str(row.get("digest", "")).removeprefix("sha256:")[:12],
        size(row["size"]),
        details.get("quantization_level") or "-",
        details.get("parameter_size") or "-",
        str(details.get("context_length") or "-"),
        ago(datetime.fromisoformat(row["modified_at"]), now),
        row.get("source") or "-",
        "yes" if row.get("loaded") else "",
    )
    return tuple(visible(cell) for cell in cells)


async def _store(base_url: str) -> dict[str, Any]:
    async with Client(base_url) as client:
        return await client.store()
