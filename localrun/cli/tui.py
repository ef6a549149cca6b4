"""`localrun` without a command: the terminal interface on a daemon that is started if need be."""

from __future__ import annotations

import sys

import click

from localrun.cli.connection import load_settings


def open_tui(host: str | None, port: int | None) -> None:
    """Raises click.UsageError without a terminal, and what `ensure_daemon` raises."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError(
            "the interface needs a terminal; without one use `localrun run MODEL PROMPT` or `localrun serve`"
        )
    settings = load_settings({"host": host, "port": port})
    from localrun.cli.daemon import ensure_daemon

    base_url = ensure_daemon(settings)
    from localrun.tui.app import own_app

    own_app(base_url, start_daemon=lambda: ensure_daemon(settings)).run()
