"""What a check found, as one line for a person or one object for a program. Pure."""

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
