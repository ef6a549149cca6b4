"""`localrun doctor`: looks at this machine, the build, the files and the settings, and says what to do about each.

`examine.py` runs the checks in order. Each module looks at one thing and yields `Finding`s; what depends on nothing but
its arguments is a pure function of them. Nothing is sent anywhere, and nothing changed: only the verdict about kernels
is kept, in a cache folder that exists. It comes from `kernel_probe.py`, a process that the daemon starts, too.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Level(StrEnum):
    """`warn`: works, but not as well as it could. `fail`: something does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """`check` is a stable name, `remedy` what to do; empty where nothing is to be done."""

    check: str
    level: Level
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check, Level.OK, text)


def warn(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.WARN, text, remedy)


def fail(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.FAIL, text, remedy)


def size(n_bytes: float) -> str:
    """Decimal gigabytes, or megabytes below one."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"
