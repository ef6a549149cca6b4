"""Offline work: `batch FILE.jsonl` has the daemon compute a file of requests, and watches; `batch list`, `show`,
`cancel` and `results` are about batches that are there already.

A batch is the daemon's: it goes on when this command is stopped, and when the daemon is started again.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import sys
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from localrun import errors
from localrun.cli import exits
from localrun.cli.arguments import with_settings
from localrun.cli.daemon import ask, ensure_daemon
from localrun.cli.text import Column, LiveLine, ago, duration, for_stdout, print_json, progress, say, table
from localrun.client import Client
from localrun.config import Settings
from localrun.visible import visible_json

POLL_S = 0.5
RATE_WINDOW_S = 60.0
ENDED = ("completed", "failed", "expired", "cancelled")


class _FileOrCommand(click.Group):
    """A group whose first argument may be a file: `localrun batch FILE` is `localrun batch run FILE`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["run", *args])


@click.group("batch", cls=_FileOrCommand)
def batch_command() -> None:
    """Run a file of requests in the background: localrun batch FILE.jsonl.

    Each line of the file is a request in the form of OpenAI's batches: custom_id, method, url and body. The batch is
    the daemon's: it yields to other requests, and goes on after a restart.
    """


@batch_command.command("run")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--wait/--no-wait", "waits", default=True, help="Wait for the results, or print the batch's id at once.")
@click.option("--window", default="24h", show_default=True, help="Time after which the batch expires: 30m, 12h, 7d.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
@with_settings
def run_command(file: Path, waits: bool, window: str, out: Path | None, settings: Settings) -> int:
    """Compute the requests in FILE, and write the results.

    They are written beside it, as FILE.results.jsonl: one line for each request, the failed ones last. All requests
    have one url and one model. The exit code is 1 if any of them failed.
    """
    endpoint = _endpoint_of(file)
    batch_id = ""

    async def work(url: str) -> int:
        nonlocal batch_id
        async with Client(url, name="localrun batch") as client:
            uploaded = await client.upload(file, purpose="batch")
            body = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
            try:
                batch = await client.create_batch(body | {"metadata": {"file": file.name[:512]}})
            except errors.LocalrunError:
                await client.delete_file(uploaded["id"])  # nobody else knows of it
                raise
            batch_id = batch["id"]
            if not waits:
                print(for_stdout(batch_id))
                return exits.OK
            beside = file.with_name(f"{file.name.removesuffix('.jsonl')}.results.jsonl")
            return await _finish(client, batch_id, out or beside)

    try:
        return asyncio.run(work(ensure_daemon(settings)))
    except KeyboardInterrupt:
        if batch_id:
            progress(f"the batch goes on; `localrun batch results {batch_id}` waits for it")
        raise


@batch_command.command("list")
@click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True, help="Maximum number of batches.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, as `data` of /v1/batches.")
@with_settings
def list_command(limit: int, as_json: bool, settings: Settings) -> None:
    """List the batches, newest first."""
    batches = ask(ensure_daemon(settings), lambda client: client.batches(limit=limit))
    if as_json:
        print_json(batches)
        return
    if not batches:
        say("there are no batches; `localrun batch FILE.jsonl` runs one")
        return
    print(table(_COLUMNS, batches))


@batch_command.command("show")
@click.argument("batch_id", metavar="ID")
@with_settings
def show_command(batch_id: str, settings: Settings) -> None:
    """Show a batch as JSON.

    It has the state, the counts, the tokens, and what was wrong with the file.
    """
    print_json(ask(ensure_daemon(settings), lambda client: client.batch(batch_id)))


@batch_command.command("cancel")
@click.argument("batch_id", metavar="ID")
@with_settings
def cancel_command(batch_id: str, settings: Settings) -> None:
    """Cancel a batch. The results that are there stay."""
    batch = ask(ensure_daemon(settings), lambda client: client.cancel_batch(batch_id))
    say(f"{batch['id']} is {batch['status']}")


@batch_command.command("results")
@click.argument("batch_id", metavar="ID")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to this file instead of stdout."
)
@with_settings
def results_command(batch_id: str, out: Path | None, settings: Settings) -> int:
    """Wait for the end of a batch, and print or write its results."""

    async def work(url: str) -> int:
        async with Client(url, name="localrun batch") as client:
            return await _finish(client, batch_id, out)

    return asyncio.run(work(ensure_daemon(settings)))


def _endpoint_of(file: Path) -> str:
    """The `url` of the first request. Raises click.UsageError."""
    with file.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        url = json.loads(first)["url"]
    except (ValueError, KeyError, TypeError):
        url = None
    if not isinstance(url, str):
        raise click.UsageError(
            f"the first line of {file} is no request; each line is an object with custom_id, method, url and body"
        )
    return url


async def _finish(client: Client, batch_id: str, out: Path | None) -> int:
    """Watches a batch to its end, and writes what came of it. The exit code."""
    batch = await _watched(client, batch_id)
    if batch["status"] == "failed":
        for error in (batch["errors"] or {"data": []})["data"]:
            where = f"line {error['line']}: " if error["line"] else ""
            progress(f"{where}{error['message']}")
        raise errors.BadRequest(f"batch '{batch_id}' was not run, because its file has mistakes")
    await _write(client, batch, out)
    counts = batch["request_counts"]
    if out is not None:
        say(f"{counts['completed']} of {counts['total']} done, {counts['failed']} failed; results in {out}")
    return exits.OK if counts["completed"] == counts["total"] else exits.ERROR


async def _watched(client: Client, batch_id: str) -> dict[str, Any]:
    meter = BatchMeter()
    with LiveLine() as view:
        while True:
            batch = await client.batch(batch_id)
            meter.add(batch, time.monotonic())
            view.show(meter.line(), meter.percent, meter.status)
            if batch["status"] in ENDED:
                return batch
            await asyncio.sleep(POLL_S)


async def _write(client: Client, batch: dict[str, Any], out: Path | None) -> None:
    """The results under their name when they are whole."""
    files = [batch[name] for name in ("output_file_id", "error_file_id") if batch[name]]
    if out is None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for file_id in files:
            async for piece in client.file_content(file_id):
                if sys.stdout.isatty():
                    sys.stdout.write(visible_json(decoder.decode(piece)))
                else:
                    sys.stdout.buffer.write(piece)
        sys.stdout.flush()
        return
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            for file_id in files:
                async for piece in client.file_content(file_id):
                    file.write(piece)
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)


class BatchMeter:
    """How far a batch is, as one line for a person. Pure: time is an argument, of one monotonic clock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self.total = self.done = self.failed = 0
        self.status = ""

    def add(self, batch: dict[str, Any], now_s: float) -> None:
        counts = batch["request_counts"]
        self.status, self.total, self.failed = batch["status"], counts["total"], counts["failed"]
        self.done = counts["completed"] + counts["failed"]
        self._samples.append((now_s, self.done))
        while len(self._samples) > 2 and now_s - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()

    @property
    def percent(self) -> int:
        """Rounded down, so that 100 means all of it."""
        return self.done * 100 // self.total if self.total else 0

    @property
    def per_s(self) -> float | None:
        """Requests per second of the last minute; None while it cannot be told."""
        (began_s, before), (now_s, done) = self._samples[0], self._samples[-1]
        return (done - before) / (now_s - began_s) if now_s > began_s and done > before else None

    def line(self) -> str:
        """Status, requests, rate and time left."""
        parts = [f"{self.status}  {self.percent:3d}%  {self.done} / {self.total}"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.per_s is not None and self.done < self.total:
            left_s = max(1.0, (self.total - self.done) / self.per_s)
            parts.append(f"{self.per_s:.1f}/s" if self.per_s >= 0.1 else f"{self.per_s * 60:.1f}/min")
            parts.append(f"{duration(left_s)} left" if left_s >= 59.5 else f"{left_s:.0f} s left")
        return "  ".join(parts)


_COLUMNS: list[Column[dict[str, Any]]] = [
    Column("ID", lambda batch: batch["id"]),
    Column("STATUS", lambda batch: batch["status"]),
    Column("DONE", lambda batch: str(batch["request_counts"]["completed"]), goes=6),
    Column("FAILED", lambda batch: str(batch["request_counts"]["failed"]), goes=5),
    Column("TOTAL", lambda batch: str(batch["request_counts"]["total"]), goes=4),
    Column("MODEL", lambda batch: batch["model"] or "-", goes=3),
    Column("ENDPOINT", lambda batch: batch["endpoint"], goes=1),
    Column("CREATED", lambda batch: ago(datetime.fromtimestamp(batch["created_at"], UTC)), goes=2),
]
