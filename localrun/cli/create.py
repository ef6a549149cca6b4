"""`localrun create`: a new model from a Modelfile.

The text of the Modelfile goes to the daemon, which reads it and answers with the number of the line that is wrong.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import click

from localrun.cli.connection import with_settings
from localrun.cli.daemon import ensure_daemon
from localrun.cli.visible import visible
from localrun.client import Client
from localrun.config import Settings

MAX_MODELFILE_BYTES = 8 * 1024 * 1024


@click.command("create")
@click.argument("model")
@click.option("-f", "--file", "path", type=click.Path(path_type=Path), help="The Modelfile; - is stdin.")
@click.option("--from", "base", help="Without a Modelfile: the model or the GGUF file to begin with.")
@click.option("-q", "--quantize", metavar="TYPE", help="Quantize the weights: q4_K_M, q8_0, ... (from F16, BF16, F32).")
@with_settings
def command(model: str, path: Path | None, base: str | None, quantize: str | None, settings: Settings) -> None:
    """Make MODEL from a Modelfile (./Modelfile unless -f or --from is given).

    A GGUF file that FROM names is used where it lies; nothing is copied.
    """
    if path is not None and base is not None:
        raise click.UsageError("give either --file or --from")
    text, folder = (f"FROM {base}", Path.cwd()) if base is not None else _read(path or Path("Modelfile"))
    body = {"model": model, "modelfile": text, "modelfile_folder": str(folder), "quantize": quantize or ""}
    asyncio.run(_create(ensure_daemon(settings), body))


def _read(path: Path) -> tuple[str, Path]:
    """The text, and the folder that its paths are relative to. Raises click.UsageError."""
    if str(path) == "-":
        return sys.stdin.read(MAX_MODELFILE_BYTES), Path.cwd()
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_MODELFILE_BYTES), path.absolute().parent
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"cannot read the Modelfile: {error}") from None


async def _create(base_url: str, body: dict[str, Any]) -> None:
    progress = _Progress(is_terminal=sys.stdout.isatty())
    try:
        async with Client(base_url) as client, aclosing(client.create(body)) as lines:
            async for said in lines:
                progress.show(said)
    finally:
        progress.end()


class _Progress:
    """Prints what the daemon says. On a terminal, counts of one task overwrite each other; else they are left out."""

    def __init__(self, *, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._status = ""
        self._is_line_open = False

    def show(self, said: dict[str, Any]) -> None:
        status, total = visible(str(said.get("status", ""))), said.get("total") or 0
        if total and self._is_terminal:
            print(f"\r{status}: {100 * (said.get('completed') or 0) // total} %", end="", flush=True)
            self._is_line_open = True
        elif status != self._status:
            self.end()
            print(status, flush=True)
        self._status = status

    def end(self) -> None:
        if self._is_line_open:
            print()
        self._is_line_open = False
