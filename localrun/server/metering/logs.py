"""The daemon's log: how a line is written to stderr; the latest lines, the engines' among them, with a way to wait for
the next; and a line for each request, where the setting `request_log` asks for it.

The feed: one per Runtime, a handler of the root logger while the daemon runs; records may come from any thread, readers
are tasks of the daemon's event loop. A line has a number that only grows, also from one daemon to the next, so a reader
that comes back goes on where it was, and one that was too slow sees a gap in the numbers.

Does not: write files, or keep more than `KEPT_LINES`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.types import Scope

from localrun.server.http.exchange import CLIENT_GONE, Account, Ended
from localrun.server.http.fields import ids_of
from localrun.snapshot import LogLine
from localrun.visible import visible

KEPT_LINES = 2_000
MAX_TEXT_CHARACTERS = 4_000

_ENGINE_LINE = re.compile(r"\[(?P<model>[^\]]+)\] (?P<text>.*)", re.DOTALL)


# As syslog has them, and with it systemd's journal.
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}


def goes_to_journal(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether systemd's journal reads this stream: the variable names the device and the inode of the one that it
    does."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


# The attribute of a record that is a whole line by itself.
WHOLE = "is_whole"


class LineFormatter(logging.Formatter):
    """A line with its time and zone; for the journal, which has the time itself, each line with its priority. What is a
    whole line gets nothing else. A terminal or a pager may read it."""

    def __init__(self, *, is_for_journal: bool) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")
        self._is_for_journal = is_for_journal

    def format(self, record: logging.LogRecord) -> str:
        is_whole = getattr(record, WHOLE, False)
        text = visible(record.getMessage() if is_whole else super().format(record))
        if self._is_for_journal:
            priority = f"<{_PRIORITIES.get(record.levelname, 6)}>"
            return "\n".join(priority + line for line in text.split("\n"))
        if is_whole:
            return text
        when = datetime.fromtimestamp(record.created).astimezone()
        return f"{when.isoformat(' ', 'milliseconds')} {text}"


class LogFeed(logging.Handler):
    """See the module. `start` and `stop` in the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=KEPT_LINES)
        # Microseconds: a daemon that is started later counts from higher on, unless it logs a million lines a second.
        self._numbers = itertools.count(time.time_ns() // 1_000)
        self._news = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        logging.getLogger().addHandler(self)

    def stop(self) -> None:
        logging.getLogger().removeHandler(self)
        self._loop = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                text += f"\n{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        except Exception:  # a record that cannot be formatted must not end whoever logged it
            self.handleError(record)
            return
        source = record.name
        if source == "localrun.engine" and (found := _ENGINE_LINE.fullmatch(text)):
            source, text = found["model"], found["text"]
        level = record.levelname.lower()
        self._lines.append(LogLine(next(self._numbers), record.created, level, source, text[:MAX_TEXT_CHARACTERS]))
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._news.set)

    def since(self, number: int) -> list[LogLine]:
        """The kept lines with higher numbers, oldest first."""
        return [line for line in list(self._lines) if line.number > number]

    async def wait(self, number: int, timeout_s: float) -> None:
        """Returns when there is a line with a higher number, or the time is over."""
        if self._lines and self._lines[-1].number > number:
            return
        self._news.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout_s)


MAX_PATH_CHARACTERS = 200
# What needs no quotation marks.
_WORD = re.compile(r"[\w./:+@=~-]+", re.ASCII)

_requests = logging.getLogger("localrun.requests")


def request_writer(form: str) -> Ended:
    """What writes one line for each HTTP request that has ended: a text for people, or JSON for programs, with the same
    fields. Whatever the log's level is, they are in it.

        POST /v1/chat/completions 200 1.234s id=req_… model=tiny prompt_tokens=16 cached_tokens=0 output_tokens=10
        ttft_s=0.050 reason=length from=127.0.0.1 client=curl client_id=my-42

    `reason` is why the last answer ended, or the code of the error. Fields that a request does not have are left out.
    Tells nothing of what was asked or answered, or of a request's query.
    """
    _requests.setLevel(logging.INFO)
    return _as_json if form == "json" else _as_text


def _as_text(scope: Scope, account: Account, seconds: float) -> None:
    fields = _fields(scope, account)
    beginning = [fields.pop("method"), _shown(fields.pop("path")), str(fields.pop("status")), f"{seconds:.3f}s"]
    _requests.info("%s", " ".join(beginning + [f"{name}={_shown(value)}" for name, value in fields.items()]))


def _as_json(scope: Scope, account: Account, seconds: float) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = {"time": now} | _fields(scope, account) | {"duration_s": round(seconds, 6)}
    _requests.info("%s", json.dumps(line), extra={WHOLE: True})


def _fields(scope: Scope, account: Account) -> dict[str, Any]:
    caller, peer = scope.get("localrun.caller"), scope.get("client")
    # Without those by which a tier chose.
    records = [record for record in account.records if record.api == scope["path"]]
    client_id, trace_id = ids_of(scope)
    found: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"][:MAX_PATH_CHARACTERS],
        "status": account.status or CLIENT_GONE,
        "id": account.request_id,
    }
    if records:
        first = records[0]
        found |= {
            "model": first.model,
            "prompt_tokens": first.n_prompt,
            "cached_tokens": first.n_cached,
            "output_tokens": sum(record.n_output for record in records),
            "ttft_s": None if first.ttft_s is None else round(first.ttft_s, 6),
            "reason": records[-1].finish_reason,
        }
    if account.error is not None:
        found["reason"] = account.error.code
    found |= {
        "from": peer[0] if peer else None,
        "client": records[0].client if records else None,
        "key": None if caller is None or caller.key is None else caller.name,
        "client_id": client_id,
        "trace_id": trace_id,
    }
    return {name: value for name, value in found.items() if value not in (None, "")}


def _shown(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text)
