"""Who asks, and how it is to be served, from the request's headers and body.

The client's name is what people see in the request table and what fairness is counted by; it proves nothing. Lane,
latency and deadline may come as headers or as fields of the body; the body's count where both are given, because the
headers are what a client is set up with once. `keep_alive` comes in every spelling that Ollama's clients use: a number
of seconds, or a text with a number or a duration of Go's form ("5m", "1h30m", "-1s", "300ms"); negative is for ever, 0
is unload at once.
"""

from __future__ import annotations

import math
import re

from localrun.config import ConfigError, latency_target_s
from localrun.errors import BadRequest
from localrun.server.engines.resident import Use
from localrun.server.http.exchange import Exchange
from localrun.server.http.fields import SamplingFields, ServiceFields
from localrun.server.jobs.job import Ask
from localrun.wire import Lane

MAX_CLIENT_CHARACTERS = 64
MAX_DEADLINE_S = 86_400.0

_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]+", re.ASCII)
_MAX_QUOTED = 40


def ask(
    exchange: Exchange,
    model: str,
    wanted: ServiceFields | SamplingFields,
    *,
    use: Use = Use.TEXT,
) -> Ask:
    """What to ask the runtime for. Raises BadRequest for a lane, a latency, a deadline or a duration that is none."""
    return Ask(
        model=model,
        api=exchange.path,
        client=client(exchange),
        lane=lane(exchange, wanted.lane),
        target_itl_s=target_itl_s(exchange, wanted.latency),
        deadline_s=deadline_s(exchange, wanted.deadline_s),
        keep_alive_s=keep_alive_s(wanted.keep_alive),
        use=use,
    )


def lane(exchange: Exchange, field: str | None = None) -> Lane:
    """`lane` or `X-Localrun-Lane`, else the default lane."""
    where, text = _where(exchange, "lane", field, "X-Localrun-Lane")
    name = text.strip().lower()
    if not name:
        return Lane.DEFAULT
    if name not in set(Lane):
        raise BadRequest(f"{where}: {name[:_MAX_QUOTED]!r} is not a lane; use {', '.join(Lane)}", field=where)
    return Lane(name)


def target_itl_s(exchange: Exchange, field: str | float | None = None) -> float | None:
    """`latency` or `X-Localrun-Latency`, a mode or a number of milliseconds, as seconds; 0 is no limit, None is the
    daemon's setting."""
    where, text = _where(exchange, "latency", field, "X-Localrun-Latency")
    name = text.strip().lower()
    if not name:
        return None
    try:
        return latency_target_s(name[:_MAX_QUOTED])
    except ConfigError as error:
        raise BadRequest(f"{where}: {error}", field=where) from None


def deadline_s(exchange: Exchange, field: float | None = None) -> float | None:
    """`deadline_s` or `X-Localrun-Deadline`: seconds from the request's arrival; None without one."""
    where, text = _where(exchange, "deadline_s", field, "X-Localrun-Deadline")
    if not text.strip():
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_DEADLINE_S:
        raise BadRequest(
            f"{where}: {text[:_MAX_QUOTED]!r} is not a deadline; use a number of seconds up to {MAX_DEADLINE_S:.0f}",
            field=where,
        )
    return seconds


def _where(exchange: Exchange, name: str, field: str | float | None, header: str) -> tuple[str, str]:
    """What was said, and by which name."""
    if field is not None:
        return name, str(field)
    return header, exchange.header(header.lower().encode("ascii"))


def client(exchange: Exchange) -> str:
    """`X-Localrun-Client`, else the product in the User-Agent, else the peer's address."""
    named = _printable(exchange.header(b"x-localrun-client"))
    if named:
        return named
    product = _printable(exchange.header(b"user-agent")).partition(" ")[0].partition("/")[0]
    if product:
        return product
    peer = exchange.scope.get("client")
    return str(peer[0]) if peer else ""


def _printable(text: str) -> str:
    return _NOT_PRINTABLE.sub(" ", text).strip()[:MAX_CLIENT_CHARACTERS]


_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_DURATION = re.compile(rf"(?P<sign>[+-]?)(?P<parts>(?:{_PART.pattern})+)", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)
_MAX_DURATION_CHARACTERS = 64


def keep_alive_s(value: float | str | None) -> float | None:
    """Seconds; -1.0 for ever; None for the daemon's own setting. Raises BadRequest for anything else."""
    if value is None or value == "":
        return None
    parsed = _parse(value) if isinstance(value, str) else float(value)
    if parsed is None or not math.isfinite(parsed):
        raise BadRequest(
            f"keep_alive: {str(value)[:_MAX_DURATION_CHARACTERS]!r} is not a duration; use seconds, or a text such as "
            f"'5m', '1h30m' or '-1'",
            field="keep_alive",
        )
    return -1.0 if parsed < 0 else parsed


def _parse(text: str) -> float | None:
    text = text.strip()
    if len(text) > _MAX_DURATION_CHARACTERS:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    total_s = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(match["parts"]))
    return -total_s if match["sign"] == "-" else total_s
