"""The exit codes, which scripts may rely on.

Does not: print anything.
"""

from __future__ import annotations

from localrun import errors

OK = 0
ERROR = 1
USAGE = 2
PORT_BUSY = 3
DAEMON_UNREACHABLE = 4
MODEL_NOT_FOUND = 5
INTERRUPTED = 130

MEANINGS = {
    OK: "success",
    ERROR: "any other error",
    USAGE: "invalid command line or setting",
    PORT_BUSY: "the port is in use by another program",
    DAEMON_UNREACHABLE: "the daemon does not answer or has gone",
    MODEL_NOT_FOUND: "no such model",
    INTERRUPTED: "interrupted by Ctrl-C",
}


def code_of(error: errors.LocalrunError) -> int:
    if isinstance(error, errors.PortBusy):
        return PORT_BUSY
    if isinstance(error, errors.DaemonUnreachable):
        return DAEMON_UNREACHABLE
    if isinstance(error, errors.ModelNotFound):
        return MODEL_NOT_FOUND
    return ERROR
