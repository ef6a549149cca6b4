"""`localrun key`: API keys of this machine's daemon, in its data folder; `localrun usage`: what they used.

Keys are changed in their file, which a running daemon reads again at once; so none needs to run, and only who may
write the file can make them.
"""

from __future__ import annotations

import functools
import getpass
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import click

from localrun import config
from localrun.access.audit import AuditLog
from localrun.access.keys import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    REQUESTS,
    TOKENS,
    Key,
    KeyFile,
    Limit,
    NewKey,
    parse_duration_s,
    parse_limit,
)
from localrun.cli.daemon import ask, require_daemon, with_settings
from localrun.cli.text import columns
from localrun.config import Settings
from localrun.wire import Lane

_HEADER = ("NAME", "ID", "STATE", "LANE", "MODELS", "LIMITS", "RIGHTS", "EXPIRES")
_LIMITS = {"rate": REQUESTS, "tokens": TOKENS, "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
_SHOWN_KINDS = {REQUESTS: "requests", TOKENS: "tokens", PROMPT_TOKENS: "prompt", OUTPUT_TOKENS: "output"}


@click.group("key")
def key_command() -> None:
    """Make, list and revoke API keys.

    As soon as there is one, programs must show a key, also on this machine; localrun's own commands have theirs. Other
    machines always must (`localrun serve --host`).
    """


def _limit(kind: str) -> Callable[..., tuple[Limit, ...]]:
    def parse(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[Limit, ...]:
        return tuple(_checked(functools.partial(parse_limit, kind), value) for value in values)

    return parse


def _expiry(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    return None if value is None else time.time() + _checked(parse_duration_s, value)


def _checked(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except config.ConfigError as error:
        raise click.BadParameter(str(error)) from None


@key_command.command("create")
@click.option("--name", required=True, help="What the key is called in lists and metrics.")
@click.option(
    "--lane", type=click.Choice([lane.value for lane in Lane]), default=Lane.INTERACTIVE.value, show_default=True,
    help="The best lane that its requests get.",
)  # fmt: skip
@click.option(
    "--rate", "rate", multiple=True, callback=_limit(REQUESTS), metavar="N/TIME",
    help="Requests, such as 60/min or 1000/day; may be given for several times.",
)  # fmt: skip
@click.option(
    "--tokens", "tokens", multiple=True, callback=_limit(TOKENS), metavar="N/TIME",
    help="Tokens of prompts and answers together, such as 1M/day.",
)  # fmt: skip
@click.option(
    "--prompt-tokens", "prompt_tokens", multiple=True, callback=_limit(PROMPT_TOKENS), metavar="N/TIME",
    help="Tokens of prompts, cached ones included.",
)  # fmt: skip
@click.option(
    "--output-tokens", "output_tokens", multiple=True, callback=_limit(OUTPUT_TOKENS), metavar="N/TIME",
    help="Tokens of answers.",
)  # fmt: skip
@click.option(
    "--concurrency", type=click.IntRange(min=0), default=0, help="Requests that may run at once; 0 is any number."
)
@click.option(
    "--models", multiple=True, metavar="PATTERN", help="Models that it may use, such as 'qwen3*'; may be given again."
)
@click.option("--expires", callback=_expiry, metavar="TIME", help="When it ends, such as 12h or 30d (default: never).")
@click.option("--read-only", is_flag=True, help="It may not pull, create, copy or remove models.")
@click.option("--admin", is_flag=True, help="It sees and may end what others do, and may stop the daemon.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def create(
    name: str, lane: str, concurrency: int, models: tuple[str, ...], expires: float | None, read_only: bool,
    admin: bool, as_json: bool, **limits: tuple[Limit, ...],
) -> None:  # fmt: skip
    """Make a key. It is shown this once and kept nowhere."""
    all_limits = tuple(limit for field in _LIMITS for limit in limits[field])
    try:
        new = _file().create(
            name, lane=Lane(lane), limits=all_limits, n_concurrent=concurrency, models=models, expires_at_s=expires,
            read_only=read_only, admin=admin,
        )  # fmt: skip
    except config.ConfigError as error:
        raise click.UsageError(str(error)) from None
    _audit("key create", name)
    _show(new, as_json)


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
    print(f"revoked {name}")


@key_command.command("rm")
@click.argument("name")
def remove(name: str) -> None:
    """Forget a key. When none is left, programs on this machine need none."""
    _file().remove(name)
    _audit("key rm", name)
    print(f"removed {name}")


@key_command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_keys(as_json: bool) -> None:
    """List the keys and what they may do."""
    now_s = time.time()
    keys = _file().read()
    if as_json:
        print(json.dumps([_as_json(key, now_s) for key in keys], indent=2))
    elif not keys:
        print("there are no keys; `localrun key create --name NAME` makes one")
    else:
        print(columns(_HEADER, [_cells(key, now_s) for key in keys]))


def _file() -> KeyFile:
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
    click.echo(f"The key of {new.key.name}, which is shown this once:", err=True)
    print(new.text)


def _as_json(key: Key, now_s: float) -> dict[str, Any]:
    return {
        "name": key.name,
        "id": key.id,
        "problem": key.problem(now_s),
        "lane": key.lane.value,
        "models": list(key.models),
        "limits": [{"kind": limit.kind, "amount": limit.amount, "per_s": limit.per_s} for limit in key.limits],
        "concurrency": key.n_concurrent,
        "read_only": key.read_only,
        "admin": key.admin,
        "created_at_s": key.created_at_s,
        "expires_at_s": key.expires_at_s,
    }


def _cells(key: Key, now_s: float) -> tuple[str, ...]:
    limits = [f"{limit.text} {_SHOWN_KINDS[limit.kind]}" for limit in key.limits]
    if key.n_concurrent:
        limits.append(f"{key.n_concurrent} at once")
    rights = [text for is_so, text in ((key.admin, "admin"), (key.read_only, "read-only")) if is_so]
    expires = "never"
    if key.expires_at_s is not None:
        expires = datetime.fromtimestamp(key.expires_at_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    return (
        key.name,
        key.id,
        (key.problem(now_s) or "ok").removeprefix("was ").removeprefix("has "),
        key.lane.value,
        ", ".join(key.models) or "all",
        ", ".join(limits) or "none",
        ", ".join(rights) or "-",
        expires,
    )


@click.command("usage")
@click.option("--by", type=click.Choice(["key", "day", "model"]), default="key", show_default=True, help="What to sum.")
@click.option("--days", type=click.IntRange(1, 3660), default=30, show_default=True, help="How far back.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object, as in the daemon's /localrun/v1/usage.")
@with_settings
def usage_command(by: str, days: int, as_json: bool, settings: Settings) -> None:
    """Show the requests and tokens that each key used.

    Counted are requests with a key and, while there are keys, those of programs on this machine (`local`). With a key
    that is not an admin's, its own use is shown.
    """
    report = ask(require_daemon(settings), lambda client: client.usage(by, days))
    if as_json:
        from localrun.cli.text import print_json

        print_json(report)
        return
    rows = []
    for row in report.rows:
        counts = (row.requests, row.prompt_tokens, row.cached_tokens, row.output_tokens)
        rows.append((row.name or "-", *(f"{count:,}" for count in counts)))
    if not rows:
        print(f"nothing was counted since {report.since}; use is counted while there are API keys")
        return
    header = (by.upper(), "REQUESTS", "PROMPT TOKENS", "CACHED TOKENS", "OUTPUT TOKENS")
    print(f"{columns(header, rows)}\n\nsince {report.since}; cached tokens are part of the prompt tokens")
