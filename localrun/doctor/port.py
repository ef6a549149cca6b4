"""Who has the port: nobody, our daemon, or somebody else."""

from __future__ import annotations

import socket

from localrun.doctor.finding import Finding, fail, ok, warn


def check_port(
    host: str, port: int, *, own_version: str, daemon_version: str | None, problem: str = "", is_stopping: bool = False
) -> Finding:
    """`daemon_version` of a daemon that answers there; `problem` says who else does, or why ours does not."""
    where = f"{host}:{port}"
    if is_stopping:
        return warn("daemon", problem, "wait until it has ended, then run this again")
    if problem:
        return fail("daemon", problem, "end that program, or choose another port with --port or LOCALRUN_PORT")
    if daemon_version is None:
        refusal = _cannot_listen(host, port)
        if refusal:
            return fail("daemon", f"{where} cannot be listened on: {refusal}", "choose another one: LOCALRUN_PORT")
        return ok("daemon", f"not running; {where} is free")
    if daemon_version != own_version:
        return warn(
            "daemon", f"{where} is localrun {daemon_version}, but this is {own_version}",
            "end the old one: `localrun stop --daemon`, or `localrun service install` for the service",
        )  # fmt: skip
    return ok("daemon", f"localrun {daemon_version} answers at {where}, as new as this program")


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
