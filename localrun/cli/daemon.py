"""The daemon a command talks to: its address, finding it, starting one in the background, and asking it.

A background daemon is `localrun serve` in a session of its own, so it outlives the terminal, with its output in a log
file in the state folder; it ends by itself after half an hour without work. Of commands that need one at the same time
one starts it while the others wait; if somebody else takes the port meanwhile, that daemon is as good.

Does not: stop a daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import json
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from localrun import config, errors
from localrun.cli import exits
from localrun.cli.text import progress
from localrun.processes import DETACHED

if TYPE_CHECKING:
    from localrun.access.trust import Endpoint
    from localrun.client import Client

IDLE_EXIT_S = 1800
LIFE = f"stops after {IDLE_EXIT_S // 60} min without requests"
START_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.05
LOG_TAIL_LINES = 5

# owner/repo:file.gguf, perhaps after the hub's host: a file of a repository, not one of this machine.
_FILE_OF_A_REPO = re.compile(
    r"([\w./:@+=-]+\+)?(https://)?([\w.-]+/)?[\w-][\w.-]*/[\w-][\w.@-]*:[^/\\:]+\.gguf", re.ASCII | re.IGNORECASE
)

T = TypeVar("T")


def base_url(settings: config.Settings) -> str:
    """The daemon's address as a URL. Raises click.UsageError for port 0, behind which no daemon can be found."""
    if settings.port == 0:
        raise click.UsageError(
            "port 0 stands for any free port, so no daemon can be found there; give the port that the daemon listens on"
        )
    return endpoint(settings).url


def endpoint(settings: config.Settings) -> Endpoint:
    from localrun.access import trust

    return trust.endpoint(settings.host, settings.port)


def for_daemon(name: str) -> str:
    """The name, or the absolute path for a file: the daemon does not share the user's working folder.

    A file is what ends in `.gguf`, starts like a path, or has a separator and exists. Adapters may follow it.
    """
    path, _, adapters = name.rpartition(".gguf+")
    if path and not name.endswith(".gguf"):
        return f"{for_daemon(path + '.gguf')}+{adapters}"
    if _FILE_OF_A_REPO.fullmatch(name) and not name.startswith(".") and not Path(name).exists():
        return name
    starts_like_a_path = name.startswith(("./", "../", "~", os.sep, "." + os.sep, ".." + os.sep))
    has_separator = "/" in name or os.sep in name
    if name.endswith(".gguf") or starts_like_a_path or (has_separator and Path(name).is_file()):
        return str(Path(name).expanduser().absolute())
    return name


def ask(url: str, question: Callable[[Client], Awaitable[T]]) -> T:
    """What the daemon answers to one call of the client. Raises what the call raises."""
    from localrun.client import Client

    async def answer() -> T:
        async with Client(url) as client:
            return await question(client)

    return asyncio.run(answer())


def ensure_daemon(settings: config.Settings, *, quietly: bool = False) -> str:
    """The base URL of a daemon that answers, started first if there is none on this machine, which stderr then says.
    Waits for one that is shutting down.

    Raises PortBusy when something else answers there, and DaemonUnreachable, with the end of the log, when a daemon
    does not come up.
    """
    url = base_url(settings)
    if endpoint(settings).is_remote:
        return require_daemon(settings)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            if daemon_version(settings) is None:
                with _starting():
                    if daemon_version(settings) is None:
                        is_own = _start(settings)
                        if is_own and not quietly:
                            said = f"started the daemon at {url} ({LIFE}){_others(settings)}"
                            progress(said)
            return url
        except errors.Unavailable:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(POLL_INTERVAL_S)


def starter(settings: config.Settings) -> Callable[[], object] | None:
    """What starts a daemon where none answers; None for another machine's."""
    return None if endpoint(settings).is_remote else lambda: ensure_daemon(settings, quietly=True)


def require_daemon(settings: config.Settings) -> str:
    """The base URL of a daemon that answers. Raises DaemonUnreachable without one, Unavailable and PortBusy."""
    if daemon_version(settings) is None:
        there = " there" if endpoint(settings).is_remote else ""
        raise errors.DaemonUnreachable(
            f"no daemon is running at {base_url(settings)}; `localrun serve` starts one{there}"
        )
    return base_url(settings)


def wait_until_gone(settings: config.Settings, timeout_s: float) -> None:
    """Wait for a daemon that was asked to end. Raises Unavailable when it is still running after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            if daemon_version(settings) is None:
                return
        except errors.PortBusy:
            return  # cut off while it closed its port, or somebody else has the port already
        except errors.Unavailable:
            pass
        if time.monotonic() > deadline_s:
            raise errors.Unavailable(f"the daemon at {base_url(settings)} is still running after {timeout_s:g} s")
        time.sleep(POLL_INTERVAL_S)


def daemon_version(settings: config.Settings) -> str | None:
    """The version of the daemon at the settings' address; None when nobody listens there.

    Raises Unavailable for a daemon that is shutting down, Forbidden for a host name that it refuses, PortBusy when
    somebody listens who is not localrun, UntrustedCertificate (of one that is new the person is asked first), and
    DaemonUnreachable for a name that nobody answers to.
    """
    where = endpoint(settings)
    from localrun.access import trust

    connection = trust.http_connection(where, PROBE_TIMEOUT_S)
    try:
        try:
            connection.connect()
        except ssl.SSLCertVerificationError:
            connection.close()
            connection = _connected_once_trusted(where)
        except ssl.SSLError:
            raise errors.PortBusy(
                f"what listens at port {where.port} of {where.host} does not speak TLS, as a localrun daemon does with "
                f"other machines; use another --port, or look at what is running there"
            ) from None
        except TimeoutError:
            raise errors.DaemonUnreachable(
                f"there is no answer from {where.url} within {PROBE_TIMEOUT_S:g} s; is the machine on and in "
                f"this network, and does its firewall let port {where.port} through?"
            ) from None
        except OSError as error:
            if error.errno == errno.EHOSTUNREACH and where.is_remote:
                mac = ", and may this program use it (Privacy & Security, Local Network)"
                hint = mac if sys.platform == "darwin" else ""
                raise errors.DaemonUnreachable(
                    f"{where.url} cannot be reached; are both machines on one network{hint}?"
                ) from None
            return None
        try:
            response, content = _get(connection, "/health")
            refusal = response.getheader("X-Localrun-Error")
            if refusal == errors.Forbidden.code:
                way_out = "list it in LOCALRUN_HOST_NAMES there" if where.is_remote else "use --host 127.0.0.1"
                raise errors.Forbidden(f"the daemon does not answer to the name {settings.host}; {way_out}")
            if refusal is not None:
                raise errors.Unavailable(f"the daemon at {base_url(settings)} is shutting down")
            answer = _json_object(content)
            # Others have a /health too; only ours names its version there.
            if answer.get("status") == "ok" and isinstance(answer.get("version"), str):
                return str(answer["version"])
            is_ollama = b"Ollama is running" in _get(connection, "/")[1]
            other = "Ollama" if is_ollama else "a program that is not localrun"
        except (OSError, http.client.HTTPException):
            other = "a program that does not answer as localrun does"
    finally:
        connection.close()
    raise errors.PortBusy(
        f"port {settings.port} of {settings.host} is in use by {other}; choose another one with --port or LOCALRUN_PORT"
    )


def _connected_once_trusted(where: Endpoint) -> http.client.HTTPConnection:
    """After the person was asked about a certificate that was not seen before. Raises UntrustedCertificate."""
    from localrun.access import certificate, trust

    hosts = trust.TrustedHosts()
    if where.name in hosts.all() or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise trust.untrusted(where)
    shown = trust.shown_certificate(where)
    seen = certificate.fingerprint(shown)
    progress(f"The certificate of {where.name} is new here. Its SHA-256 fingerprint is\n  {seen}")
    if not click.confirm("Is it the one that `localrun serve` shows there? Trust it", err=True):
        raise trust.untrusted(where)
    hosts.trust(where, shown)
    connection = trust.http_connection(where, PROBE_TIMEOUT_S)
    connection.connect()
    return connection


def version_if_any(settings: config.Settings) -> str | None:
    """As `daemon_version`; None also for a daemon that is starting or stopping, and for somebody else."""
    try:
        return daemon_version(settings) if settings.port else None
    except (errors.PortBusy, errors.Unavailable):
        return None


def _get(connection: http.client.HTTPConnection, path: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection.request("GET", path)
    response = connection.getresponse()
    return response, response.read(65536)


def _json_object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """While one command starts a daemon, others wait: each would move the other's log away. Raises Unavailable."""
    import filelock

    folder = config.folders().state
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with filelock.FileLock(folder / "daemon.lock", timeout=START_TIMEOUT_S, mode=0o600):
            yield
    except filelock.Timeout:
        raise errors.Unavailable(
            f"another command has been starting a daemon for {START_TIMEOUT_S:g} s; the log is in {folder}"
        ) from None


def _start(settings: config.Settings) -> bool:
    """Whether it is this one that runs now, and not one that somebody else started meanwhile."""
    log_path = _fresh_log(settings)
    # -P: the folder that the user happens to be in must not be a place to import from.
    command = [sys.executable, "-P", "-m", "localrun", "serve", "--host", settings.host, "--port", str(settings.port)]
    command += ["--idle-exit", str(IDLE_EXIT_S)]
    with log_path.open("ab") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **DETACHED)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        status = child.poll()
        try:
            if daemon_version(settings) is not None:
                return status is None
        except errors.PortBusy:
            if status is not None:
                raise
            # Ours may hold the port already and be too busy starting to answer.
        if status is not None and status != exits.PORT_BUSY:
            raise errors.DaemonUnreachable(f"the daemon exited at once, with status {status}{_log_tail(log_path)}")
        if time.monotonic() > deadline_s:
            child.kill()
            raise errors.DaemonUnreachable(f"the daemon did not start in {START_TIMEOUT_S:g} s{_log_tail(log_path)}")
        time.sleep(POLL_INTERVAL_S)


def _others(settings: config.Settings) -> str:
    """Says where else a daemon of this data folder runs: a wrong port is easily given."""
    from localrun.access.keys import local_ports

    at_ports = [msgspec.structs.replace(settings, port=port) for port in local_ports(config.folders().state)]
    running = [str(at.port) for at in at_ports if at.port != settings.port and version_if_any(at) is not None]
    return f"; another one with the same data runs at port {' and '.join(running)}" if running else ""


def log_path(settings: config.Settings) -> Path:
    """The log of the last daemon that a command started at this address; the service has one of its own. `daemon.log`,
    with what differs from the usual address: several daemons may have one state folder."""
    host = "" if settings.host in ("127.0.0.1", "localhost") else settings.host.replace(":", "_")
    port = "" if settings.port == config.DEFAULT_PORT else str(settings.port)
    return config.folders().state / ("-".join(filter(None, ("daemon", host, port))) + ".log")


def _fresh_log(settings: config.Settings) -> Path:
    """An empty log for the next daemon; that of the one before it at this address is kept, as `daemon.log.1`."""
    path = log_path(settings)
    if path.exists():
        os.replace(path, path.with_suffix(".log.1"))
    path.touch(mode=0o600)
    return path


def _log_tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    shown = "".join(f"\n  {line}" for line in lines[-LOG_TAIL_LINES:])
    return f"; the end of {path}:{shown}" if shown else f"; {path} is empty"
