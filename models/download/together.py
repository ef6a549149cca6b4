"""Jobs that stand or fall together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def all_or_first_error(jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Returns when all are done. The first exception cancels the others and is raised, as itself and not in a group."""
    first: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except BaseExceptionGroup as failed:
        first = failed.exceptions[0]
    if first is not None:
        raise first
