"""The network: who has the daemon's port, and whether pulls can go out, as far as settings decide it.

Does not: connect to anything.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from localrun.doctor.finding import Finding, fail, ok, warn

_TRUE = ("1", "true", "yes", "on")
_PROXIES = ("https_proxy", "http_proxy", "all_proxy")


def check_network(environ: Mapping[str, str]) -> Iterator[Finding]:
    """By the variables that huggingface_hub and HTTP clients read."""
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if environ.get(name, "").lower() in _TRUE]
    if offline:
        yield warn("network", f"offline: {offline[0]}={environ[offline[0]]}", f"unset {offline[0]} to pull models")
    endpoint = environ.get("HF_ENDPOINT")
    proxies = [(name, value) for name in _PROXIES if (value := environ.get(name) or environ.get(name.upper()))]
    parts = [f"{name} {_without_password(value)}" for name, value in proxies]
    if endpoint:
        parts.append(f"HF_ENDPOINT {_without_password(endpoint)}")
    if not offline:
        yield ok("network", ", ".join(parts) or "direct, no proxy set")
    spared = (environ.get("no_proxy") or environ.get("NO_PROXY") or "").replace(" ", "").split(",")
    if proxies and not {"*", "localhost", "127.0.0.1", "127.0.0.0/8"} & set(spared):
        yield warn(
            "network", "a proxy is set, and NO_PROXY does not name this machine: editors may ask it for the daemon",
            "export NO_PROXY=localhost,127.0.0.1,::1",
        )  # fmt: skip


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return url if "@" not in parts.netloc else parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]).geturl()


# --- the port: nobody, our daemon, or somebody else ---


def check_port(
    host: str, port: int, *, own_version: str, daemon_version: str | None, problem: str = "", is_stopping: bool = False
) -> Finding:
    """`daemon_version` of a daemon that answers there; `problem` says who else does, or why ours does not."""
    where = f"{host}:{port}"
    if is_stopping:
        return warn("daemon", problem, "wait until it has stopped, then run this again")
    if problem:
        return fail("daemon", problem, "stop that program, or choose another port with --port or LOCALRUN_PORT")
    if daemon_version is None:
        refusal = _cannot_listen(host, port)
        if refusal:
            return fail("daemon", f"{where} is not available: {refusal}", "choose another one: LOCALRUN_PORT")
        return ok("daemon", f"not running; {where} is free")
    if daemon_version != own_version:
        return warn(
            "daemon", f"{where} is localrun {daemon_version}, but this is {own_version}",
            "stop the old one: `localrun stop --daemon`, or `localrun service install` for the service",
        )  # fmt: skip
    return ok("daemon", f"localrun {daemon_version} is running at {where}, the same version as this program")


def _cannot_listen(host: str, port: int) -> str:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # A daemon that has just ended leaves closed connections behind, which are in nobody's way.
            if hasattr(socket, "SO_REUSEPORT"):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""
