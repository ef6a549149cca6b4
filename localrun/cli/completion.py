"""`localrun completion`: what a shell needs to complete commands and options with Tab.

The shell's script asks the command itself what could follow, so it stays right when localrun is updated.
Does not: write into anybody's shell configuration.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL: bash, zsh or fish.

    \b
    bash: localrun completion bash > ~/.local/share/bash-completion/completions/localrun
    zsh:  localrun completion zsh > _localrun, in a folder of $fpath
    fish: localrun completion fish > ~/.config/fish/completions/localrun.fish
    """
    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(context.find_root().command, {}, "localrun", "_LOCALRUN_COMPLETE").source())
