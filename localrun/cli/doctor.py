"""`localrun doctor`: what is wrong with this machine, the build and the files, and what to do about it."""

from __future__ import annotations

import click

from localrun import __version__, config, errors
from localrun.cli import exits
from localrun.cli.daemon import daemon_version, given_flags
from localrun.cli.text import print_json, visible
from localrun.config import Settings


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
    from localrun.doctor.examine import Seen, examine
    from localrun.doctor.finding import Level

    settings, settings_problem = _settings(given_flags({"host": host or None, "port": port}))
    version, port_problem, is_stopping = _who_answers(settings)
    seen = Seen(
        settings=settings, settings_problem=settings_problem, daemon_version=version, port_problem=port_problem,
        is_stopping=is_stopping,
    )  # fmt: skip
    findings = []
    for finding in examine(seen, is_deep=is_deep):
        findings.append(finding)
        if not as_json:
            print(f"{finding.level:<5} {finding.check:<10} {visible(finding.text)}", flush=True)
            if finding.remedy:
                print(f"{'':<16} -> {visible(finding.remedy)}", flush=True)
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    if as_json:
        print_json({"localrun": __version__, "ok": not counts[Level.FAIL], "findings": findings})
    else:
        print(f"\n{counts[Level.OK]} ok, {counts[Level.WARN]} to look at, {counts[Level.FAIL]} failed")
    return exits.ERROR if counts[Level.FAIL] else exits.OK


def _settings(flags: dict[str, object]) -> tuple[Settings, str]:
    """The settings, or the defaults and what is wrong: a bad file is a finding, and not the end."""
    try:
        return config.load(flags), ""
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
