"""Who may use what: `localrun key`, API keys of this machine's daemon, in its data folder; `localrun usage`, what they
used; `localrun hosts`, daemons on other machines of the network, and whose certificate is trusted.

Keys are changed in their file, which a running daemon reads again at once; so none needs to run, and only who may
write the file can make them.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click
import msgspec

from localrun import config, errors
from localrun.access import certificate, trust
from localrun.access.books import AuditLog
from localrun.access.keys import (
    NO_LIMIT,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    REQUESTS,
    TOKENS,
    Key,
    KeyFile,
    Kind,
    Limit,
    NewKey,
    parse_duration_s,
    parse_limit,
    parse_size_bytes,
)
from localrun.access.trust import Endpoint, TrustedHosts
from localrun.cli.arguments import parted, port_of, with_settings
from localrun.cli.daemon import ask, require_daemon
from localrun.cli.text import Column, columns, print_json, progress, say, size, table, tell
from localrun.config import Settings
from localrun.errors import NotFound
from localrun.snapshot import UsageRow
from localrun.wire import Lane

# What takes a limit away, or sets another rule back.
NONE, ALL, NEVER, DEFAULT = "none", "all", "never", "default"
# Options, and the fields of a key that they are; of the latter a value may be None.
_FIELDS = {"concurrency": "n_concurrent", "models": "models", "read_only": "read_only", "admin": "admin"}
_FIELDS_OR_NONE = {"expires": "expires_at_s", "storage": "storage_bytes"}
_LIMITS = {"rate": REQUESTS, "tokens": TOKENS, "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
_SHOWN_KINDS = {REQUESTS: "requests", TOKENS: "tokens", PROMPT_TOKENS: "prompt", OUTPUT_TOKENS: "output"}


@click.group("key")
def key_command() -> None:
    """Make, change, list and revoke API keys.

    As soon as there is one, programs must show a key, also on this machine; localrun's own commands have theirs. Other
    machines always must (`localrun serve --host`).
    """


def _limits(kind: Kind) -> Callable[..., tuple[Limit, ...] | None]:
    def parse(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[Limit, ...] | None:
        if values and all(value.strip().lower() == NONE for value in values):
            return ()
        return tuple(_checked(functools.partial(parse_limit, kind), value) for value in values) or None

    return parse


def _expiry(value: str) -> float:
    return time.time() + parse_duration_s(value)


def _storage(value: str) -> int:
    return NO_LIMIT if value.strip().lower() == NONE else parse_size_bytes(value)


def _checked(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except config.ConfigError as error:
        raise click.BadParameter(str(error)) from None


def _words(word: str, parse: Callable[[str], Any]) -> Callable[..., tuple[Any] | None]:
    """An option's callback: None where it is not given, else a tuple with its value, in which `word` is None."""

    def parsed(_: click.Context, __: click.Parameter, value: str | None) -> tuple[Any] | None:
        if value is None:
            return None
        return (None if value.strip().lower() == word else _checked(parse, value),)

    return parsed


def _patterns(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...] | None:
    if values and all(value.strip().lower() == ALL for value in values):
        return ()
    if not all(value.strip() for value in values):
        raise click.BadParameter("an empty pattern is for no model; write a name, a pattern, or all")
    return values or None


_RULES = (
    click.option(
        "--lane", type=click.Choice([lane.value for lane in Lane]),
        help="The best lane that its requests get; a new key's is interactive.",
    ),
    click.option(
        "--rate", multiple=True, callback=_limits(REQUESTS), metavar="N/TIME",
        help="Requests, such as 60/min or 1000/day; may be given for several times, or as none.",
    ),
    click.option(
        "--tokens", multiple=True, callback=_limits(TOKENS), metavar="N/TIME",
        help="Tokens of prompts and answers together, such as 1M/day, or none.",
    ),
    click.option(
        "--prompt-tokens", multiple=True, callback=_limits(PROMPT_TOKENS), metavar="N/TIME",
        help="Tokens of prompts, cached ones included, or none.",
    ),
    click.option(
        "--output-tokens", multiple=True, callback=_limits(OUTPUT_TOKENS), metavar="N/TIME",
        help="Tokens of answers, or none.",
    ),
    click.option("--concurrency", type=click.IntRange(min=0), help="Requests that may run at once; 0 is any number."),
    click.option(
        "--storage", callback=_words(DEFAULT, _storage), metavar="SIZE",
        help="Disk space for its files and batches, such as 1G, or none for any size; "
        "a new key's is the setting key_storage_bytes.",
    ),
    click.option(
        "--models", multiple=True, callback=_patterns, metavar="PATTERN",
        help="Models and adapters that it may use, such as 'qwen3*'; may be given again, or as all.",
    ),
    click.option(
        "--expires", callback=_words(NEVER, _expiry), metavar="TIME", help="When it ends, such as 12h, 30d or never.",
    ),
    click.option("--read-only/--no-read-only", default=None, help="It may not pull, create, copy or remove models."),
    click.option(
        "--admin/--no-admin", default=None, help="It may see and cancel the requests of others, and stop the daemon."
    ),
)  # fmt: skip


def _with_rules(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say what a key may do; `_rules` reads them."""
    for option in reversed(_RULES):
        command = option(command)
    return command


def _rules(key: Key | None, options: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Key` that options name, of a new key or of this one. Limits of other kinds stay."""
    said = {name: value for name, value in options.items() if value is not None}
    rules = {field: said[name] for name, field in _FIELDS.items() if name in said}
    rules |= {field: said[name][0] for name, field in _FIELDS_OR_NONE.items() if name in said}
    if "lane" in said:
        rules["lane"] = Lane(said["lane"])
    if said.keys() & _LIMITS.keys():
        before = key.limits if key is not None else ()
        kept = {kind: [limit for limit in before if limit.kind == kind] for kind in _LIMITS.values()}
        kept |= {kind: said[name] for name, kind in _LIMITS.items() if name in said}
        rules["limits"] = tuple(limit for kind in _LIMITS.values() for limit in kept[kind])
    return rules


@key_command.command("create")
@click.option("--name", required=True, help="What the key is called in lists and metrics.")
@_with_rules
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def create(name: str, as_json: bool, **options: Any) -> None:
    """Make a key. It is shown this once and kept nowhere."""
    try:
        new = _file().create(name, **_rules(None, options))
    except config.ConfigError as error:
        raise click.UsageError(str(error)) from None
    _audit("key create", name)
    _show(new, as_json)


@key_command.command("set")
@click.argument("name")
@_with_rules
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def change(name: str, as_json: bool, **options: Any) -> None:
    """Change what a key may do. What is not named stays, and so does its secret; what it used counts on.

    A running daemon goes by it from the next request on.
    """
    given = sorted(_rules(None, options))
    if not given:
        raise click.UsageError("say what to change, such as --rate 60/min, --rate none or --expires never")
    key = _file().change(name, lambda key: msgspec.structs.replace(key, **_rules(key, options)))
    _audit("key set", f"{name} ({', '.join(given)})")
    if as_json:
        print(json.dumps(_as_json(key, time.time())))
    else:
        say(f"changed {name}")


@key_command.command("rotate")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def rotate(name: str, as_json: bool) -> None:
    """Give a key a new secret. The old one is refused from now on; limits and what was used stay."""
    new = _file().rotate(name)
    _audit("key rotate", name)
    _show(new, as_json)


@key_command.command("revoke")
@click.argument("name")
def revoke(name: str) -> None:
    """Refuse a key from now on. Answers that are running are finished."""
    _file().revoke(name)
    _audit("key revoke", name)
    say(f"revoked {name}")


@key_command.command("rm")
@click.argument("name")
def remove(name: str) -> None:
    """Forget a key. When none is left, programs on this machine need none."""
    _file().remove(name)
    _audit("key rm", name)
    say(f"removed {name}")


@key_command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_keys(as_json: bool) -> None:
    """List the keys and what they may do."""
    now_s = time.time()
    keys = _file().read()
    if as_json:
        print(json.dumps([_as_json(key, now_s) for key in keys], indent=2))
    elif not keys:
        say("there are no keys; `localrun key create --name NAME` makes one")
    else:
        print(table(_KEYS, keys))


def _file() -> KeyFile:
    from localrun.cluster import settings as cluster

    with contextlib.suppress(NotFound):
        if not (member := cluster.membership()).is_head:
            tell("warning", f"doors of the cluster of {member.head} go by the keys that are made there, not by these")
    return KeyFile(config.folders().data)


def _audit(what: str, name: str) -> None:
    try:
        who = getpass.getuser()
    except (KeyError, OSError):  # a container without such a user
        who = ""
    AuditLog(config.folders().state).write(who=who, what=f"{what} {name}", address="", result="ok")


def _show(new: NewKey, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**_as_json(new.key, time.time()), "key": new.text}))
        return
    progress(f"The key of {new.key.name}, which is shown this once:")
    print(new.text)


def _as_json(key: Key, now_s: float) -> dict[str, Any]:
    return {
        "name": key.name,
        "id": key.id,
        "problem": key.problem(now_s),
        "lane": key.lane.value,
        "models": list(key.models),
        "limits": [{"kind": limit.kind, "limit": limit.amount, "per": limit.per} for limit in key.limits],
        "concurrency": key.n_concurrent or None,
        "storage_bytes": {None: DEFAULT, NO_LIMIT: NONE}.get(key.storage_bytes, key.storage_bytes),
        "read_only": key.read_only,
        "admin": key.admin,
        "created_at_s": key.created_at_s,
        "expires_at_s": key.expires_at_s,
    }


def _shown_limits(key: Key) -> str:
    limits = [f"{limit.text} {_SHOWN_KINDS[limit.kind]}" for limit in key.limits]
    if key.n_concurrent:
        limits.append(f"{key.n_concurrent} at once")
    if key.storage_bytes is not None:
        limits.append("any storage" if key.storage_bytes == NO_LIMIT else f"{size(key.storage_bytes)} stored")
    return ", ".join(limits) or "none"


def _local(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s).astimezone():%Y-%m-%d %H:%M}"


_KEYS: list[Column[Key]] = [
    Column("NAME", lambda key: key.name),
    Column("ID", lambda key: key.id, goes=1),
    Column("STATE", lambda key: (key.problem(time.time()) or "ok").removeprefix("was ").removeprefix("has ")),
    Column("LANE", lambda key: key.lane.value, goes=2),
    Column("MODELS", lambda key: ", ".join(key.models) or "all", goes=5, is_cut=True),
    Column("LIMITS", _shown_limits, goes=3, is_cut=True),
    Column("RIGHTS", lambda key: ", ".join(["admin"] * key.admin + ["read-only"] * key.read_only) or "-", goes=6),
    Column("EXPIRES", lambda key: "never" if key.expires_at_s is None else _local(key.expires_at_s), goes=4),
]


@click.command("usage")
@click.option(
    "--by", type=click.Choice(["key", "day", "model"]), default="key", show_default=True, help="What to group by."
)
@click.option("--days", type=click.IntRange(1, 3660), default=30, show_default=True, help="How far back.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object, as in the daemon's /localrun/v1/usage.")
@with_settings
def usage_command(by: str, days: int, as_json: bool, settings: Settings) -> None:
    """Show the requests and tokens that you and each key used.

    `local` is what programs on this machine used without a key. With a key that is not an admin's, its own use is
    shown.
    """
    report = ask(require_daemon(settings), lambda client: client.usage(by, days))
    if as_json:
        print_json(report)
        return
    if not report.rows:
        say(f"nothing was used since {report.since}")
        return
    used: list[Column[UsageRow]] = [
        Column(by.upper(), lambda row: row.name or "-"),
        Column("REQUESTS", lambda row: f"{row.requests:,}"),
        Column("PROMPT", lambda row: f"{row.prompt_tokens:,}"),
        Column("CACHED", lambda row: f"{row.cached_tokens:,}", goes=1),
        Column("OUTPUT", lambda row: f"{row.output_tokens:,}"),
    ]
    print(table(used, report.rows))
    say(f"\nsince {report.since}; PROMPT, CACHED (a part of it) and OUTPUT are tokens")


# --- hosts ---

_HOSTS = ("HOST", "ADDRESSES", "TRUSTED", "SHA-256 FINGERPRINT")
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
    print(columns(_HOSTS, rows) if rows else "none found")


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
    seen = certificate.fingerprint(shown)
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
