"""`localrun show`: what is known about a model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import click

from localrun.cli.connection import with_settings
from localrun.cli.daemon import ensure_daemon
from localrun.cli.model_card import model_card
from localrun.cli.model_name import for_daemon
from localrun.cli.visible import for_stdout
from localrun.client import Client
from localrun.config import Settings


@click.command("show")
@click.argument("model")
@click.option("--template", is_flag=True, help="Print the chat template alone.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object, as from the daemon's /api/show.")
@with_settings
def command(model: str, template: bool, as_json: bool, settings: Settings) -> None:
    """Show what is known about MODEL, without loading it."""
    if template and as_json:
        raise click.UsageError("give either --template or --json")
    shown = asyncio.run(_show(ensure_daemon(settings), for_daemon(model)))
    if as_json:
        print(json.dumps(shown, indent=2))
    elif template:
        print(for_stdout(shown.get("template") or ""))
    else:
        print(model_card(shown))


async def _show(base_url: str, model: str) -> dict[str, Any]:
    async with Client(base_url) as client:
        return await client.show(model)
