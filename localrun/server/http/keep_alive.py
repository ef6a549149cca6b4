"""`keep_alive`: how long an idle model stays loaded, in every spelling that Ollama's clients use.

A number is seconds. A string is a duration of Go's form ("5m", "1h30m", "-1s", "300ms") or a number. Negative is for
ever, 0 is unload at once.
"""

from __future__ import annotations

import math
import re

from localrun.errors import BadRequest

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_DURATION = re.compile(rf"(?P<sign>[+-]?)(?P<parts>(?:{_PART.pattern})+)", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)
_MAX_CHARACTERS = 64


def seconds(value: float | str | None) -> float | None:
    """Seconds; -1.0 for ever; None for the daemon's own setting. Raises BadRequest for anything else."""
    if value is None or value == "":
        return None
    parsed = _parse(value) if isinstance(value, str) else float(value)
    if parsed is None or not math.isfinite(parsed):
        raise BadRequest(
            f"keep_alive: {str(value)[:_MAX_CHARACTERS]!r} is not a duration; use seconds, or a text such as '5m', "
            f"'1h30m' or '-1'",
            field="keep_alive",
        )
    return -1.0 if parsed < 0 else parsed


def _parse(text: str) -> float | None:
    text = text.strip()
    if len(text) > _MAX_CHARACTERS:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    total_s = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(match["parts"]))
    return -total_s if match["sign"] == "-" else total_s
