"""`localrun ps`: the models that are loaded, with the engine process of each."""

from __future__ import annotations

import asyncio

import click
import msgspec

from localrun.cli.columns import columns, duration, size
from localrun.cli.connection import with_settings
from localrun.cli.daemon import require_daemon
from localrun.client import Client
from localrun.config import Settings
from localrun.snapshot import EngineRow

_HEADER = ("NAME", "PID", "STATE", "SIZE", "SLOTS", "KV CELLS", "CONTEXT", "BACKEND", "LAYERS", "UNLOADS IN")


@click.command("ps")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, as `engines` in /localrun/v1/snapshot.")
@with_settings
def command(as_json: bool, settings: Settings) -> None:
    """List the models that are loaded."""
    engines = asyncio.run(_engines(require_daemon(settings)))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(engines)).decode())
    else:
        print(columns(_HEADER, [_cells(engine) for engine in engines]))


def _cells(engine: EngineRow) -> tuple[str, ...]:
    return (
        engine.model,
        "-" if engine.pid is None else str(engine.pid),
        engine.state,
        size(engine.size_bytes),
        f"{engine.slots_busy}/{engine.slots}",
        f"{engine.kv_cells_used}/{engine.kv_cells}",
        str(engine.n_ctx),
        engine.backend or "-",
        _where(engine),
        "never" if engine.expires_in_s is None else duration(engine.expires_in_s),
    )


def _where(engine: EngineRow) -> str:
    """What lies where: layers on GPUs of all layers; the KV cells of a layer lie with it."""
    if not engine.layers:
        return "-"
    if not engine.gpu_layers:
        return f"{engine.layers} in RAM"
    on_gpu = min(engine.gpu_layers, engine.layers)
    in_ram = f", {engine.layers - on_gpu} in RAM" if on_gpu < engine.layers else ""
    return f"{on_gpu} on GPU{in_ram}"


async def _engines(base_url: str) -> list[EngineRow]:
    async with Client(base_url) as client:
        return (await client.snapshot()).engines
