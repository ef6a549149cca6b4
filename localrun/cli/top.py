"""`localrun top`: the monitor of the terminal interface, its snapshots for scripts, and recordings of it."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing, suppress
from pathlib import Path

import click
import msgspec

from localrun.cli.columns import columns, duration
from localrun.cli.connection import with_settings
from localrun.cli.daemon import ensure_daemon, require_daemon
from localrun.client import Client
from localrun.config import Settings
from localrun.snapshot import RequestRow, Snapshot

_HEADER = ("STATE", "CLIENT", "ROUTE", "MODEL", "PROMPT", "CACHED", "OUTPUT", "TOK/S", "TTFT", "AGE")


@click.command("top")
@click.option("--once", is_flag=True, help="Print what is now, and end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: as JSON, as /localrun/v1/snapshot has it.")
@click.option("--record", type=click.Path(path_type=Path), help="Write snapshots to this new file until Ctrl-C.")
@click.option("--replay", type=click.Path(path_type=Path, exists=True), help="Watch a recording.")
@click.option("--speed", type=click.FloatRange(0.1, 100), default=1.0, help="How fast to replay (1 is as it was).")
@with_settings
def command(
    once: bool, as_json: bool, record: Path | None, replay: Path | None, speed: float, settings: Settings
) -> None:
    """Watch requests, engines and the machine, live."""
    if sum((once, record is not None, replay is not None)) > 1:
        raise click.UsageError("--once, --record and --replay exclude each other")
    if as_json and not once:
        raise click.UsageError("--json goes with --once")
    if once:
        _print(asyncio.run(_snapshot(require_daemon(settings))), as_json=as_json)
    elif record is not None:
        with suppress(KeyboardInterrupt):
            asyncio.run(_record(require_daemon(settings), record))
    else:
        _watch(settings, replay, speed)


def _watch(settings: Settings, replay: Path | None, speed: float) -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("the monitor needs a terminal; without one use --once, with --json for scripts")
    from localrun.tui.app import own_app
    from localrun.tui.recording import Replay

    if replay is not None:
        own_app(str(replay), connect=lambda *_: Replay(replay, speed=speed), first="monitor", is_replay=True).run()
    else:
        own_app(ensure_daemon(settings), first="monitor", start_daemon=lambda: ensure_daemon(settings)).run()


async def _snapshot(base_url: str) -> Snapshot:
    async with Client(base_url) as client:
        return await client.snapshot()


async def _record(base_url: str, path: Path) -> None:
    from localrun.tui.recording import Recorder

    try:
        recorder = Recorder(path)
    except OSError as error:
        raise click.UsageError(f"cannot record to {path}: {error.strerror or error}") from error
    print(f"recording to {path}; Ctrl-C ends it", file=sys.stderr)
    try:
        async with Client(base_url) as client, aclosing(client.events()) as snapshots:
            async for snapshot in snapshots:
                recorder.write(snapshot)
    finally:
        recorder.close()


def _print(snapshot: Snapshot, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(snapshot)).decode())
        return
    aggregate, system = snapshot.aggregate, snapshot.system
    print(
        f"decode {aggregate.decode_tokens_per_s:.1f} tok/s  prefill {aggregate.prefill_tokens_per_s:.1f} tok/s  "
        f"running {aggregate.running}  queued {aggregate.queued}  CPU {system.cpu_percent:.0f}%"
    )
    print(columns(_HEADER, [_cells(row) for row in snapshot.requests]))


def _cells(row: RequestRow) -> tuple[str, ...]:
    return (
        str(row.state),
        row.client,
        row.api,
        row.model,
        _text(row.prompt_tokens),
        _text(row.cached_tokens),
        str(row.output_tokens),
        "-" if row.tokens_per_s is None else f"{row.tokens_per_s:.1f}",
        "-" if row.ttft_s is None else f"{row.ttft_s:.3f} s",
        duration(row.age_s),
    )


def _text(number: int | None) -> str:
    return "-" if number is None else str(number)
