"""`localrun cache`: what is kept of prompts, in memory and on disk; clearing it.

A running daemon is asked. Without one, what lies on disk is read and deleted here.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from localrun import config, errors, kv_folders
from localrun.cli.arguments import complete_here, with_settings
from localrun.cli.daemon import ask, base_url, daemon_version, for_daemon
from localrun.cli.text import ago, print_json, say, size, table
from localrun.config import Settings
from localrun.kv_folders import ModelFolder
from localrun.snapshot import CacheCleared, CacheReport, CacheRow

_HEADER = ("NAME", "KV CELLS", "IN MEMORY", "ON DISK", "LAST USED", "HIT RATE", "NODE")
_SPARE = ("KV CELLS", "LAST USED", "HIT RATE", "IN MEMORY")


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
        _show(report, datetime.now(UTC))


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
    folders = [folder for folder in kv_folders.survey(_folder()) if model is None or _is_of(folder, model)]
    if model is not None and not folders:
        raise errors.ModelNotFound(model)
    return CacheCleared(disk_bytes=sum(kv_folders.remove(folder.path) for folder in folders) if disk else 0)


def _is_of(folder: ModelFolder, model: str) -> bool:
    return folder.is_of(for_daemon(model).removesuffix(":latest"))


def _show(report: CacheReport, now: datetime) -> None:
    n_columns = len(_HEADER) if any(row.node for row in report.models) else len(_HEADER) - 1
    print(table(_HEADER[:n_columns], [_cells(row, now)[:n_columns] for row in report.models], spare=_SPARE))
    memory = f"{size(report.ram_bytes)} in memory (at most {_limit(report.ram_limit_bytes)} for each loaded model)"
    disk = f"{size(report.disk_bytes)} on disk (at most {_limit(report.disk_limit_bytes)} together), in"
    say(f"\n{memory}\n{disk} {report.disk_folder}")


def _limit(limit_bytes: int) -> str:
    return size(limit_bytes) if limit_bytes else "none"


def _cells(row: CacheRow, now: datetime) -> tuple[str, ...]:
    is_loaded = row.pid is not None
    used_at = None if row.disk_used_at_s is None else datetime.fromtimestamp(row.disk_used_at_s, UTC)
    return (
        row.model,
        f"{row.kv_cells_used}/{row.kv_cells}" if is_loaded else "-",
        _holding(row.ram_bytes, row.ram_entries) if is_loaded else "-",
        _holding(row.disk_bytes, row.disk_entries),
        "-" if used_at is None else ago(used_at, now),
        "-" if row.hit_rate is None else f"{row.hit_rate:.0%}",
        row.node or "-",
    )


def _holding(size_bytes: int, n_entries: int) -> str:
    return f"{size(size_bytes)} in {n_entries}" if n_entries else size(size_bytes)
