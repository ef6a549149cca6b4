"""Which daemon a command talks to: the options `--host` and `--port`, and the settings behind them.

Does not: connect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from localrun import config

T = TypeVar("T")


def with_settings(function: Callable[..., T]) -> Callable[..., T]:
    """Give a command `--host` and `--port`, and its function the argument `settings`."""

    @click.option("--host", help="Address of the daemon (LOCALRUN_HOST).")
    @click.option("--port", type=int, help="Port of the daemon (LOCALRUN_PORT).")
    @functools.wraps(function)
    def with_connection(*arguments: Any, host: str | None, port: int | None, **options: Any) -> T:
        return function(*arguments, settings=load_settings({"host": host, "port": port}), **options)

    return with_connection


def load_settings(flags: Mapping[str, Any]) -> config.Settings:
    """The settings, with this command's flags over those given before the command's name. Raises click.UsageError."""
    context = click.get_current_context(silent=True)
    before = {} if context is None else context.find_root().params
    given = {field: value for field, value in flags.items() if value is not None}
    try:
        return config.load({"host": before.get("host"), "port": before.get("port")} | given)
    except config.ConfigError as error:
        raise click.UsageError(str(error)) from None


def base_url(settings: config.Settings) -> str:
    """The daemon's address as a URL. Raises click.UsageError for port 0, behind which no daemon can be found."""
    if settings.port == 0:
        raise click.UsageError("port 0 picks a free port, so it names no daemon; use the port that it listens on")
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"
