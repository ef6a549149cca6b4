"""`localrun version`: this program's version, and the running daemon's."""

from __future__ import annotations

import json

import click

from localrun import __version__, errors
from localrun.cli.connection import with_settings
from localrun.cli.daemon import daemon_version
from localrun.config import Settings


@click.command("version")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object; `daemon` is null when none runs.")
@with_settings
def command(as_json: bool, settings: Settings) -> None:
    """Print the versions of this program and of the daemon, if one is running."""
    try:
        daemon = daemon_version(settings) if settings.port else None
    except (errors.PortBusy, errors.Unavailable):
        daemon = None
    if as_json:
        print(json.dumps({"localrun": __version__, "daemon": daemon}))
        return
    print(f"localrun {__version__}")
    print(f"daemon {daemon}" if daemon else "no daemon is running")
