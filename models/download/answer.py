"""What a server's answer to a request for a range means. Pure.

A server may answer with the range (206), with the whole file (200: it cannot do ranges, or the content changed since
the validator was given), with a passing failure, or with a refusal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from localrun.errors import DownloadFailed, SourceChanged, SourceRefused
from localrun.models.download.ranges import Range
from localrun.models.download.retry import PASSING_STATUSES, retry_after_s

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.IGNORECASE)
_MAX_REASON_CHARS = 300


class PassingFailure(Exception):
    """Worth another try. `wait_s` is what the server asked for."""

    def __init__(self, reason: str, *, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(frozen=True)
class Answer:
    """The body begins at byte `start` of a content of `total_bytes` (None: the server does not say).

    `validator` is the strong ETag, "" if there is none.
    """

    start: int
    total_bytes: int | None
    validator: str


def read(status: int, headers: Mapping[str, str], asked: Range, *, name: str, host: str, now: datetime) -> Answer:
    """The answer to a request for `asked`. `headers` has lower-case names (httpx2's does for any case).

    Raises PassingFailure, SourceChanged (416), and SourceRefused for what no other try would change.
    """
    if status in PASSING_STATUSES:
        wait_s = retry_after_s(headers.get("retry-after"), now=now)
        raise PassingFailure(f"{host} answered {status}{_reason(headers)}", wait_s=wait_s)
    if status == 416:
        raise SourceChanged(f"{name} is shorter on {host} than it was said to be; pull again to get the new version")
    if status not in (200, 206):
        raise SourceRefused(f"{host} refused {name} with status {status}{_reason(headers)}", source_status=status)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise DownloadFailed(f"{host} sends {name} compressed, though it was asked not to; this cannot be resumed")
    validator = strong_etag(headers.get("etag"))
    if status == 200:
        return Answer(0, _length(headers.get("content-length")), validator)
    content_range = _CONTENT_RANGE.fullmatch(headers.get("content-range", "").strip())
    if content_range is None:
        raise PassingFailure(f"{host} answered with a range without saying which")
    start, _, total_bytes = map(int, content_range.groups())
    if start != asked.start:
        raise PassingFailure(f"{host} answered with the range from {start} instead of {asked.start}")
    return Answer(start, total_bytes, validator)


def strong_etag(header: str | None) -> str:
    """An ETag that means the same bytes, as it stands in the header; "" for a weak one or none (RFC 9110, 8.8.3)."""
    text = (header or "").strip()
    return text if text.startswith('"') and text.endswith('"') and len(text) > 2 else ""


def _length(header: str | None) -> int | None:
    return int(header) if header and header.isascii() and header.isdigit() else None


def _reason(headers: Mapping[str, str]) -> str:
    """What the hub says about a failure."""
    text = headers.get("x-error-message") or headers.get("x-error-code") or ""
    return f" ({text[:_MAX_REASON_CHARS]})" if text.isprintable() and text else ""
