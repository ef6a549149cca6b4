"""`localrun pull`: download a model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time

import click

from localrun.cli.connection import with_settings
from localrun.cli.daemon import ensure_daemon
from localrun.cli.model_name import for_daemon
from localrun.cli.pull_meter import PullMeter
from localrun.cli.visible import visible
from localrun.client import Client, PullPiece
from localrun.config import Settings

_STEP_PERCENT = 10


@click.command("pull")
@click.argument("model")
@click.option("--insecure", is_flag=True, help="Allow plain http to a registry that is not on this machine.")
@with_settings
def command(model: str, insecure: bool, settings: Settings) -> None:
    """Download MODEL, or go on with a download that was stopped.

    MODEL is a name of the catalogue (`localrun search` lists them), owner/repo[:QUANT] for a repository on the Hugging
    Face hub, or registry.ollama.ai/owner/name[:tag]. Without a quantization the best that suits this machine's memory
    is taken.
    """
    name = for_daemon(model)
    try:
        asyncio.run(_pull(ensure_daemon(settings), name, insecure=insecure))
    except KeyboardInterrupt:
        print(
            f"stopped; what has come is kept, and `localrun pull {visible(model)}` goes on from there", file=sys.stderr
        )
        raise
    print(f"{visible(name)} is here")


def pull_missing(base_url: str, model: str) -> bool:
    """Pull a model that the daemon does not have, if its name says where it comes from: the catalogue, or a source that
    is named in it. False for all other names. Raises what the pull raises."""
    return asyncio.run(_pull_missing(base_url, model))


async def _pull_missing(base_url: str, model: str) -> bool:
    if os.path.isabs(model):
        return False
    async with Client(base_url) as client:
        if "/" not in model and not await client.catalog(model):
            return False
    print(f"{visible(model)} is not here yet; pulling it", file=sys.stderr)
    await _pull(base_url, model)
    return True


async def _pull(base_url: str, model: str, *, insecure: bool = False) -> None:
    async with Client(base_url, name="localrun pull") as client:
        view = _Bar() if sys.stderr.isatty() else _Lines()
        with view:
            async with contextlib.aclosing(client.pull(model, insecure=insecure)) as pieces:
                async for piece in pieces:
                    view.show(piece)


class _Lines:
    """For a log: every status, and the progress in steps of ten percent."""

    def __init__(self) -> None:
        self._meter = PullMeter()
        self._shown_percent = -_STEP_PERCENT

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to do."""

    def show(self, piece: PullPiece) -> None:
        now_s = time.monotonic()
        if not piece.total:
            self._print(piece.status)
            return
        self._meter.add(piece, now_s)
        if self._meter.percent >= self._shown_percent + _STEP_PERCENT:
            self._shown_percent = self._meter.percent // _STEP_PERCENT * _STEP_PERCENT
            self._print(self._meter.line(now_s))

    def _print(self, text: str) -> None:
        print(visible(text), file=sys.stderr, flush=True)


class _Bar(_Lines):
    """For a terminal: statuses scroll by above one line that is written again and again."""

    def __exit__(self, *_: object) -> None:
        if self._meter.total_bytes:
            print(file=sys.stderr, flush=True)

    def show(self, piece: PullPiece) -> None:
        now_s = time.monotonic()
        self._meter.add(piece, now_s)
        columns = shutil.get_terminal_size().columns - 1
        text = "" if piece.total else visible(piece.status) + "\n"
        if self._meter.total_bytes:
            text += self._meter.line(now_s)[:columns]
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()
