"""Getting models: `pull` downloads one, `search` finds them in the catalogue and on the Hugging Face hub."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import deque
from datetime import datetime
from typing import Any

import click

from localrun.cli.arguments import complete_catalog, guessed, next_step, with_settings
from localrun.cli.daemon import ask, ensure_daemon, for_daemon
from localrun.cli.text import Column, LiveLine, ago, duration, progress, say, size, table, tell
from localrun.client import Client, PullPiece
from localrun.config import Settings
from localrun.errors import DownloadFailed, ModelNotFound

RATE_WINDOW_S = 8.0
# A rate over less than this jumps about.
RATE_MIN_S = 0.5
BAR_CHARS = 24


@click.command("pull")
@click.argument("model", shell_complete=complete_catalog)
@click.option("--insecure", is_flag=True, help="Allow plain HTTP to a registry on another machine.")
@click.option(
    "--projector",
    metavar="NAME|none",
    default="",
    help="The projector (mmproj) to download with MODEL, by its file name or type (F16, Q8_0); or none.",
)
@with_settings
def pull_command(model: str, insecure: bool, projector: str, settings: Settings) -> None:
    """Download MODEL, or resume an interrupted download.

    MODEL is a name from the catalogue (`localrun search` lists it), owner/repo[:QUANT] for a repository on the Hugging
    Face hub, or registry.ollama.ai/owner/name[:tag]. Without a quantization, localrun picks the best one that fits this
    machine's memory. A model that takes images or audio comes with its projector, in F16 where the repository has one.
    """
    name = for_daemon(model)
    url = ensure_daemon(settings)
    try:
        asyncio.run(_pull(url, name, insecure=insecure, projector=projector))
    except KeyboardInterrupt:
        progress(f"stopped; `localrun pull {model}` resumes the download")
        raise
    except (DownloadFailed, ModelNotFound) as error:
        raise guessed(error, name, settings) from None
    say(f"{name} is ready; " + ask(url, lambda client: next_step(client, name)))


def pull_missing(model: str, settings: Settings) -> bool:
    """Pull a model that the daemon does not have; adapters are left as they are. False for a path, and for a bare name
    that neither the catalogue nor Ollama's library has. Raises what the pull raises otherwise."""
    if os.path.isabs(model):
        return False
    name = model.partition("+")[0]
    progress(f"{name} is not installed; pulling it")
    try:
        asyncio.run(_pull(ensure_daemon(settings), name))
    except DownloadFailed as error:
        raise guessed(error, name, settings) from None
    except ModelNotFound:
        if "/" in name:
            raise
        return False
    return True


async def _pull(base_url: str, model: str, *, insecure: bool = False, projector: str = "") -> None:
    meter, shown_percent = PullMeter(), 0
    async with Client(base_url, name="localrun pull") as client:
        transfer = client.pull(model, insecure=insecure, projector=projector)
        with LiveLine() as view:
            async with contextlib.aclosing(transfer) as pieces:
                async for piece in pieces:
                    now_s = time.monotonic()
                    if not piece.total:
                        view.say(piece.status)
                        continue
                    meter.add(piece, now_s)
                    shown_percent = max(shown_percent, meter.percent)  # less when another file is known
                    view.show(meter.line(now_s), shown_percent)


class PullMeter:
    """How far a download is, as one line for a person. Fed with every piece of a pull.

    Pure: time is an argument, of one monotonic clock. What was on disk before counts as done, but not towards the rate;
    no number goes backwards, whatever the daemon says.
    """

    def __init__(self) -> None:
        self._totals: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, piece: PullPiece, now_s: float) -> None:
        """A piece came. Those without a size change nothing."""
        if not piece.total:
            return
        key = piece.digest or piece.status
        is_first = key not in self._totals
        self._totals[key] = max(self._totals.get(key, 0), piece.total)
        self._done[key] = max(self._done.get(key, 0), min(piece.completed, self._totals[key]))
        if is_first or (not self._samples and piece.completed):
            self._samples.clear()
        self._samples.append((now_s, self.done_bytes))
        while len(self._samples) > 2 and now_s - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()

    @property
    def total_bytes(self) -> int:
        """Of all files that are known yet."""
        return sum(self._totals.values())

    @property
    def done_bytes(self) -> int:
        return sum(self._done.values())

    @property
    def percent(self) -> int:
        """Rounded down, so that 100 means all of it."""
        return self.done_bytes * 100 // self.total_bytes if self.total_bytes else 0

    def bytes_per_s(self, now_s: float) -> float | None:
        """The rate of the last seconds; None while it cannot be told."""
        if len(self._samples) < 2 or now_s - self._samples[0][0] < RATE_MIN_S:
            return None
        return (self._samples[-1][1] - self._samples[0][1]) / (now_s - self._samples[0][0])

    def line(self, now_s: float) -> str:
        """Bar, bytes, rate and time left."""
        filled = BAR_CHARS * self.percent // 100
        bar = "#" * filled + "." * (BAR_CHARS - filled)
        parts = [f"{self.percent:3d}% [{bar}] {size(self.done_bytes)} / {size(self.total_bytes)}"]
        rate = self.bytes_per_s(now_s)
        if rate is not None and self.done_bytes < self.total_bytes:
            parts.append(f"{size(rate)}/s")
            if rate > 0:
                parts.append(f"{_left((self.total_bytes - self.done_bytes) / rate)} left")
        return "  ".join(parts)


def _left(seconds: float) -> str:
    """Whole seconds: more would only flicker."""
    return f"{max(1, round(seconds))} s" if seconds < 59.5 else duration(seconds)


@click.command("search")
@click.argument("query", nargs=-1)
@click.option("--limit", type=click.IntRange(1, 100), default=20, help="Maximum number of repositories.")
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's answer, a JSON object.")
@with_settings
def search_command(query: tuple[str, ...], limit: int, as_json: bool, settings: Settings) -> None:
    """Find models to pull: in the catalogue, and among the GGUF repositories of the Hugging Face hub.

    Without QUERY, the whole catalogue is listed; that needs no network. `localrun pull` and `localrun run` take every
    name in the first column.
    """
    found = ask(ensure_daemon(settings), lambda client: client.search(" ".join(query), limit=limit))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    tables = []
    if found["catalog"]:
        tables.append(table(_CATALOG, found["catalog"]))
    if found["hub"]:
        tables.append(table(_HUB, found["hub"]))
    print("\n\n".join(tables) if tables else "nothing was found")
    if found["problem"]:
        tell("note", f"the hub was not searched: {found['problem']}")


def _sizes(entry: dict[str, Any]) -> str:
    """Of the smallest and the largest quantization that are listed."""
    sizes = [size(gigabytes * 1e9) for gigabytes in sorted(entry["quants"].values())]
    return sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


_CATALOG: list[Column[dict[str, Any]]] = [
    Column("NAME", lambda entry: entry["name"]),
    Column("SIZE", _sizes, goes=5),
    Column("CONTEXT", lambda entry: str(entry["context_tokens"]), goes=3),
    Column("MEMORY", lambda entry: f"{entry['memory_gb']:g} GB", goes=4),
    Column("LICENCE", lambda entry: entry["licence"], goes=1),
    Column("FOR", lambda entry: entry["use"], goes=2, is_cut=True),
]
_HUB: list[Column[dict[str, Any]]] = [
    Column("REPOSITORY", lambda hit: hit["repo"]),
    Column("DOWNLOADS", lambda hit: str(hit["n_downloads"]), goes=4),
    Column("LIKES", lambda hit: str(hit["n_likes"]), goes=1),
    Column("UPDATED", lambda hit: ago(datetime.fromisoformat(hit["updated_at"])) if hit["updated_at"] else "", goes=2),
    Column("LICENCE", lambda hit: hit["licence"], goes=3),
    Column("", lambda hit: "terms to accept first" if hit["is_gated"] else "", goes=5),
]
