"""What the loopback hub does wrong, and a record of what it was asked and what it sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Faults:
    """Read anew for every answer. The storage is what serves the content of large files; hub is everything else.

    `drop_after(n)`: after how many bytes of its body the n-th answer with content (from 0) breaks off, None for never.
    `hub_answers` and `storage_answers` are given away, first come first served, instead of the true answer: status and
    headers. `n_stalls` of the next answers with content stop after their first chunk. `requests_per_link`: how often a
    signed address of the storage may be used.
    """

    drop_after: Callable[[int], int | None] = lambda n: None
    ignore_range: bool = False
    flip_byte_at: int | None = None
    short_by: int = 0
    endless: bool = False
    no_length: bool = False
    hub_answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    storage_answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    requests_per_link: int | None = None
    storage_etag: str | None = '"storage-1"'
    redirect_status: int = 302
    storage_url: str | None = None
    n_stalls: int = 0
    bytes_per_s: float | None = None
    refuse_storage: bool = False


@dataclass(frozen=True)
class Request:
    server: str
    method: str
    target: str
    headers: dict[str, str]

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


@dataclass
class Record:
    """`content_bytes` counts every byte of content of large files that was handed to the network."""

    requests: list[Request] = field(default_factory=list)
    content_bytes: int = 0
    n_connections: int = 0
    n_content_answers: int = 0

    def of(self, server: str) -> list[Request]:
        return [request for request in self.requests if request.server == server]

    @property
    def requested_bytes(self) -> int:
        """What the storage was asked for. Unlike `content_bytes` not blurred by what former clients left unread."""
        ranges = [request.headers["range"].removeprefix("bytes=").split("-") for request in self.of("storage")]
        return sum(int(last) + 1 - int(first) for first, last in ranges)

    def clear(self) -> None:
        self.requests.clear()
        self.content_bytes = self.n_connections = self.n_content_answers = 0
