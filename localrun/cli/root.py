"""The root command: finds commands by the table below, and turns every error into one line and a code.

`localrun --help` is printed from the table alone, so that no command's module, and nothing that it needs, is imported.
`localrun` without a command opens the terminal interface.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from collections.abc import Sequence

import click

from localrun import __version__, errors
from localrun.cli import exits
from localrun.cli.text import TextStyle, painted, tell

# By group: name to module and one line of help. The module has a click command `NAME_command`. Help does not list those
# without a group.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Chat": {
        "run": ("run", "Chat with a model, or send it one prompt."),
        "batch": ("batch", "Run a file of requests in the background."),
    },
    "Models": {
        "search": ("pull", "Find models to pull."),
        "pull": ("pull", "Download a model, or resume a download."),
        "list": ("models", "List the models that can be run."),
        "show": ("models", "Show information about a model."),
        "create": ("models", "Create a model from another one or from a file."),
        "cp": ("models", "Give a model a second name."),
        "rm": ("models", "Remove models."),
        "gc": ("models", "Delete files that no model needs."),
    },
    "Daemon": {
        "ps": ("running", "List the loaded models."),
        "stop": ("running", "Unload a model, or stop the daemon."),
        "logs": ("running", "Show the daemon's log."),
        "cache": ("running", "Show or clear the prompt cache."),
        "serve": ("serve", "Run the daemon in the foreground."),
        "service": ("serve", "Start the daemon with your session."),
    },
    "Measure": {
        "top": ("running", "Watch requests, engines and the machine live."),
        "bench": ("bench.command", "Measure the speed of this or another server."),
        "plan": ("bench.plan", "Forecast how many users a machine carries."),
        "usage": ("access", "Show how much was used."),
    },
    "Share": {
        "key": ("access", "Make and revoke API keys."),
        "hosts": ("access", "Find other machines, and trust their certificates."),
        "cluster": ("cluster", "Run models on several machines behind one endpoint."),
    },
    "This program": {
        "doctor": ("program", "Check this machine, the build and the files."),
        "completion": ("program", "Print a shell completion script."),
        "version": ("program", "Print the versions of this program and of the daemon."),
    },
    "": {"push": ("models", "Explain how to share a model.")},
}
COMMANDS = {name: said for group in GROUPS.values() for name, said in group.items()}

# As other programs call them.
ALIASES = {
    "ls": "list",
    "chat": "run",
    "delete": "rm",
    "remove": "rm",
    "copy": "cp",
    "download": "pull",
    "get": "pull",
    "log": "logs",
}

# At the end of each command's help, and so in the pages that are made of it; the program's own under the empty name.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "localrun                                  # the chat",
        'localrun run tiny "Tell me a story"       # one answer',
        "localrun pull qwen3.5:4b                  # a real model",
    ),
    "run": (
        'localrun run qwen3.5:4b "Why is the sky blue?"',
        'localrun run qwen3.5:4b "What is this?" photo.jpg',
        'git diff | localrun run ./model.gguf "Explain this"',
        'localrun run "Why is the sky blue?"  # the last model',
    ),
    "batch": ("localrun batch run requests.jsonl --out answers.jsonl", "localrun batch list"),
    "search": ("localrun search                   # the whole catalogue", "localrun search coder 7b"),
    "pull": ("localrun pull qwen3.5:4b", "localrun pull Qwen/Qwen3-8B-GGUF:Q4_K_M"),
    "list": ("localrun list", "localrun list --json | jq -r '.[].name'"),
    "show": (
        "localrun show tiny",
        "localrun show qwen3.5:4b --fit      # does it fit here?",
        "localrun show tiny --modelfile > Modelfile",
    ),
    "create": (
        "localrun create mine --from ./model.gguf",
        "localrun create pirate -f Modelfile",
        "localrun create small --from big -q q4_K_M",
    ),
    "cp": ("localrun cp qwen3.5:4b gpt-4o",),
    "rm": ("localrun rm qwen3.5:4b mine",),
    "gc": ("localrun gc", "localrun gc --all"),
    "ps": ("localrun ps", "localrun ps --json"),
    "stop": ("localrun stop qwen3.5:4b", "localrun stop --daemon"),
    "logs": ("localrun logs -n 200", "localrun logs -f"),
    "cache": ("localrun cache", "localrun cache clear --disk"),
    "serve": (
        "localrun serve",
        "localrun serve --port 8080 --slots 4",
        "localrun serve --host 0.0.0.0       # for your network",
    ),
    "service": ("localrun service install", "localrun service status", "localrun service logs"),
    "top": ("localrun top", "localrun top --once", "localrun top --record monday.jsonl"),
    "bench": ("localrun bench decode --streams 1,4", "localrun bench stall"),
    "plan": (
        "localrun plan tiny",
        "localrun plan tiny --workload agent --vary slots=4,8",
        "localrun plan tiny --vary machine=this,rtx-4090",
        "localrun plan check tiny",
        "localrun plan record --minutes 10",
    ),
    "usage": ("localrun usage --by model", "localrun usage --by day --days 7"),
    "key": ("localrun key create --name laptop --rate 60/min", "localrun key list", "localrun key revoke laptop"),
    "hosts": ("localrun hosts", "localrun hosts trust studio.local", "localrun --host studio.local list"),
    "cluster": (
        "localrun cluster up",
        "localrun cluster join HEAD --token-file F",
        "localrun cluster deploy qwen3.5:4b --replicas 2",
    ),
    "doctor": ("localrun doctor", "localrun doctor --deep"),
    "version": ("localrun version --json",),
}


def epilog(command: str) -> str | None:
    """For click, which is told not to wrap it; None for a command without examples."""
    examples = EXAMPLES.get(command)
    return None if examples is None else "\n".join(("\b", "Examples:", *(f"  {line}" for line in examples)))


_EXIT_CODES = "\b\nExit codes:\n" + "\n".join(f"  {code:<5}{meaning}" for code, meaning in exits.MEANINGS.items())


class _Formatter(click.HelpFormatter):
    """Headings look like such on a terminal, those of examples included, which are text for click. Its lines fit
    terminals narrower than click's least."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        columns = min(shutil.get_terminal_size().columns, max_width or 80) - 2
        super().__init__(indent_increment, width or max(columns, 20), max_width)

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{painted(f'{heading}:', TextStyle.HEADING)}\n")

    def write_text(self, text: str) -> None:
        super().write_text(
            re.sub(r"(?m)^(Examples:|Exit codes:)$", lambda found: painted(found[0], TextStyle.HEADING), text)
        )


click.Context.formatter_class = _Formatter


class _TableGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"localrun.cli.{COMMANDS[cmd_name][0]}")
        command = getattr(module, f"{cmd_name}_command")
        assert isinstance(command, click.Command)
        command.hidden = cmd_name in GROUPS[""]
        command.epilog = epilog(cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] == "help":
            args = [*args[1:2], "--help"]
            if args == ["--help"]:
                print(ctx.get_help())
                ctx.exit()
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            way_out = errors.meant(args[0], [*COMMANDS, *ALIASES]) or "`localrun --help` lists the commands"
            raise click.UsageError(f"there is no command '{args[0]}'; {way_out}") from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, COMMANDS))
        for group, commands in GROUPS.items():
            if group:
                with formatter.section(group):
                    formatter.write_dl([(name.ljust(widest), help_line) for name, (_, help_line) in commands.items()])


@click.group(
    cls=_TableGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"{epilog('')}\n\n{_EXIT_CODES}",
)
@click.option("--host", help="Address of the daemon (LOCALRUN_HOST).")
@click.option("--port", type=int, help="Port of the daemon (LOCALRUN_PORT).")
@click.option("--api-key", help="Key for a daemon on another machine (better: LOCALRUN_API_KEY).")
@click.version_option(__version__, "-v", "--version", message="localrun %(version)s")
@click.pass_context
def cli(context: click.Context, host: str | None, port: int | None, api_key: str | None) -> None:
    """Run language models on this machine.

    Without a command, localrun opens its terminal interface and starts a daemon in the background if none is running.
    """
    if api_key is not None:
        os.environ["LOCALRUN_API_KEY"] = api_key
    if context.invoked_subcommand is None:
        _open_tui(host, port)


def _open_tui(host: str | None, port: int | None) -> None:
    """Raises click.UsageError without a terminal, and what `ensure_daemon` raises."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError(
            "the interface needs a terminal; without one use `localrun run MODEL PROMPT` or `localrun serve`"
        )
    from localrun.cli.arguments import load_settings
    from localrun.cli.daemon import ensure_daemon, starter

    settings = load_settings({"host": host, "port": port})
    base_url = ensure_daemon(settings)
    from localrun.tui.app import own_app

    own_app(base_url, start_daemon=starter(settings)).run()


def run(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code.

    An error is one line on stderr that starts with `error:`. LOCALRUN_DEBUG=1 lets the traceback through.
    """
    try:
        result = cli.main(
            args=[_as_utf8(argument) for argument in arguments], prog_name="localrun", standalone_mode=False
        )
    except (click.Abort, KeyboardInterrupt):
        return exits.INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return exits.USAGE
    except click.ClickException as error:
        return _failed(_usage_message(error), error.exit_code)
    except Exception as error:
        if os.environ.get("LOCALRUN_DEBUG") == "1":
            raise
        if isinstance(error, errors.LocalrunError):
            return _failed(error.message, exits.code_of(error))
        from pathlib import Path

        from localrun.config import ConfigError, folders

        if isinstance(error, ConfigError):
            return _failed(str(error), exits.USAGE)
        if isinstance(error, OSError):
            full = errors.of_disk(error)
            if isinstance(full, errors.DiskFull):
                return _failed(full.message, exits.ERROR)
            words = error.strerror or str(error)
            refused, state = Path(str(error.filename)), folders().state
            is_own = refused.is_relative_to(state) or state.is_relative_to(refused)
            if isinstance(full, errors.DiskRefused) and is_own:
                words += "; LOCALRUN_HOME can name a folder that can be written"
            return _failed(f"{error.filename}: {words}" if error.filename else words, exits.ERROR)
        return _failed(f"{type(error).__name__}: {error} (LOCALRUN_DEBUG=1 shows where)", exits.ERROR)
    return result if isinstance(result, int) else exits.OK


def _as_utf8(argument: str) -> str:
    """What Python read by a locale that is not UTF-8, as terminals mean it; the name of a file stays. Raises
    click.UsageError."""
    if argument.isprintable() or os.path.lexists(argument):  # no half of a surrogate pair is printable
        return argument
    try:
        return os.fsencode(argument).decode()
    except UnicodeDecodeError:
        shown = os.fsencode(argument).decode(errors="replace")
        raise click.UsageError(f"{shown!r} is neither UTF-8 nor a file; is the terminal set to UTF-8?") from None


def _failed(message: str, code: int) -> int:
    sys.stdout.flush()
    tell("error", message)
    return code


def _usage_message(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"{message}; see {context.command_path} --help" if context is not None else message
