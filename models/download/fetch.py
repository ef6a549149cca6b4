"""Fetching files: several at once, in parts, resumed where a former attempt ended, verified before they have a name.

Runs in the event loop of whoever calls it; the disk is touched in a few threads that end with the call.

Does not: choose what to fetch, keep more than one fetch of a file apart by itself than through the lock beside it, or
speak anything but HTTP.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Sequence

import httpx2

from localrun import __version__
from localrun.models.download import disk
from localrun.models.download.item import FetchLimits, Item, NoProgress, Progress
from localrun.models.download.pace import Pace
from localrun.models.download.shared import Shared
from localrun.models.download.together import all_or_first_error
from localrun.models.download.transfer import Transfer

__all__ = ["FetchLimits", "Item", "NoProgress", "Progress", "fetch", "new_client"]

_N_DISK_THREADS = 4
_NO_PROGRESS = NoProgress()
_USUAL_LIMITS = FetchLimits()


def new_client() -> httpx2.AsyncClient:
    """A client for `fetch`: it goes through the proxies of the environment, and follows no redirect by itself."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=32)
    return httpx2.AsyncClient(headers={"User-Agent": f"localrun/{__version__}"}, limits=limits, follow_redirects=False)


async def fetch(
    items: Sequence[Item],
    *,
    client: httpx2.AsyncClient,
    limits: FetchLimits = _USUAL_LIMITS,
    progress: Progress = _NO_PROGRESS,
) -> None:
    """Returns when every item is at its target, verified.

    What is there already is not transferred again: a finished target, and the finished parts of an unfinished one. An
    item that another process is fetching is waited for. Of items with the same target the first counts. Cancelling the
    task stops the transfers and keeps the parts.

    Raises DiskFull (before anything is transferred, if it can be told), DigestMismatch, SourceChanged, SourceRefused,
    and DownloadFailed for the rest (no connection after all retries). Other items' finished parts are kept.
    """
    by_target: dict[str, Item] = {}
    for item in items:
        by_target.setdefault(str(item.target), item)
    executor = concurrent.futures.ThreadPoolExecutor(_N_DISK_THREADS, thread_name_prefix="localrun-download")
    try:
        await asyncio.get_running_loop().run_in_executor(
            executor, lambda: disk.check(by_target.values(), reserve_bytes=limits.reserve_bytes)
        )
        shared = Shared(client, limits, Pace(limits), executor, progress)
        await all_or_first_error(Transfer(item, shared).run() for item in by_target.values())
    finally:
        executor.shutdown(wait=False)
