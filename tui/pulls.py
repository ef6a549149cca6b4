"""The downloads that this window asked for, and what the daemon says of all of them.

Owner: the app, for as long as it runs: a pull goes on whatever screen is shown, and ends by being cancelled or with
the app (the daemon keeps what was transferred). The daemon's list is asked while somebody looks.

Does not: draw.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from localrun.errors import Cancelled, LocalrunError
from localrun.snapshot import PullRow
from localrun.tui import quantity
from localrun.tui.daemon import Daemon
from localrun.tui.plain_text import line


class Pulls:
    """`on_end` is told the model and the problem, None when it is here."""

    def __init__(self, daemon: Daemon, on_end: Callable[[str, str | None], None]) -> None:
        self.rows: list[PullRow] = []
        self._daemon = daemon
        self._on_end = on_end
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, model: str) -> None:
        """Begins a pull, or goes on with one that was cut off; does nothing while it runs."""
        if model not in self._tasks:
            self._tasks[model] = asyncio.create_task(self._pull(model))

    async def cancel(self, model: str) -> None:
        """Ends a pull, whoever asked for it. Raises LocalrunError."""
        await self._daemon.cancel_pull(model)

    async def look(self) -> None:
        """Asks the daemon for its list. Raises LocalrunError."""
        self.rows = await self._daemon.pulls()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pull(self, model: str) -> None:
        problem: str | None = None
        try:
            async with aclosing(self._daemon.pull(model)) as pieces:
                async for _ in pieces:
                    pass  # how far it is comes with the daemon's list, for all pulls alike
        except Cancelled:
            problem = "cancelled; Enter goes on with it"
        except LocalrunError as error:
            problem = error.message
        finally:
            del self._tasks[model]
        self._on_end(model, problem)


def pull_line(row: PullRow) -> str:
    """One line: how far a pull is, how fast, how long still, or how it ended."""
    if row.state not in ("planning", "pulling"):
        return f"{line(row.model)}  {line(row.error or row.status or row.state)}"
    if not row.total_bytes:
        return f"{line(row.model)}  {line(row.status or 'looking for it')}"
    facts = [
        quantity.percent(row.completed_bytes / row.total_bytes),
        f"{quantity.size(row.completed_bytes)} of {quantity.size(row.total_bytes)}",
    ]
    if row.bytes_per_s:
        facts.append(f"{quantity.size(round(row.bytes_per_s))}/s")
    if row.eta_s is not None:
        facts.append(f"{quantity.age(row.eta_s)} left")
    return f"{line(row.model)}  {' · '.join(facts)}"
