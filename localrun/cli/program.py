"""The commands about this program itself: version, doctor, completion."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from localrun import __version__, config, errors, ollama_environment
from localrun.cli import exits
from localrun.cli.arguments import given_flags, with_settings
from localrun.cli.daemon import daemon_version, version_if_any
from localrun.cli.text import TextStyle, painted, print_json, say, wrapped
from localrun.config import Settings

if TYPE_CHECKING:
    from localrun.doctor import Finding

_LOOKS = {"ok": TextStyle.GOOD, "warn": TextStyle.DOUBTFUL, "fail": TextStyle.BAD}


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
    say(f"daemon {daemon}" if daemon else "no daemon is running")


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
    if shell == "bash":
        # A name such as qwen3:4b is one word; for bash it would be three.
        click.echo('COMP_WORDBREAKS="${COMP_WORDBREAKS//:}"')


# --- doctor ---


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.option(
    "--deep", "is_deep", is_flag=True, help="Verify the checksums of all model files and probe the kernels again."
)
@click.option("--host", help="Address of the daemon (LOCALRUN_HOST).")
@click.option("--port", type=int, help="Port of the daemon (LOCALRUN_PORT).")
def doctor_command(as_json: bool, is_deep: bool, host: str | None, port: int | None) -> int:
    """Check Python, llama.cpp, the GPU, threads, memory, disk, the port, folders, models and caches.

    Each line is ok, warn or fail, with what to do about it. Nothing is changed. The exit code is 1 if a check fails.
    """
    from localrun.doctor import Level
    from localrun.doctor.examine import KnownState, examine

    settings, settings_problem = _settings(given_flags({"host": host or None, "port": port}))
    version, port_problem, is_stopping = _who_answers(settings)
    seen = KnownState(
        settings=settings, settings_problem=settings_problem, daemon_version=version, port_problem=port_problem,
        is_stopping=is_stopping,
    )  # fmt: skip
    findings = []
    for finding in examine(seen, is_deep=is_deep):
        findings.append(finding)
        if not as_json:
            print(_shown(finding), flush=True)
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    if as_json:
        print_json({"localrun": __version__, "ok": not counts[Level.FAIL], "findings": findings})
    else:
        print(f"\n{counts[Level.OK]} ok, {counts[Level.WARN]} to look at, {counts[Level.FAIL]} failed")
    return exits.ERROR if counts[Level.FAIL] else exits.OK


def _shown(finding: Finding) -> str:
    """The level, the check and what was found; below it, what to do."""
    text = wrapped(f"{finding.level:<5} {finding.check:<10} {finding.text}", indent=17)
    text = painted(finding.level, _LOOKS[finding.level]) + text[len(finding.level) :]
    remedy = f"{'':<16} -> {finding.remedy}"
    return f"{text}\n{wrapped(remedy, indent=20)}" if finding.remedy else text


def _settings(flags: dict[str, object]) -> tuple[Settings, str]:
    """The settings, or the defaults and what is wrong: a bad file is a finding, and not the end."""
    try:
        return ollama_environment.load(flags), ""
    except config.ConfigError as error:
        return Settings(), str(error)


def _who_answers(settings: Settings) -> tuple[str | None, str, bool]:
    """The daemon's version; or who else has the port, and whether that is a daemon which is ending."""
    if settings.port == 0:
        return None, "", False
    try:
        return daemon_version(settings), "", False
    except errors.Unavailable as error:
        return None, error.message, True
    except errors.LocalrunError as error:
        return None, error.message, False
