"""`localrun hosts`: daemons on other machines of the network, and whose certificate is trusted."""

from __future__ import annotations

import ssl

import click

from localrun import config, errors
from localrun.access import certificate, trust
from localrun.access.trust import Endpoint, TrustedHosts
from localrun.cli.arguments import parted, port_of
from localrun.cli.text import columns, progress, say, tell

_HEADER = ("HOST", "ADDRESSES", "TRUSTED", "SHA-256 FINGERPRINT")
_PORT_HELP = f"Port of the daemon.  [default: {config.DEFAULT_PORT}, or what a .local name announces]"


@click.group("hosts", invoke_without_command=True)
@click.option("--seconds", type=click.FloatRange(0.1, 60), default=2.0, show_default=True, help="How long to look.")
@click.pass_context
def hosts_command(context: click.Context, seconds: float) -> None:
    """List daemons that announce themselves (`localrun serve --announce on`), and those that are trusted.

    Use one with `localrun --host NAME` and its key in LOCALRUN_API_KEY.
    """
    if context.invoked_subcommand is not None:
        return
    from localrun.access.discovery import find

    trusted = TrustedHosts().all()
    try:
        announced = find(seconds)
    except config.ConfigError as error:
        tell("warning", str(error))
        announced = []
    rows = []
    for found in announced:
        name = f"{found.host}:{found.port}"
        kept = trusted.pop(name.lower(), None)
        says = "no" if kept is None else "yes" if kept.fingerprint == found.fingerprint else "another one"
        rows.append((name, ", ".join(found.addresses), says, found.fingerprint))
    rows += [(name, "-", "yes", host.fingerprint) for name, host in trusted.items()]
    print(columns(_HEADER, rows) if rows else "none found")


def _endpoint(text: str, port: int | None, *, asks: bool = False) -> Endpoint:
    """HOST, or HOST:PORT as the list shows it. Raises click.UsageError, and if it `asks` the network for the port as
    `port_of` does."""
    try:
        host, named = parted(text, "HOST")
    except config.ConfigError as error:
        raise click.UsageError(str(error)) from None
    return trust.endpoint(host.lower(), port or named or (port_of(host) if asks else config.DEFAULT_PORT))


@hosts_command.command("trust")
@click.argument("host", metavar="HOST[:PORT]")
@click.option("--port", type=click.IntRange(1, 65535), help=_PORT_HELP)
@click.option("--fingerprint", "expected", help="The SHA-256 fingerprint that it must have; without it you are asked.")
def trust_host(host: str, port: int | None, expected: str | None) -> None:
    """Trust the certificate that HOST shows now. It replaces an earlier one."""
    where = _endpoint(host, port, asks=True)
    if not where.is_remote:
        raise click.UsageError(f"{host} is this machine, which is reached without a certificate")
    shown = trust.shown_certificate(where)
    seen = certificate.fingerprint(ssl.PEM_cert_to_DER_cert(shown))
    if expected is None:
        progress(f"The SHA-256 fingerprint of {where.name} is\n  {seen}")
        click.confirm("Is it the one that `localrun serve` shows there? Trust it", abort=True, err=True)
    elif _plain(expected) != _plain(seen):
        raise errors.UntrustedCertificate(
            f"the SHA-256 fingerprint of {where.name} is {seen}, and not {expected[:100]}"
        )
    TrustedHosts().trust(where, shown)
    say(f"{where.name} is trusted")


@hosts_command.command("forget")
@click.argument("host", metavar="HOST[:PORT]")
@click.option("--port", type=click.IntRange(1, 65535), help=_PORT_HELP)
def forget(host: str, port: int | None) -> None:
    """No longer trust the certificate of HOST."""
    name = _endpoint(host, port).name
    if not TrustedHosts().forget(name):
        raise errors.NotFound(f"no certificate of {name} is trusted; `localrun hosts` lists those that are")
    say(f"{name} is no longer trusted")


def _plain(fingerprint: str) -> str:
    return fingerprint.upper().removeprefix("SHA256:").replace(":", "").strip()
