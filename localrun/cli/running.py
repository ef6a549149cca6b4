"""The commands about what runs: ps, top, logs and stop; and `localrun cache`, what is kept of prompts, in memory and on
disk. A running daemon is asked for that; without one, what lies on disk is read and deleted here.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import click

from localrun import config, errors, kv_folders
from localrun.cli.arguments import complete_here, with_settings
from localrun.cli.daemon import (
    ask,
    base_url,
    daemon_version,
    ensure_daemon,
    for_daemon,
    log_path,
    require_daemon,
    starter,
    wait_until_gone,
)
from localrun.cli.text import (
    Column,
    ago,
    duration,
    one_line,
    print_json,
    progress,
    say,
    short_path,
    size,
    table,
    wrapped,
)
from localrun.client import Client
from localrun.config import Settings, in_short
from localrun.errors import LocalrunError
from localrun.snapshot import CacheCleared, CacheReport, CacheRow, EngineRow, LogLine, RequestRow, Snapshot
from localrun.visible import visible

END_TIMEOUT_S = 60.0


@click.command("ps")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, as `engines` in /localrun/v1/snapshot.")
@with_settings
def ps_command(as_json: bool, settings: Settings) -> None:
    """List the loaded models.

    WEIGHTS+KV is the memory of a model's weights and of the room for its context. IN RAM is what its process holds of
    main memory at the moment, as in the monitor; what was never used does not count, nor what lies on a GPU. `localrun
    show MODEL` has what it needs in all, and `localrun list` the size of the files.
    """
    if as_json:
        print_json(ask(require_daemon(settings), lambda client: client.snapshot()).engines)
    else:
        engines = ask(require_daemon(settings), _named_engines)
        print(_by_node(_ENGINES, engines))


async def _named_engines(client: Client) -> list[EngineRow]:
    """Those that were loaded by the path of a file, by a name that the same file has, if it has one."""
    engines = (await client.snapshot()).engines
    by_path = {engine.model: engine for engine in engines if os.path.isabs(engine.model)}
    rows = (await client.store())["models"] if by_path else []
    for row in rows:
        if not by_path:
            break
        with suppress(LocalrunError):  # of a model that has just gone
            path = (await client.show(row["name"])).get("localrun", {}).get("path")
            if path in by_path:
                by_path.pop(path).name = row["name"]
    return engines


Row = TypeVar("Row", EngineRow, RequestRow, CacheRow)


def _by_node(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    """A table whose last column is the node, if there is a cluster."""
    return table(columns if any(row.node for row in rows) else columns[:-1], rows)


def _where(engine: EngineRow) -> str:
    """What lies where: layers on GPUs of all layers; the KV cells of a layer lie with it. Of those that were moved
    there the output is the first, and no layer."""
    if not engine.layers:
        return "-"
    on_gpu = min(max(0, engine.gpu_layers - 1), engine.layers)
    in_ram = engine.layers - on_gpu
    there = "" if not engine.gpu_layers else f"{on_gpu} on GPU" if on_gpu else "output on GPU"
    parts = [there, f"{in_ram} in RAM" if in_ram else ""]
    return ", ".join(filter(None, parts))


_ENGINES: list[Column[EngineRow]] = [
    Column("NAME", lambda row: short_path(row.name or row.model)),
    Column("PID", lambda row: "-" if row.pid is None else str(row.pid), goes=3),
    Column("STATE", lambda row: "preparing the device" if row.is_preparing else row.state),
    Column("WEIGHTS+KV", lambda row: "-" if row.state == "loading" else size(row.size_bytes), goes=10),
    Column("IN RAM", lambda row: "-" if row.rss_bytes is None else size(row.rss_bytes), goes=7),
    Column("SLOTS", lambda row: f"{row.slots_busy}/{row.slots}", goes=6),
    Column("KV CELLS", lambda row: f"{row.kv_cells_used}/{row.kv_cells}", goes=5),
    Column("CONTEXT", lambda row: str(row.n_ctx), goes=8),
    Column("LOADED WITH", lambda row: " ".join(f"{k}={one_line(v)}" for k, v in row.load.items()) or "-", goes=1),
    Column("BACKEND", lambda row: row.backend or "-", goes=2),
    Column("LAYERS", _where, goes=4),
    Column("UNLOADS IN", lambda row: "never" if row.expires_in_s is None else duration(row.expires_in_s), goes=9),
    Column("NODE", lambda row: row.node),
]


@click.command("top")
@click.option("--once", is_flag=True, help="Print one snapshot and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print JSON, as in /localrun/v1/snapshot.")
@click.option("--record", type=click.Path(path_type=Path), help="Record snapshots to this new file until Ctrl-C.")
@click.option("--replay", type=click.Path(path_type=Path, exists=True), help="Play a recording.")
@click.option("--speed", type=click.FloatRange(0.1, 100), default=1.0, help="Speed of the replay; 1 is real time.")
@with_settings
def top_command(
    once: bool, as_json: bool, record: Path | None, replay: Path | None, speed: float, settings: Settings
) -> None:
    """Watch requests, engines and the machine live.

    Prefill computes a prompt, and decode the answer, token by token. TTFT is the time to the first token, ITL the time
    between two tokens. A slot is room for one running request, a KV cell the memory of one token. Cached tokens did not
    have to be computed again. A step is one pass through the model for all running requests. F10 in the monitor
    explains every key and word.
    """
    if sum((once, record is not None, replay is not None)) > 1:
        raise click.UsageError("give only one of --once, --record and --replay")
    if as_json and not once:
        raise click.UsageError("--json needs --once")
    if once:
        snapshot = ask(require_daemon(settings), lambda client: client.snapshot())
        if as_json:
            print_json(snapshot)
        else:
            print(_as_text(snapshot))
    elif record is not None:
        with suppress(KeyboardInterrupt):
            asyncio.run(_record(require_daemon(settings), record))
    else:
        _watch(settings, replay, speed)


def _watch(settings: Settings, replay: Path | None, speed: float) -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("the monitor needs a terminal; without one use --once, with --json for scripts")
    from localrun.tui.app import own_app
    from localrun.tui.daemon import Replay

    if replay is not None:
        own_app(str(replay), connect=lambda *_: Replay(replay, speed=speed), first="monitor", is_replay=True).run()
    else:
        own_app(ensure_daemon(settings), first="monitor", start_daemon=starter(settings)).run()


async def _record(base_url: str, path: Path) -> None:
    from localrun.tui.daemon import Recorder

    try:
        recorder = Recorder(path)
    except OSError as error:
        raise click.UsageError(f"cannot record to {path}: {error.strerror or error}") from error
    progress(f"recording to {path}; press Ctrl-C to stop")
    try:
        async with Client(base_url) as client, aclosing(client.events()) as snapshots:
            async for snapshot in snapshots:
                recorder.write(snapshot)
    finally:
        recorder.close()


def _as_text(snapshot: Snapshot) -> str:
    aggregate, system = snapshot.aggregate, snapshot.system
    drafts = "" if aggregate.draft_hit_rate is None else f"drafts {aggregate.draft_hit_rate:.0%}  "
    row = snapshot.longest_step
    longest = "" if row is None else f"longest step {duration(row.seconds)} ({row.main_part})  "
    said = (
        f"decode {aggregate.decode_tokens_per_s:.1f} tok/s  prefill {aggregate.prefill_tokens_per_s:.1f} tok/s  "
        f"running {aggregate.running}  queued {aggregate.queued}  {drafts}{longest}CPU {system.cpu_percent:.0f}%"
    )
    return f"{wrapped(said)}\n{_by_node(_REQUESTS, snapshot.requests) if snapshot.requests else 'no requests'}"


def _rate(row: RequestRow) -> str:
    # Of an answer that has ended there is only the average.
    rate = row.tokens_per_s_avg if row.tokens_per_s is None else row.tokens_per_s
    return "-" if rate is None else f"{rate:.1f}"


_REQUESTS: list[Column[RequestRow]] = [
    Column("STATE", lambda row: row.state),
    Column("CLIENT", lambda row: row.client, goes=6),
    Column("ROUTE", lambda row: row.api, goes=3),
    Column("MODEL", lambda row: short_path(row.model) + (f" ({row.tier})" if row.tier else "")),
    Column("PROMPT", lambda row: "-" if row.prompt_tokens is None else str(row.prompt_tokens), goes=5),
    Column("CACHED", lambda row: "-" if row.cached_tokens is None else str(row.cached_tokens), goes=2),
    Column("OUTPUT", lambda row: str(row.output_tokens), goes=7),
    Column("DRAFTS", lambda row: "-" if row.draft_hit_rate is None else f"{row.draft_hit_rate:.0%}", goes=1),
    Column("TOK/S", _rate),
    Column("TTFT", lambda row: "-" if row.ttft_s is None else f"{row.ttft_s:.3f} s", goes=8),
    Column("AGE", lambda row: duration(row.age_s), goes=4),
    Column("NODE", lambda row: row.node),
]


@click.command("logs")
@click.option(
    "--lines",
    "-n",
    "n_lines",
    type=click.IntRange(min=1, max=1_000_000),
    default=50,
    show_default=True,
    help="Number of lines.",
)
@click.option("--follow", "-f", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@with_settings
def logs_command(n_lines: int, follow: bool, settings: Settings) -> None:
    """Show the last lines of the daemon's log, wherever it runs.

    If no daemon runs here, they are those of the last one that a command started in the background.
    """
    path = log_path(settings)
    if not follow and daemon_version(settings) is None and path.is_file():
        progress(f"no daemon is running; the log of the last one is {path}")
        with path.open(encoding="utf-8", errors="replace") as file:
            print("".join(map(visible, deque(file, n_lines))), end="")
        return
    with suppress(KeyboardInterrupt):
        asyncio.run(_print_log(require_daemon(settings), n_lines, follow=follow))


async def _print_log(url: str, n_lines: int, *, follow: bool) -> None:
    async with Client(url) as client:
        async with aclosing(client.logs(follow=False)) as lines:
            kept = deque([line async for line in lines], n_lines)
        for line in kept:
            _print_line(line)
        if follow:
            async with aclosing(client.logs(kept[-1].number if kept else 0)) as lines:
                async for line in lines:
                    _print_line(line)


def _print_line(line: LogLine) -> None:
    when = datetime.fromtimestamp(line.time_s).astimezone().isoformat(" ", "seconds")
    print(visible(f"{when} {line.level.upper()} {line.source}: {line.text}"), flush=True)


@click.command("stop")
@click.argument("model", required=False, shell_complete=complete_here)
@click.option("--daemon", is_flag=True, help="Stop the daemon instead of unloading a model.")
@with_settings
def stop_command(model: str | None, daemon: bool, settings: Settings) -> None:
    """Unload MODEL when its running requests have finished, or stop the daemon."""
    if daemon == (model is not None):
        raise click.UsageError("give either a MODEL or --daemon")
    url = require_daemon(settings)
    if model is not None:
        say(asyncio.run(_unload(url, for_daemon(model))))
    else:
        ask(url, lambda client: client.shutdown())
        wait_until_gone(settings, END_TIMEOUT_S)
        print("the daemon has stopped")


async def _unload(url: str, model: str) -> str:
    """Unload a model; what to tell the user."""
    async with Client(url) as client:
        before = {row["name"] for row in await client.loaded()}
        await client.unload(model)
        after = {row["name"] for row in await client.loaded()}
        rows = (await client.store())["models"] if after else []
    if before - after:
        return f"unloaded {model}"
    name = in_short(model)
    tiers = (row["tier"] for row in rows if in_short(row["name"]) == name and "tier" in row)
    tier = next(tiers, {"small": name, "large": name})
    is_loaded = not after.isdisjoint((tier["small"], tier["large"]))
    return f"{model} will be unloaded when its requests have finished" if is_loaded else f"{model} was not loaded"


# --- cache ---


@click.group("cache", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object, as in the daemon's /localrun/v1/cache.")
@with_settings
@click.pass_context
def cache_command(context: click.Context, as_json: bool, settings: Settings) -> None:
    """Show the prompt cache: the saved state of prompts, which need not be computed again.

    Prefixes are kept in KV cells while they are in use, then in memory, then on disk, where they outlive the daemon.
    """
    if context.invoked_subcommand is not None:
        return
    report = _report(settings)
    if as_json:
        print_json(report)
    else:
        _show(report)


@cache_command.command("clear")
@click.argument("model", required=False, shell_complete=complete_here)
@click.option("--ram", is_flag=True, help="Clear only memory.")
@click.option("--disk", is_flag=True, help="Clear only the disk; what is still in memory is written again.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@with_settings
def clear(model: str | None, ram: bool, disk: bool, yes: bool, settings: Settings) -> None:
    """Clear the prompt cache of MODEL, or of all models. Running requests are not affected."""
    where = "in memory" if ram and not disk else "on disk" if disk and not ram else "in memory and on disk"
    if not yes and sys.stdin.isatty():
        click.confirm(f"Clear the prompt cache {where} of {model or 'all models'}?", abort=True, err=True)
    cleared = _clear(settings, model, ram=ram or not disk, disk=disk or not ram)
    print(f"freed {size(cleared.ram_bytes)} of memory and {size(cleared.disk_bytes)} on disk")


@cache_command.command("prune")
def prune() -> None:
    """Delete cached prompts of models that no longer exist, and empty folders."""
    gone = [folder for folder in kv_folders.survey(_folder()) if folder.is_abandoned or not folder.files]
    freed_bytes = sum(kv_folders.remove(folder.path) for folder in gone)
    print(f"deleted {len(gone)} {'folder' if len(gone) == 1 else 'folders'}, freed {size(freed_bytes)} on disk")


def _folder() -> Path:
    return kv_folders.kv_folder(config.folders().cache)


def _report(settings: Settings) -> CacheReport:
    if daemon_version(settings) is not None:
        return ask(base_url(settings), lambda client: client.cache())
    rows: dict[str, CacheRow] = {}
    for folder in kv_folders.survey(_folder()):
        if not folder.files:
            continue
        row = rows.setdefault(folder.owner, CacheRow(model=folder.model_name))
        row.disk_bytes += folder.size_bytes
        row.disk_entries += folder.n_entries
        row.disk_used_at_s = max(folder.used_at_s or 0.0, row.disk_used_at_s or 0.0) or None
    return CacheReport(
        models=list(rows.values()),
        ram_bytes=0,
        ram_limit_bytes=settings.ram_cache_bytes,
        disk_bytes=sum(row.disk_bytes for row in rows.values()),
        disk_limit_bytes=settings.disk_cache_bytes,
        disk_folder=str(_folder()),
    )


def _clear(settings: Settings, model: str | None, *, ram: bool, disk: bool) -> CacheCleared:
    if daemon_version(settings) is not None:
        name = model and for_daemon(model)
        return ask(base_url(settings), lambda client: client.clear_cache(name, ram=ram, disk=disk))
    own = None if model is None else for_daemon(model).removesuffix(":latest")
    folders = [folder for folder in kv_folders.survey(_folder()) if own is None or folder.is_of(own)]
    if model is not None and not folders:
        raise errors.ModelNotFound(model)
    return CacheCleared(disk_bytes=sum(kv_folders.remove(folder.path) for folder in folders) if disk else 0)


def _show(report: CacheReport) -> None:
    print(_by_node(_CACHES, report.models))
    memory = f"{size(report.ram_bytes)} in memory (at most {_limit(report.ram_limit_bytes)} for each loaded model)"
    disk = f"{size(report.disk_bytes)} on disk (at most {_limit(report.disk_limit_bytes)} together), in"
    say(f"\n{memory}\n{disk} {report.disk_folder}")


def _limit(limit_bytes: int) -> str:
    return size(limit_bytes) if limit_bytes else "none"


def _holding(size_bytes: int, n_entries: int) -> str:
    return f"{size(size_bytes)} in {n_entries}" if n_entries else size(size_bytes)


_CACHES: list[Column[CacheRow]] = [
    Column("NAME", lambda row: short_path(row.model)),
    Column("KV CELLS", lambda row: "-" if row.pid is None else f"{row.kv_cells_used}/{row.kv_cells}", goes=1),
    Column("IN MEMORY", lambda row: "-" if row.pid is None else _holding(row.ram_bytes, row.ram_entries), goes=4),
    Column("ON DISK", lambda row: _holding(row.disk_bytes, row.disk_entries)),
    Column(
        "LAST USED",
        lambda row: ago(datetime.fromtimestamp(row.disk_used_at_s, UTC)) if row.disk_used_at_s else "-",
        goes=2,
    ),
    Column("HIT RATE", lambda row: "-" if row.hit_rate is None else f"{row.hit_rate:.0%}", goes=3),
    Column("NODE", lambda row: row.node or "-"),
]
