"""The daemon in the foreground (`serve`, whose flags are the fields of `config.Settings`), or as a service of the
user's session (`service`).

Does not: speak to a service manager itself (`localrun.service` does).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import click
import msgspec

from localrun import config, errors, ollama_environment
from localrun.cli import exits
from localrun.cli.arguments import given_flags, load_settings, with_settings
from localrun.cli.daemon import POLL_INTERVAL_S, START_TIMEOUT_S, base_url, daemon_version, version_if_any
from localrun.cli.text import say, tell
from localrun.config import Settings

if TYPE_CHECKING:
    from localrun.cluster.door import Door
    from localrun.service.manager import Manager


def _setting_options() -> list[click.Parameter]:
    hints = get_type_hints(config.Settings, include_extras=True)
    defaults = config.Settings()
    options: list[click.Parameter] = []
    for field in config.FIELDS:
        hint = hints[field]
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        default = getattr(defaults, field)
        shown = f"default {default}; " if default != "" else ""
        help_text = f"{config.help_texts()[field]} ({shown}{config.env_name(field)})"
        options.append(click.Option(["--" + field.replace("_", "-")], type=kind, help=help_text))
    return options


@click.command("serve", params=_setting_options())
@click.option(
    "--idle-exit", "idle_exit_s", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="Exit after this long without requests (default: never).",
)  # fmt: skip
def serve_command(idle_exit_s: float | None, **flags: Any) -> None:
    """Run the daemon in the foreground until Ctrl-C.

    Every option can also be set in `localrun.toml` in the configuration folder, or with the environment variable named
    beside it. The command line takes precedence over the environment, and the environment over the file. Ollama's
    variables (OLLAMA_HOST and others) apply where none of these is set."""
    run_daemon(load_settings(flags, serves=True), idle_exit_s)


def run_daemon(settings: Settings, idle_exit_s: float | None = None, elsewhere: Door | None = None) -> None:
    """See `app.serve`. Raises click.UsageError for settings, and PortBusy, which says who has the port."""
    from localrun.server.app import serve

    try:
        serve(settings, idle_exit_s, elsewhere)
    except config.ConfigError as error:
        named = " (OLLAMA_HOST; --host and LOCALRUN_HOST count before it)"
        raise click.UsageError(f"{error}{named if ollama_environment.named_host(settings) else ''}") from None
    except errors.PortBusy:
        version = daemon_version(msgspec.structs.replace(settings, host="127.0.0.1"))  # says who else it is
        if version is None:
            raise
        raise errors.PortBusy(
            f"localrun {version} runs at port {settings.port} already, and every command uses it; to start it anew, "
            f"end it first (localrun stop --daemon), or give this one another --port"
        ) from None


@click.group("service")
def service_command() -> None:
    """Start the daemon with your session, as a systemd user unit, a launchd agent or a Windows task.

    It needs no administrator rights, and is restarted if it crashes.
    """


@service_command.command("install")
@click.option("--host", help="Address to listen on (LOCALRUN_HOST).")
@click.option("--port", type=int, help="Port to listen on (LOCALRUN_PORT).")
def install(host: str | None, port: int | None) -> None:
    """Install the service and start it. Repeat this after an upgrade or when variables change.

    The service gets the LOCALRUN_* and OLLAMA_* variables of this shell, and those for Hugging Face, proxies and GPUs.
    It reads the configuration file each time it starts.
    """
    from localrun.models.storage.hub_cache import folder as hub_cache_folder
    from localrun.service.manager import left_out, make_plan

    flags = given_flags({"host": host or None, "port": port})
    settings = load_settings(flags)
    plan = make_plan(
        python=sys.executable, flags=flags, environ=os.environ, folders=config.folders(),
        models_folder=config.models_folder(settings), hub_cache=hub_cache_folder(), shell_folder=Path.cwd(),
    )  # fmt: skip
    url = base_url(settings)
    manager = _manager()
    if not manager.state().is_running and daemon_version(settings) is not None:
        raise errors.ServiceFailed(
            f"a daemon that is not the service is running at {url}; stop it (localrun stop --daemon) and try again"
        )
    manager.install(plan)
    for name, way_out in left_out().items():
        tell("warning", f"the service does not get {name}, which contains a secret; {way_out}")
    say(f"installed {manager.path}")
    version = _wait_for(settings)
    say(f"localrun {version} is listening on {url}, and starts with every session")
    if manager.name == "systemd":
        print("to keep it running while you are logged out: loginctl enable-linger")


@service_command.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@with_settings
def status(as_json: bool, settings: Settings) -> int:
    """Show whether the service is installed and running. The exit code is 1 if it is not running."""
    manager = _manager()
    state = manager.state()
    version = version_if_any(settings)
    if as_json:
        print(json.dumps({"manager": manager.name, "file": str(manager.path), "daemon": version, **state._asdict()}))
    elif not state.is_installed:
        say("the service is not installed; `localrun service install` installs it")
    else:
        pid = f", pid {state.pid}" if state.pid else ""
        say(f"{manager.name}: {state.detail}{pid}\nfile: {manager.path}")
        say(f"daemon: localrun {version} at {base_url(settings)}" if version else "daemon: does not answer")
    return exits.OK if state.is_running else exits.ERROR


@service_command.command("logs")
@click.option(
    "--lines", "-n", "n_lines", type=click.IntRange(min=1), default=50, show_default=True, help="Number of lines."
)
@click.option("--follow", "-f", is_flag=True, help="Keep printing new lines until Ctrl-C.")
def logs(n_lines: int, follow: bool) -> int:
    """Show the last lines that the service printed."""
    return _manager().show_logs(n_lines=n_lines, follow=follow)


@service_command.command("uninstall")
def uninstall() -> None:
    """Stop the service and remove it. Models, caches and settings are kept."""
    manager = _manager()
    if manager.uninstall():
        say(f"removed {manager.path}")
    else:
        print("the service is not installed")


def _manager() -> Manager:
    return manager_of(config.folders(), home=Path.home(), environ=os.environ)


def manager_of(
    folders: config.Folders, *, platform: str = sys.platform, home: Path, environ: Mapping[str, str]
) -> Manager:
    """The service manager of this system. Raises NotSupported on a system that has none of the three."""
    if platform == "darwin":
        from localrun.service.launchd import Launchd

        return Launchd(home=home, log=folders.state / "service.log")
    if platform == "win32":
        from localrun.service.windows import TaskScheduler

        return TaskScheduler(folders=folders, environ=environ)
    if platform.startswith("linux"):
        from localrun.service.systemd import Systemd

        return Systemd(home=home, environ=environ)
    raise errors.NotSupported(
        f"localrun does not know the service manager of {platform}; start `localrun serve` by its own means"
    )


def _wait_for(settings: Settings) -> str:
    """The version of the daemon once it answers. Raises ServiceFailed when it does not."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        # None also while it is too busy starting, or the one before it is ending.
        version = version_if_any(settings)
        if version is not None:
            return version
        time.sleep(POLL_INTERVAL_S)
    raise errors.ServiceFailed(
        f"the service was started, but there is no answer at {base_url(settings)} after {START_TIMEOUT_S:g} s; "
        "`localrun service logs` shows why"
    )
