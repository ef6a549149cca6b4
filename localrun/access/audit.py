"""Who changed what, and who was turned away: `audit.jsonl` in the state folder, one JSON object a line.

    {"time": "2026-11-23T08:00:00+00:00", "who": "zed", "what": "DELETE /api/delete", "from": "192.168.1.7",
     "result": "200"}

Written by the daemon (acts that change something, failed attempts to get in) and by the command line (keys that are
made and revoked). A file that is larger than `MAX_BYTES` becomes `audit.jsonl.1`, and so on; `N_OLD` of them are kept.
Mode 0600. Does not: hold what was asked or answered.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path

FILE_NAME = "audit.jsonl"
MAX_BYTES = 1024 * 1024
N_OLD = 4

_log = logging.getLogger(__name__)


class AuditLog:
    """See the module. Never raises: what cannot be written is in the daemon's log."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def write(self, *, who: str, what: str, address: str, result: str) -> None:
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "who": who, "what": what, "from": address, "result": result,
        }  # fmt: skip
        line = json.dumps(entry).encode("ascii") + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
            try:
                # One write each, so that lines of several processes never mix.
                os.write(descriptor, line)
                is_full = os.fstat(descriptor).st_size >= MAX_BYTES
            finally:
                os.close(descriptor)
            if is_full:
                self._rotate()
        except OSError as error:
            _log.warning("%s cannot be written (%s): %s", self.path, error.strerror, line.decode("ascii").strip())

    def _rotate(self) -> None:
        for number in range(N_OLD - 1, 0, -1):
            older = self.path.with_name(f"{FILE_NAME}.{number}")
            if older.exists():
                os.replace(older, self.path.with_name(f"{FILE_NAME}.{number + 1}"))
        os.replace(self.path, self.path.with_name(f"{FILE_NAME}.1"))
