"""`localrun plan record`: what the running daemon is asked, as a trace that says nothing about anybody's words."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path

import click
import msgspec

from localrun import errors
from localrun.cli import exits
from localrun.cli.arguments import with_settings
from localrun.cli.bench.command import POSITIVE
from localrun.cli.daemon import require_daemon
from localrun.cli.text import progress, say
from localrun.client import Client
from localrun.config import Settings
from localrun.snapshot import TrafficRow

# What so many clients began with is a system prompt, and nobody's own words.
FEWEST_CLIENTS = 3


@click.command("record")
@click.option("--minutes", type=POSITIVE, default=10.0, show_default=True, help="How long; Ctrl-C ends it before.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("traffic.jsonl"),
              show_default=True, metavar="FILE", help="A new file.")  # fmt: skip
@click.option("--model", "model", default="", metavar="MODEL", help="Only what this model is asked.")
@with_settings
def record_command(minutes: float, out: Path, model: str, settings: Settings) -> int:
    """Take down what the running daemon is asked, as a trace for `localrun plan MODEL --workload FILE`.

    A line is when a request came, how long its prompt and its answer were, its lane, and which beginnings and clients
    are the same, under numbers. No text is recorded. Of prompts of different clients only that is the same which three
    of them began with: whoever sends guesses meanwhile sees in FILE whether one is right if they can be two clients
    more, or can take the name of the client that they guess at. API keys tell clients apart; without keys they are who
    they say.
    """
    from localrun.plan.traces import write

    rows: list[TrafficRow] = []
    others: Counter[str] = Counter()
    url = require_daemon(settings)
    if model:
        asyncio.run(_check(url, model))
    problem = ""
    with _reserved(out):
        try:
            with suppress(KeyboardInterrupt):
                asyncio.run(_take_down(url, minutes, model.removesuffix(":latest"), rows, others))
        except errors.DaemonUnreachable as error:
            problem = error.message
        if rows:
            write(out, apart(rows))
    if problem:
        say(problem)
    left_out = ", ".join(f"{n} for {name}" for name, n in others.most_common())
    if not rows:
        also = f"; for other models than {model} there were {left_out}" if left_out else ""
        raise errors.LocalrunError(f"no request came and ended meanwhile, so nothing was written{also}")
    if left_out:
        say(f"requests for other models were left out: {left_out}")
    say(f"{len(rows)} request{'s' if len(rows) > 1 else ''} recorded: localrun plan MODEL --workload {out}")
    return exits.OK


def apart(rows: Sequence[TrafficRow]) -> list[TrafficRow]:
    """Prompts of different clients have nothing in common but what `FEWEST_CLIENTS` of them began with. Else whoever
    sends guesses would see which of them begins like somebody's prompt, 16 tokens further each time."""
    clients: dict[str, set[str]] = {}
    for row in rows:
        for block in row.blocks:
            clients.setdefault(block, set()).add(row.client)
    return [
        msgspec.structs.replace(row, blocks=[
            block if len(clients[block]) >= FEWEST_CLIENTS else f"{block} of {row.client}" for block in row.blocks
        ])
        for row in rows
    ]  # fmt: skip


@contextmanager
def _reserved(path: Path) -> Iterator[None]:
    """A file that is made at once: what cannot be written is said before the recording, and nobody else takes the name.
    It is gone again if nothing was written. Raises UsageError."""
    if str(path) == "-":
        raise click.UsageError("--out -: a recording is written to a file; name one")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        raise click.UsageError(f"--out {path}: its folder cannot be made; name a file in another one") from None
    try:
        path.open("xb").close()
    except FileExistsError:
        raise click.UsageError(f"{path} is there already; name a new file with --out") from None
    except OSError as error:
        raise click.UsageError(f"--out {path}: {error.strerror}; name a file in another folder") from None
    try:
        yield
    except OSError as error:
        error.filename = str(path)  # and not that of a temporary one
        raise
    finally:
        with suppress(OSError):
            if not path.stat().st_size:
                path.unlink()


async def _check(url: str, model: str) -> None:
    """Raises ModelNotFound."""
    async with Client(url) as client:
        await client.show(model)


async def _take_down(url: str, minutes: float, model: str, rows: list[TrafficRow], others: Counter[str]) -> None:
    """Into `rows`, which outlive an end by Ctrl-C; `others` counts the requests for other models."""
    with suppress(TimeoutError):
        async with asyncio.timeout(None) as limit, Client(url) as client:

            def begun() -> None:
                limit.reschedule(asyncio.get_running_loop().time() + 60 * minutes)
                progress(f"recording for {minutes:g} minutes; Ctrl-C ends it before")

            async with aclosing(client.traffic(begun)) as traffic:
                async for row in traffic:
                    if model not in ("", row.model):
                        others[row.model] += 1
                        continue
                    rows.append(row)
                    if len(rows).bit_count() == 1:  # more and more seldom
                        progress(f"{len(rows)} so far")
