"""Fetching files: several at once, in parts, resumed where a former attempt ended, verified before they have a name.

Runs in the event loop of whoever calls it; the disk is touched in a few threads that end with the call. Whether it has
room is asked before the first byte is transferred.

Does not: choose what to fetch, keep more than one fetch of a file apart by itself than through the lock beside it,
delete anything, or speak anything but HTTP.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import httpx2

from localrun import __version__
from localrun.errors import DiskFull, LocalrunError
from localrun.models.download import ranges
from localrun.models.download.journal import Range
from localrun.models.download.partial import allocated_bytes, failed, paths_of
from localrun.models.download.plan import FetchLimits, Item, NoProgress, Progress
from localrun.models.download.ranges import PassingFailure, RangeClient
from localrun.models.download.transfer import Shared, Throttle, Transfer, all_or_first_error, read_answer


def check_disk(items: Iterable[Item], *, reserve_bytes: int) -> None:
    """Raises DiskFull when the items, all together, need more than their file systems have, DownloadFailed when it
    cannot be told.

    What former attempts already took is not counted again, nor are finished targets and items of unknown size.
    """
    needed_bytes: dict[int, int] = {}
    folders: dict[int, Path] = {}
    names: dict[int, list[str]] = {}
    for item in items:
        try:
            if item.size_bytes is None or item.target.exists():
                continue
            folder = _existing(item.target.parent)
            device = os.stat(folder).st_dev
        except OSError as error:
            raise failed(item.target, error) from error
        folders[device] = folder
        missing_bytes = max(0, item.size_bytes - allocated_bytes(paths_of(item.target).partial))
        needed_bytes[device] = needed_bytes.get(device, 0) + missing_bytes
        names.setdefault(device, []).append(item.name)
    for device, n_bytes in needed_bytes.items():
        free_bytes = shutil.disk_usage(folders[device]).free
        if n_bytes and n_bytes + reserve_bytes > free_bytes:
            raise no_room(folders[device], names[device][0], n_bytes, free_bytes, reserve_bytes)


def no_room(folder: Path, name: str, needed_bytes: int, free_bytes: int, reserve_bytes: int) -> DiskFull:
    """The error that says how much is missing and where."""
    return DiskFull(
        f"not enough disk space for {name} in {folder}: {needed_bytes / 1e9:.2f} GB are still to be written and "
        f"{reserve_bytes / 1e9:.2f} GB are kept free, but only {free_bytes / 1e9:.2f} GB are there; remove models "
        f"(localrun rm), clear abandoned downloads (localrun gc), or choose a smaller quantization"
    )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


_N_DISK_THREADS = 4
_NO_PROGRESS = NoProgress()
_USUAL_LIMITS = FetchLimits()


def new_client() -> httpx2.AsyncClient:
    """A client for `fetch`: it goes through the proxies of the environment, and follows no redirect by itself. Raises
    DownloadFailed for a proxy that no client can use."""
    ranges.prepare_proxies()
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=32)
    return httpx2.AsyncClient(headers={"User-Agent": f"localrun/{__version__}"}, limits=limits, follow_redirects=False)


async def first_bytes(
    item: Item, n_bytes: int, *, client: httpx2.AsyncClient, limits: FetchLimits = _USUAL_LIMITS
) -> bytes:
    """Up to `n_bytes` of the item's beginning; none if they cannot be had: `fetch` will tell why."""
    asked = Range(0, n_bytes if item.size_bytes is None else min(n_bytes, item.size_bytes))
    content = bytearray()
    if not asked.size_bytes:
        return b""
    with contextlib.suppress(TimeoutError, httpx2.HTTPError, PassingFailure, LocalrunError):
        async with asyncio.timeout(limits.stall_s):
            response = await RangeClient(item, client, limits).get(asked, "")
            try:
                read_answer(response, asked, item)
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) >= asked.size_bytes:
                        break
            finally:
                await response.aclose()
    return bytes(content[: asked.size_bytes])


async def fetch(
    items: Sequence[Item],
    *,
    client: httpx2.AsyncClient,
    limits: FetchLimits = _USUAL_LIMITS,
    progress: Progress = _NO_PROGRESS,
    source: Callable[[Item], RangeClient] | None = None,
) -> None:
    """Returns when every item is at its target, verified. `source` is asked for the ranges of an item, instead of its
    own address.

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
            executor, lambda: check_disk(by_target.values(), reserve_bytes=limits.reserve_bytes)
        )
        source = source or (lambda item: RangeClient(item, client, limits))
        shared = Shared(client, limits, Throttle(limits), executor, progress, source)
        await all_or_first_error(Transfer(item, shared).run() for item in by_target.values())
    finally:
        executor.shutdown(wait=False)
