"""The commands about this program itself: version, completion, dev."""

from __future__ import annotations

import json
from pathlib import Path

import click

from localrun import __version__, errors
from localrun.cli.daemon import version_if_any, with_settings
from localrun.config import Settings


@click.command("version")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object; `daemon` is null when none is running.")
@with_settings
def version_command(as_json: bool, settings: Settings) -> None:
    """Print the versions of this program and of the daemon, if one is running."""
    daemon = version_if_any(settings)
    if as_json:
        print(json.dumps({"localrun": __version__, "daemon": daemon}))
        return
    print(f"localrun {__version__}")
    print(f"daemon {daemon}" if daemon else "no daemon is running")


@click.command("completion")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL: bash, zsh or fish.

    \b
    bash: localrun completion bash > ~/.local/share/bash-completion/completions/localrun
    zsh:  localrun completion zsh > _localrun, in a folder of $fpath
    fish: localrun completion fish > ~/.config/fish/completions/localrun.fish
    """
    from click.shell_completion import get_completion_class

    # The script asks the command itself what could follow, so it stays right when localrun is updated.
    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(context.find_root().command, {}, "localrun", "_LOCALRUN_COMPLETE").source())


@click.group("dev")
def dev_command() -> None:
    """Tools for developing localrun."""


@dev_command.command("synth")
@click.argument("shape")
@click.argument("type_name", metavar="TYPE")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the weights.")
def synth(shape: str, type_name: str, out: Path, seed: int) -> None:
    """Write a GGUF with random weights to OUT, with the SHAPE of a real model and the quantization TYPE.

    It loads and runs at the speed of the real model, but its text is noise. An unknown SHAPE or TYPE lists the known
    ones.
    """
    from localrun.models.synthesis.synthesize import synthesize

    try:
        synthesize(shape, type_name, out, seed)
    except errors.BadRequest as error:
        raise click.UsageError(error.message) from None
    print(f"wrote {out} ({out.stat().st_size} bytes)")
