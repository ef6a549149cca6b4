from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from localrun.models.download.fetch import fetch, new_client
from localrun.models.download.plan import FetchLimits, Item
from tests.hub.repository import Repository
from tests.hub.server import Hub

REPO = "acme/Fox-GGUF"
FILE = "fox-Q4_K_M.gguf"
SIZE_BYTES = 3_000_017
CONTENT = random.Random(7).randbytes(SIZE_BYTES)
SHA256 = hashlib.sha256(CONTENT).hexdigest()

# Small enough that a file of three megabytes is many parts, and that waits are milliseconds.
LIMITS = FetchLimits(
    connections=4,
    part_bytes=256 * 1024,
    record_bytes=32 * 1024,
    sync_bytes=512 * 1024,
    progress_bytes=1024,
    retries=4,
    backoff_base_s=0.002,
    backoff_cap_s=0.02,
    stall_s=20.0,
    reserve_bytes=0,
)


class Seen:
    """A progress that remembers what it was told."""

    def __init__(self) -> None:
        self.done: dict[str, list[int]] = {}
        self.verified: list[str] = []

    def advanced(self, item: Item, n_bytes_done: int) -> None:
        self.done.setdefault(item.name, []).append(n_bytes_done)

    def n_bytes(self, item: Item) -> int:
        return self.done.get(item.name, [0])[-1]

    def verifying(self, item: Item) -> None:
        self.verified.append(item.name)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(Repository(REPO, {FILE: CONTENT, "README.md": b"# Fox\n"})) as running:
        yield running


@pytest.fixture
def item(hub: Hub, tmp_path: Path) -> Item:
    return Item(
        url=hub.resolve_url(REPO, FILE),
        target=tmp_path / "blobs" / SHA256,
        name=FILE,
        size_bytes=SIZE_BYTES,
        sha256=SHA256,
    )


def fetch_now(items: Sequence[Item], limits: FetchLimits = LIMITS, progress: Seen | None = None) -> Seen:
    seen = progress or Seen()

    async def run() -> None:
        async with new_client() as client:
            await fetch(items, client=client, limits=limits, progress=seen)

    asyncio.run(run())
    return seen
