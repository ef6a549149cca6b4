"""The root command: finds commands by the table in `commands.py`, and turns every error into one line and a code.

Does not: import a command before it is called. `localrun` without a command opens the TUI.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from localrun import __version__, errors
from localrun.cli import exits
from localrun.cli.commands import COMMANDS
from localrun.cli.visible import visible

_EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:<5}{meaning}" for code, meaning in exits.MEANINGS.items())


class _TableGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in COMMANDS.items()])


@click.group(cls=_TableGroup, invoke_without_command=True, epilog=_EPILOG)
@click.option("--host", help="Address of the daemon (LOCALRUN_HOST).")
@click.option("--port", type=int, help="Port of the daemon (LOCALRUN_PORT).")
@click.version_option(__version__, message="localrun %(version)s")
@click.pass_context
def cli(context: click.Context, host: str | None, port: int | None) -> None:
    """Run language models on this machine.

    Without a command, localrun opens its terminal interface, and starts a daemon in the background if none is running.
    """
    if context.invoked_subcommand is None:
        from localrun.cli.tui import open_tui

        open_tui(host, port)


def run(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code.

    An error is one line on stderr that starts with `error:`. LOCALRUN_DEBUG=1 lets the traceback through.
    """
    try:
        result = cli.main(args=list(arguments), prog_name="localrun", standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        return exits.INTERRUPTED
    except click.ClickException as error:
        return _failed(_usage_message(error), error.exit_code)
    except errors.LocalrunError as error:
        if _debugging():
            raise
        return _failed(error.message, exits.code_of(error))
    except OSError as error:
        if _debugging():
            raise
        return _failed(str(error), exits.ERROR)
    except Exception as error:
        if _debugging():
            raise
        return _failed(f"{type(error).__name__}: {error} (LOCALRUN_DEBUG=1 shows where)", exits.ERROR)
    return result if isinstance(result, int) else exits.OK


def _failed(message: str, code: int) -> int:
    sys.stdout.flush()
    print(f"error: {visible(message)}", file=sys.stderr)
    return code


def _usage_message(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"{message}; see {context.command_path} --help" if context is not None else message


def _debugging() -> bool:
    return os.environ.get("LOCALRUN_DEBUG") == "1"
