"""`localrun show`: what is known about a model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import click

from localrun.cli.connection import with_settings
from localrun.cli.daemon import ensure_daemon
from localrun.cli.fit_card import fit_card
from localrun.cli.model_card import model_card
from localrun.cli.model_name import for_daemon
from localrun.cli.visible import for_stdout
from localrun.client import Client
from localrun.config import Settings


@click.command("show")
@click.argument("model")
@click.option("--template", is_flag=True, help="Print the chat template alone.")
@click.option("--modelfile", is_flag=True, help="Print a Modelfile that makes the same model.")
@click.option(
    "--fit", "as_fit", is_flag=True, help="Show how MODEL would be opened on this machine, and what it takes."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object, as from the daemon's /api/show.")
@with_settings
def command(model: str, template: bool, modelfile: bool, as_fit: bool, as_json: bool, settings: Settings) -> None:
    """Show what is known about MODEL, without loading it."""
    if template and as_json:
        raise click.UsageError("give either --template or --json")
    if modelfile and (template or as_fit or as_json):
        raise click.UsageError("give --modelfile alone")
    if as_fit:
        if template:
            raise click.UsageError("give either --template or --fit")
        fit = asyncio.run(_fit(ensure_daemon(settings), for_daemon(model)))
        print(json.dumps(fit, indent=2) if as_json else fit_card(fit))
        return
    shown = asyncio.run(_show(ensure_daemon(settings), for_daemon(model)))
    if as_json:
        print(json.dumps(shown, indent=2))
    elif template or modelfile:
        print(for_stdout(shown.get("template" if template else "modelfile") or ""), end="\n" if template else "")
    else:
        print(model_card(shown))


async def _fit(base_url: str, model: str) -> dict[str, Any]:
    async with Client(base_url) as client:
        return await client.fit(model)


async def _show(base_url: str, model: str) -> dict[str, Any]:
    async with Client(base_url) as client:
        return await client.show(model)
