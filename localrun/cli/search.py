"""`localrun search`: models to pull, in the catalogue and on the Hugging Face hub."""

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
from localrun.cli.visible import for_stdout, visible
from localrun.client import Client
from localrun.config import Settings

_CATALOG_HEADER = ("NAME", "SIZE", "CONTEXT", "MEMORY", "LICENCE", "FOR")
_HUB_HEADER = ("REPOSITORY", "DOWNLOADS", "LIKES", "UPDATED", "LICENCE", "")


@click.command("search")
@click.argument("query", nargs=-1)
@click.option("--limit", type=click.IntRange(1, 100), default=20, help="Most repositories to list.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as from the daemon.")
@with_settings
def command(query: tuple[str, ...], limit: int, as_json: bool, settings: Settings) -> None:
    """Look for models to pull: in the catalogue, and among the GGUF repositories of the Hugging Face hub.

    Without QUERY the whole catalogue is listed, which needs no network. Every name in the first column is one for
    `localrun pull` and `localrun run`.
    """
    found = asyncio.run(_search(ensure_daemon(settings), " ".join(query), limit))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    tables = []
    if found["catalog"]:
        tables.append(columns(_CATALOG_HEADER, [_catalog_row(entry) for entry in found["catalog"]]))
    if found["hub"]:
        now = datetime.now(UTC)
        tables.append(columns(_HUB_HEADER, [_hub_row(hit, now) for hit in found["hub"]]))
    print(for_stdout("\n\n".join(tables) if tables else "nothing was found"))
    if found["problem"]:
        print(f"note: the hub was not searched: {visible(found['problem'])}", file=sys.stderr)


async def _search(base_url: str, query: str, limit: int) -> dict[str, Any]:
    async with Client(base_url) as client:
        return await client.search(query, limit=limit)


def _catalog_row(entry: dict[str, Any]) -> tuple[str, ...]:
    """Sizes of the smallest and the largest quantization that are listed."""
    sizes = sorted(entry["quants"].values())
    shown = [size(gigabytes * 1e9) for gigabytes in (sizes[0], sizes[-1])]
    return (
        entry["name"],
        shown[0] if len(sizes) == 1 else " to ".join(shown),
        str(entry["context_tokens"]),
        f"{entry['memory_gb']:g} GB",
        entry["licence"],
        entry["use"],
    )


def _hub_row(hit: dict[str, Any], now: datetime) -> tuple[str, ...]:
    updated = hit["updated_at"]
    return (
        hit["repo"],
        str(hit["n_downloads"]),
        str(hit["n_likes"]),
        ago(datetime.fromisoformat(updated), now) if updated else "",
        hit["licence"],
        "terms to accept first" if hit["is_gated"] else "",
    )
