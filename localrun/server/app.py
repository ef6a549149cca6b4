"""The daemon: all routes behind the limits, and the process that serves them.

`build` makes the ASGI app, `serve` runs it: its own socket (so that a busy port is a sentence and not a traceback),
uvicorn on uvloop where there is one, one line on stdout when it is ready, and an orderly end.

The end has one order, whoever asks for it (a signal, the shutdown route, idleness): no new jobs, running ones get
their time, engines end, streams close, the process returns 0. A second signal ends it at once; engines notice by
themselves that their parent is gone. The service manager that started the daemon, if any, is told of its beginning and
its end.

Does not: know what any route does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Iterator, MutableMapping
from functools import partial
from types import FrameType
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from localrun import ollama_environment
from localrun.access import certificate as certificates
from localrun.access import discovery
from localrun.access.certificate import Certificate
from localrun.access.discovery import Announcement
from localrun.config import ConfigError, Settings, env_name, folders, model_dirs, models_folder, slips
from localrun.errors import LocalrunError, MethodNotAllowed, NotFound, NoWebSocket, Unavailable
from localrun.server.http import failures
from localrun.server.http.connection import (
    IDLE_S,
    UPGRADE_OFFER,
    BoundedConnection,
    Listening,
    address_of,
    bracketed,
    is_wildcard,
    keep_accepting,
    listen,
    served_names,
    url_of,
)
from localrun.server.http.exchange import Account, refusal
from localrun.server.http.limits import Limits
from localrun.server.metering.logs import LineFormatter, goes_to_journal, request_writer
from localrun.server.openapi import operations as table
from localrun.server.runtime import Elsewhere, Runtime

if sys.platform != "win32":
    import resource

# After the engines have ended every stream has its last event; this is only for those events to leave.
_CLOSE_TIMEOUT_S = 5
_BACKLOG = 512
# TLS handshakes end after this; until then they do not count as connections.
_HANDSHAKE_TIMEOUT_S = 10
# Systems begin with 1,024 descriptors, or with 256: less than connections, refused ones, engines and files take.
_DESCRIPTORS = 4096
# The numbers of glibc's malloc.h.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
# An idle daemon with a download or a batch under way is looked at this often.
_PULL_POLL_S = 5.0

_log = logging.getLogger(__name__)


def build(settings: Settings, runtime: Runtime) -> Limits:
    """The ASGI app. Its lifespan starts and stops the runtime. Raises ConfigError for bad `settings.origins`."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await runtime.start()
        try:
            yield
        finally:
            await runtime.stop()

    routes = table.routes(runtime)
    runtime.batch_service.serve(routes)
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _unrouted})
    app.router.redirect_slashes = False

    write = None if settings.request_log == "off" else request_writer(settings.request_log)

    def ended(scope: Scope, account: Account, seconds: float) -> None:
        runtime.telemetry.answered(failures.shape_of(scope["path"]), account)
        if write is not None:
            write(scope, account, seconds)

    is_stopping = runtime.shutdown_requested.is_set
    return Limits(app, settings, runtime.access, runtime.loop_watch, ended, table.find, is_stopping)


def serve(settings: Settings, idle_exit_s: float | None = None, elsewhere: Elsewhere | None = None) -> None:
    """Runs the daemon until it is asked to end, or has been idle for `idle_exit_s`. `elsewhere` are engines of other
    machines.

    Prints `localrun is listening on URL` when it is ready, and how other machines reach it if they can. Raises
    ConfigError for an address that this machine does not have, and for one that others can reach without an API key or
    a certificate, PortBusy, and Unavailable when it cannot start; logging goes to stderr.
    """
    is_local = address_of(settings.host).is_loopback
    # The person's own is looked at even where nobody needs it: a wrong name is said at once.
    own = certificates.of_files(settings.tls_cert, settings.tls_key) if settings.tls_cert or settings.tls_key else None
    certificate = None if is_local else own or certificates.kept(folders().data, served_names(settings))
    listening = listen(settings.host, settings.port)
    _allow_descriptors()
    _give_memory_back()
    _configure_logging(settings.log_level)
    try:
        told = ollama_environment.told(settings)
        if told:
            _log.info("%s", told)
        for name, meant in slips().items():
            _log.warning("%s is no setting; set %s if that is meant", name, meant)
        _check_files(settings)
        runtime = Runtime(settings, elsewhere=elsewhere)
        if not is_local and not runtime.access.has_usable_keys():
            raise ConfigError(
                f"host is {settings.host!r}, which other machines can reach, and there is no API key; make one first: "
                f"localrun key create --name NAME"
            )
        _make_local_key(runtime, listening)
        app = build(settings, runtime)
        config = uvicorn.Config(
            app,
            loop="auto",
            http=partial(  # type: ignore[arg-type]
                BoundedConnection,
                deadline_s=settings.receive_deadline_s,
                on_refused=runtime.telemetry.refused,
                find=table.find,
            ),
            ws="none",
            lifespan="on",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        )
        daemon = _Daemon(config, runtime, app, listening, idle_exit_s=idle_exit_s)
        if certificate is not None:
            daemon.invite(settings, certificate)
        daemon.run(sockets=list(filter(None, (listening.local, listening.local_v6))))
    except SystemExit:
        # uvicorn's way to say that the lifespan failed, after it has logged why.
        raise Unavailable("the daemon could not start; the lines above say why") from None
    finally:
        listening.close()


class _Daemon(uvicorn.Server):
    """uvicorn's server with another beginning and another end."""

    def __init__(
        self, config: uvicorn.Config, runtime: Runtime, app: Limits, listening: Listening, *, idle_exit_s: float | None
    ) -> None:
        super().__init__(config)
        self._runtime = runtime
        self._app = app
        self._listening = listening
        self._idle_exit_s = idle_exit_s
        self._notify = ServiceNotify()
        self._tls: ssl.SSLContext | None = None
        self._invitation = ""
        self._announcement: Announcement | None = None

    def invite(self, settings: Settings, found: Certificate) -> None:
        """To be called before the start: other machines may come, by TLS with this certificate."""
        assert self._listening.outside is not None
        self._tls = certificates.context(found)
        port = self._listening.outside.getsockname()[1]
        name = socket.gethostname().partition(".")[0] + ".local" if is_wildcard(settings.host) else settings.host
        self._invitation = (
            f"other machines use https://{bracketed(name)}:{port} with an API key\n"
            f"its certificate{' (new)' if found.is_new else ''} is {found.certificate}, SHA-256 {found.fingerprint}"
        )
        if settings.announce == "on":
            self._announcement = Announcement(address_of(settings.host), port, found.fingerprint, self._is_called)

    def _is_called(self, name: str) -> None:
        """The announced name was taken; this is the new one."""
        self._app.serve_name(name)
        _say(f"other machines find this one as {name}, because another one has its name")

    async def startup(self, sockets: list[Any] | None = None) -> None:
        keep_accepting(asyncio.get_running_loop())
        await super().startup(sockets)
        url = url_of(self._listening.local)
        _say(f"localrun is listening on {url}")
        if self._tls is not None and self.started:
            await self._listen_outside(self._tls)
            _say(self._invitation)
            if self._announcement is not None:
                self._announcement.start()
        # What is there now stays. The collector need not look through it whenever somebody sends many values.
        gc.collect()
        gc.freeze()
        if self.started:
            self._notify.send(READY, f"listening on {url}")

    async def _listen_outside(self, tls: ssl.SSLContext) -> None:
        """uvicorn would have one TLS context for all of its sockets, or for none."""
        assert self._listening.outside is not None
        for option in discovery.socket_options():  # which its connections inherit
            with contextlib.suppress(OSError):
                self._listening.outside.setsockopt(*option)
        loop, config = asyncio.get_running_loop(), self.config

        def new_connection() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state, _loop=loop
            )

        server = await loop.create_server(
            new_connection, sock=self._listening.outside, ssl=tls, backlog=config.backlog,
            ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S,
        )  # fmt: skip
        self.servers.append(server)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._announcement is not None:
            await self._announcement.stop()
        await super().shutdown(sockets)

    async def main_loop(self) -> None:
        """Returns when the runtime has ended. The server closes its connections after that: a stream ends when its
        engine does, not before."""
        idle = asyncio.create_task(self._watch_idle()) if self._idle_exit_s is not None else None
        await self._runtime.shutdown_requested.wait()
        if idle is not None:
            idle.cancel()
        self._notify.send(STOPPING)
        _log.info("stopping")
        await self._runtime.stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As the base, but an end that was asked for by a signal is a good end: the signal is not raised again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = [signal.SIGINT, signal.SIGTERM]
        if sys.platform == "win32":
            signals.append(signal.SIGBREAK)
        elif signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as with nohup
            signals.append(signal.SIGHUP)

        def handle(number: int, _: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL)
            loop.call_soon_threadsafe(self._runtime.request_shutdown)

        def pass_over(number: int, _: FrameType | None) -> None:
            name = signal.Signals(number).name
            loop.call_soon_threadsafe(_log.warning, "%s means nothing here; SIGTERM ends the daemon", name)

        before = {number: signal.signal(number, handle) for number in signals}
        if sys.platform != "win32":  # others reread their settings or their log at these; nobody means to end it
            before |= {number: signal.signal(number, pass_over) for number in (signal.SIGUSR1, signal.SIGUSR2)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def _watch_idle(self) -> None:
        assert self._idle_exit_s is not None
        pulls, batches = self._runtime.pulls, self._runtime.batch_service
        # Nothing happens at the end of an idle time, so there is no event to wait for.
        while (  # noqa: ASYNC110
            (remaining_s := self._idle_exit_s - self._app.idle_s()) > 0 or pulls.n_running or batches.n_running
        ):
            await asyncio.sleep(remaining_s if remaining_s > 0 else _PULL_POLL_S)
        _log.info("idle for %g s", self._idle_exit_s)
        self._runtime.request_shutdown()


def _say(text: str) -> None:
    """To whom it concerns. A full disk, where the background's log is, ends no daemon."""
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - what was not written would be again


def _check_files(settings: Settings) -> None:
    """Raises ConfigError for what cannot be used as the settings say; a folder of other programs may come later."""
    for own in (*msgspec.structs.astuple(folders()), models_folder(settings)):
        try:
            str(own).encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{own} is not UTF-8; name a folder that is (LOCALRUN_HOME, LOCALRUN_MODELS)") from None
    others = [("model_dirs", folder) for folder in model_dirs(settings)]
    for field, folder in (("models_dir", models_folder(settings).absolute()), *others):
        there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        named = f"{field} ({env_name(field)}) is {folder}"
        if not there.is_dir():
            raise ConfigError(f"{named}, and {there} is a file; name a folder")
        if there == folder:
            continue
        if field == "model_dirs":
            _log.warning("%s, which is not there; its models are listed as soon as it is", named)
        elif not os.access(there, os.W_OK):
            _log.warning("%s, which cannot be made: %s is read-only; no model can be pulled or created", named, there)


def _make_local_key(runtime: Runtime, listening: Listening) -> None:
    """Without it the programs of this user would need an API key like all others."""
    try:
        runtime.access.make_local_key(listening.local.getsockname()[1])
    except OSError as error:
        _log.warning("localrun's own commands will need an API key: %s", error)


async def _unrouted(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the shape of the family that the path belongs to."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    more = dict(error.headers or {})
    answer: LocalrunError
    if error.status_code == MethodNotAllowed.status:
        # The router names the methods of the first route alone that has this path.
        routes = [one for one in request.app.routes if one.matches(request.scope)[0] is not Match.NONE]
        more["Allow"] = ", ".join(sorted({method for one in routes for method in one.methods}))
        answer = MethodNotAllowed(f"{path} does not take {request.method}; it takes {more['Allow']}")
        if request.headers.get(UPGRADE_OFFER, "").lower() == "websocket":
            answer = NoWebSocket(f"{path} has no WebSocket; send {more['Allow']} requests, and stream their answers")
            more |= {"Upgrade": "HTTP/1.1", "Connection": "Upgrade"}
    else:
        answer = NotFound(f"{path} is not a route of this server")
    named, body = refusal(request.scope, answer)
    headers = {name.decode("ascii"): value.decode("ascii") for name, value in named}
    return Response(body, answer.status, headers | more)


def _allow_descriptors() -> None:
    """Without enough of them a connection is closed unanswered, and no engine can start."""
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # more than the system's own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _give_memory_back() -> None:
    """What a large body took is the system's again once it is gone. glibc would keep up to 32 MB of it, in an arena for
    each of the threads that decoded one: after 167 bodies of 30 MB the daemon had 188 MB instead of 90."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # in glibc
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        mallopt(_M_ARENA_MAX, 2)


def _configure_logging(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(is_for_journal=goes_to_journal(sys.stderr)))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # Its own lines on starting and stopping say what ours say.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    # It writes down every address it asks, and those of downloads carry what lets anybody use them.
    logging.getLogger("httpx2").setLevel(max(logging.WARNING, logging.getLogger().level))


READY = "READY=1"
STOPPING = "STOPPING=1"


class ServiceNotify:
    """Takes the address out of `environ`, once, at start."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "")

    def send(self, state: str, status: str = "") -> None:
        """Send READY or STOPPING, with a line that `systemctl status` shows."""
        if not self._address:
            return
        # A leading @ is how the environment writes the NUL of Linux's abstract names.
        name = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        message = f"{state}\nSTATUS={status}" if status else state
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.connect(name)
                sender.sendall(message.encode())
        except (OSError, AttributeError, ValueError) as error:  # Windows' Python has no AF_UNIX
            _log.warning("the service manager cannot be told %s: %s", state, error)
