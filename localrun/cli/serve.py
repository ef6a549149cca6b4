"""`localrun serve`: the daemon in the foreground. Its flags are the fields of `config.Settings`."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin, get_type_hints

import click

from localrun import config
from localrun.cli.connection import load_settings


def _setting_options() -> list[click.Parameter]:
    hints = get_type_hints(config.Settings, include_extras=True)
    defaults = config.Settings()
    options: list[click.Parameter] = []
    for field in config.Settings.__struct_fields__:
        hint = hints[field]
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        default = getattr(defaults, field)
        shown = f"default {default}; " if default != "" else ""
        help_text = f"{config.HELP[field]} ({shown}{config.env_name(field)})"
        options.append(click.Option(["--" + field.replace("_", "-")], type=kind, help=help_text))
    return options


@click.command("serve", params=_setting_options())
@click.option(
    "--idle-exit", "idle_exit_s", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="End after this long without requests (default: never).",
)  # fmt: skip
def command(idle_exit_s: float | None, **flags: Any) -> None:
    """Run the daemon in the foreground, until Ctrl-C.

    Every option can also be set in `localrun.toml` in the configuration folder, or in the environment variable that its
    line names; the command line wins over the environment, and the environment over the file.
    """
    settings = load_settings(flags)
    from localrun.server.app import serve

    try:
        serve(settings, idle_exit_s)
    except config.ConfigError as error:
        raise click.UsageError(str(error)) from None
