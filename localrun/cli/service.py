"""`localrun service`: the daemon as a service of the user's session.

Does not: speak to a service manager itself (`localrun.service` does).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrun import config, errors
from localrun.cli import exits
from localrun.cli.connection import base_url, load_settings, with_settings
from localrun.cli.daemon import POLL_INTERVAL_S, START_TIMEOUT_S, daemon_version
from localrun.config import Settings

if TYPE_CHECKING:
    from localrun.service.manager import Manager


@click.group("service")
def command() -> None:
    """Have the daemon start with your session: a systemd user unit, a launchd agent, or a Windows task.

    It needs no special rights, listens on loopback alone, and is started again when it crashes.
    """


@command.command("install")
@click.option("--host", help="Address that it shall listen on (LOCALRUN_HOST).")
@click.option("--port", type=int, help="Port that it shall listen on (LOCALRUN_PORT).")
def install(host: str | None, port: int | None) -> None:
    """Install the service and start it. Again after an upgrade, or after changing variables.

    The LOCALRUN_* variables of this shell are taken over, those of Hugging Face, proxies and GPUs, too; the
    configuration file is read whenever the service starts.
    """
    from localrun.models.hub_cache import folder as hub_cache_folder
    from localrun.service.plan import left_out, make_plan

    before = click.get_current_context().find_root().params
    flags = {"host": host or before.get("host"), "port": port if port is not None else before.get("port")}
    settings = load_settings(flags)
    plan = make_plan(
        python=sys.executable, flags=flags, environ=os.environ, folders=config.folders(),
        models_folder=config.models_folder(settings), hub_cache=hub_cache_folder(), shell_folder=Path.cwd(),
    )  # fmt: skip
    url = base_url(settings)
    manager = _manager()
    if not manager.state().is_running and daemon_version(settings) is not None:
        raise errors.ServiceFailed(
            f"a daemon that is not the service answers at {url}; end it (localrun stop --daemon) and try again"
        )
    manager.install(plan)
    for name, way_out in left_out().items():
        print(f"warning: {name} is not taken over, as it has a secret in it; {way_out}", file=sys.stderr)
    print(f"installed {manager.path}")
    version = _wait_for(settings)
    print(f"localrun {version} is listening on {url}, and starts with every session")
    if manager.name == "systemd":
        print("to have it run while you are logged out, too: loginctl enable-linger")


@command.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@with_settings
def status(as_json: bool, settings: Settings) -> int:
    """Show whether the service is installed and runs. Exit code 1 when it does not run."""
    manager = _manager()
    state = manager.state()
    try:
        version = daemon_version(settings) if settings.port else None
    except (errors.PortBusy, errors.Unavailable):
        version = None
    if as_json:
        print(json.dumps({"manager": manager.name, "file": str(manager.path), "daemon": version, **state._asdict()}))
    elif not state.is_installed:
        print("the service is not installed; `localrun service install` does that")
    else:
        pid = f", pid {state.pid}" if state.pid else ""
        print(f"{manager.name}: {state.detail}{pid}\nfile: {manager.path}")
        print(f"daemon: localrun {version} at {base_url(settings)}" if version else "daemon: does not answer")
    return exits.OK if state.is_running else exits.ERROR


@command.command("logs")
@click.option("--lines", "-n", "n_lines", type=click.IntRange(min=1), default=50, show_default=True, help="How many.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes, until Ctrl-C.")
def logs(n_lines: int, follow: bool) -> int:
    """Show what the service has printed last."""
    return _manager().show_logs(n_lines=n_lines, follow=follow)


@command.command("uninstall")
def uninstall() -> None:
    """Stop the service and remove it. Models, caches and settings stay."""
    manager = _manager()
    if manager.uninstall():
        print(f"removed {manager.path}")
    else:
        print("the service is not installed")


def _manager() -> Manager:
    from localrun.service.manager import manager

    return manager(config.folders(), home=Path.home(), environ=os.environ)


def _wait_for(settings: Settings) -> str:
    """The version of the daemon once it answers. Raises ServiceFailed when it does not."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            version = daemon_version(settings)
        except (errors.PortBusy, errors.Unavailable):  # it may be too busy starting, or the one before it is ending
            version = None
        if version is not None:
            return version
        time.sleep(POLL_INTERVAL_S)
    raise errors.ServiceFailed(
        f"the service was started, but nothing answers at {base_url(settings)} after {START_TIMEOUT_S:g} s; "
        "`localrun service logs` shows why"
    )
