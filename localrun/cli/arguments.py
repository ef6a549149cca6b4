"""What commands have in common on their command line: `--host` and `--port` of the daemon, and names of models, which a
shell completes: the one that a mistyped name is close to, and what to do with one that has just come.

Does not: start a daemon. The names are read from the folders, so that they are there without one.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from localrun import config, errors, ollama_environment
from localrun.cli.daemon import PROBE_TIMEOUT_S, ask, base_url, endpoint
from localrun.config import Settings, in_short

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from localrun.client import Client


# A prefix that is shorter says little of what was meant.
_PREFIX = 3
# What these do can only be done to a model that is here.
_ONLY_HERE = frozenset({"cp", "rm", "stop", "push", "clear"})


def explained(error: errors.ModelNotFound, settings: Settings) -> errors.LocalrunError:
    """The error with a way out: a name that is close to this one, or how to look for it."""
    name = error.name
    if not name or error.reason:
        return error
    if os.path.isabs(name):
        return error if Path(name).exists() else _not_found(f"there is no file {name}")
    context = click.get_current_context(silent=True)
    only_here = context is not None and context.info_name in _ONLY_HERE
    alike, is_here = _alike(name, settings, only_here=only_here)
    if not alike and only_here:
        return error
    # `run` has asked the library.
    is_asked = "/" in name or (context is not None and context.info_name == "run")
    library = "" if is_asked else f", and `localrun pull {name}` gets it if Ollama's library has it"
    if not alike:
        search = f"`localrun list` shows what is here, `localrun search {name}` looks for it elsewhere{library}"
        return _not_found(f"model '{name}' not found; {search}")
    pull = "" if is_here else f" `localrun pull {alike}` downloads it{library}"
    return _not_found(f"model '{name}' not found; did you mean '{alike}'?{pull}")


def guessed(error: errors.LocalrunError, name: str, settings: Settings) -> errors.LocalrunError:
    """What became of a pull, with a name that is close to a short one that is not in the catalogue."""
    if "/" in name or ask(base_url(settings), lambda client: client.catalog(name)):
        return error
    alike, _ = _alike(name, settings, only_here=False)
    return errors.by_code(error.code, f"{error.message}; did you mean '{alike}'?") if alike else error


async def next_step(client: Client, name: str) -> str:
    """What to do with a model that has just come, in one line."""
    shown, name = await client.show(name), shlex.quote(name)
    if "kind" in (shown.get("localrun") or {}):
        return f"use it with a model: `localrun run MODEL+{name}`"
    if "completion" in (shown.get("capabilities") or ()):
        return f"chat with it: `localrun run {name}`"
    return f"see what it is for: `localrun show {name}`"


def _not_found(message: str) -> errors.LocalrunError:
    return errors.by_code(errors.ModelNotFound.code, message)


def _alike(name: str, settings: Settings, *, only_here: bool) -> tuple[str, bool]:
    """The name that is meant, and whether that model is here."""
    with contextlib.suppress(errors.LocalrunError):
        store = ask(base_url(settings), lambda client: client.store())
        here = [in_short(row["name"]) for row in [*store["models"], *store.get("adapters", ())]]
        if found := closest(name, here):
            return found, True
        if not only_here:
            entries = ask(base_url(settings), lambda client: client.catalog())
            return closest(name, [entry["name"] for entry in entries]), False
    return "", False


def closest(name: str, names: Iterable[str]) -> str:
    """The first name that begins with this one, else the one that is most alike, with or without its tag; or none."""
    known: dict[str, str] = {}
    for each in names:
        known.setdefault(each.lower(), each)
        known.setdefault(each.lower().partition(":")[0], each)
    wanted = name.lower()
    if version := re.sub(r"[^0-9]", "", wanted.partition(":")[0]):  # another one is another model, and no slip
        known = {each: of for each, of in known.items() if re.sub(r"[^0-9]", "", each.partition(":")[0]) == version}
    begun = [each for each in known if len(wanted) >= _PREFIX and each.startswith(wanted)]
    # Two letters of four that were exchanged are half of the name.
    alike = begun or difflib.get_close_matches(wanted, known, n=1, cutoff=0.5 if len(wanted) < 6 else 0.6)
    return known[alike[0]] if alike else ""


ANNOUNCED_S = 2.0

T = TypeVar("T")


def with_settings(function: Callable[..., T]) -> Callable[..., T]:
    """Give a command `--host` and `--port`, and its function the argument `settings`."""

    @click.option("--host", help="Address of the daemon (LOCALRUN_HOST).")
    @click.option("--port", type=int, help="Port of the daemon (LOCALRUN_PORT).")
    @functools.wraps(function)
    def with_connection(*arguments: Any, host: str | None, port: int | None, **options: Any) -> T:
        settings = load_settings({"host": host, "port": port})
        try:
            return function(*arguments, settings=settings, **options)
        except errors.ModelNotFound as error:
            raise explained(error, settings) from None

    return with_connection


def load_settings(flags: Mapping[str, Any], *, serves: bool = False) -> config.Settings:
    """The settings, with this command's flags over those given before the command's name. A client's host may be
    HOST:PORT or a URL; where nobody names the port of a `.local` machine, that is the one its daemon announces. Raises
    click.UsageError for flags, and ConfigError for a file or a variable, on which a command's help says nothing."""
    given = given_flags(flags)
    try:
        if serves:
            return ollama_environment.load(given, serves=True)
        said = given.get("host") or os.environ.get(_HOST, "").strip()
        host, port = parted(said, "--host" if given.get("host") else _HOST)
        if port is not None and given.get("port") not in (None, port):
            raise config.ConfigError(f"--port is {given['port']}, and {said} names port {port}; leave one of them out")
        if port is not None:
            given["port"] = port
        environ = {name: value for name, value in os.environ.items() if name != _HOST}
        if given.get("host"):
            given["host"] = host
        elif host:
            environ[_HOST] = host
        settings = ollama_environment.load(given, environ, default_port=_NO_PORT)
    except config.ConfigError as error:
        if not str(error).startswith("--"):
            raise
        raise click.UsageError(str(error)) from None
    return settings if settings.port != _NO_PORT else msgspec.structs.replace(settings, port=port_of(settings.host))


_NO_PORT = -1
_HOST = config.env_name("host")


def parted(text: str, source: str) -> tuple[str, int | None]:
    """Host and port of `studio.local`, `studio.local:8443`, `https://studio.local:8443/`, `[::1]:8443`, `::1`. Which
    scheme it is makes no difference: other machines are asked by TLS, this one without. Raises ConfigError."""
    scheme, separator, rest = text.rpartition("://")
    if separator:
        if scheme.lower() not in ("http", "https"):
            raise config.ConfigError(f"{source}: host is {text[:100]!r}; {scheme[:20]}:// reaches no daemon")
        rest = rest.partition("/")[0]
    host, port = config.host_and_port(rest, source)
    return host.rstrip("."), port


def port_of(host: str) -> int:
    """The usual one, or where nobody listens there, what a `.local` machine announces. Raises click.UsageError for
    several, and DaemonUnreachable for a name that nobody has."""
    from localrun.access import discovery, trust

    if not (discovery.is_local(host) and trust.endpoint(host, config.DEFAULT_PORT).is_remote):
        return config.DEFAULT_PORT
    try:
        discovery.connect(host, config.DEFAULT_PORT, PROBE_TIMEOUT_S).close()
    except OSError:
        ports = discovery.ports_of(host.rstrip("."), ANNOUNCED_S) if discovery.is_installed() else []
        if len(ports) > 1:
            raise click.UsageError(
                f"{host} announces daemons at ports {', '.join(map(str, ports))}; choose one with --port"
            ) from None
        return ports[0] if ports else config.DEFAULT_PORT
    return config.DEFAULT_PORT


def given_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """A command's flags over the address given before the command's name. None is not given."""
    context = click.get_current_context(silent=True)
    before = {} if context is None else context.find_root().params
    given = {field: value for field, value in flags.items() if value is not None}
    return {"host": before.get("host"), "port": before.get("port")} | given


def complete_file(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Whatever the shell finds."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def complete_here(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str] | list[CompletionItem]:
    """The models of this machine, for a shell; none for a daemon on another one. What begins like a path is one."""
    if incomplete.startswith((".", "/", "~")):
        return complete_file(context, parameter, incomplete)
    names: list[str] = []
    with contextlib.suppress(Exception):  # a message in the middle of a command line would help nobody
        settings = load_settings({name: context.params.get(name) for name in ("host", "port")})
        if not endpoint(settings).is_remote:
            names = _stored(settings)
    return [name for name in names if name.startswith(incomplete)]


def complete_catalog(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """The models that can be pulled by a short name, for a shell."""
    from localrun.models import catalog

    return [entry.name for entry in catalog.entries() if entry.name.startswith(incomplete)]


def _stored(settings: Settings) -> list[str]:
    from localrun.models.storage.store import Store

    return [str(model.name) for model in Store.of(settings).list()]


class NumberList(click.ParamType[tuple[int, ...]]):
    """Positive whole numbers separated by commas, as a tuple."""

    name = "N,N,..."

    def convert(
        self, value: str | tuple[int, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value  # click converts what it has converted once more
        words = value.replace(" ", "").split(",")
        if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
            self.fail(f"{value!r} is not a list such as 1,4,8", param, ctx)
        return tuple(int(word) for word in words)
