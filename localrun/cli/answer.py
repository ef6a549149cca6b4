"""One answer of a model: received, shown while it comes, measured.

Runs in the CLI's event loop. Does not: start requests, or keep a conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator
from enum import StrEnum

import msgspec

from localrun.cli.columns import duration
from localrun.cli.meter import StreamMeter
from localrun.cli.status_line import StatusLine, dim
from localrun.cli.visible import for_stdout
from localrun.client import ChatMetrics, ChatPiece

STATUS_INTERVAL_S = 0.125


class Stats(StrEnum):
    """How much is said about speed. `BRIEF` is one dim line, and only on a terminal."""

    QUIET = "quiet"
    BRIEF = "brief"
    VERBOSE = "verbose"


class Answer(msgspec.Struct, kw_only=True):
    """What came so far. `ttft_s` is as seen from here: with loading, queueing and the way through HTTP."""

    text: str = ""
    request_id: str | None = None
    done_reason: str | None = None
    ttft_s: float | None = None
    metrics: ChatMetrics | None = None
    was_prompt_cut: bool = False


async def receive(pieces: AsyncGenerator[ChatPiece, None], answer: Answer) -> None:
    """Fill `answer` without showing anything. Raises what the stream raises."""
    await _receive(pieces, answer, StreamMeter(time.monotonic()), show=False)


async def show(pieces: AsyncGenerator[ChatPiece, None], answer: Answer, stats: Stats) -> None:
    """Fill `answer` and write its text to stdout as it comes, then a line feed and the `stats`.

    On a terminal a status line with tokens/s is shown meanwhile, unless `stats` is quiet. Raises what the stream
    raises; when interrupted, the text so far stays in `answer`, and the terminal is as it was.
    """
    on_terminal = sys.stdout.isatty()
    meter = StreamMeter(time.monotonic())
    watched = on_terminal and stats is not Stats.QUIET
    with StatusLine(sys.stdout) if watched else contextlib.nullcontext() as line:
        ticking = asyncio.create_task(_tick(line, meter)) if line is not None else None
        try:
            await _receive(pieces, answer, meter, show=True)
        finally:
            if ticking is not None:
                ticking.cancel()
            if answer.text and not answer.text.endswith("\n"):
                print(flush=True)
    if answer.was_prompt_cut:
        print("note: the prompt is longer than the context; only a part of it was read", file=sys.stderr)
    if answer.metrics is None:
        return
    if stats is Stats.VERBOSE:
        print(f"\n{metrics_table(answer.metrics)}", file=sys.stderr)
    elif stats is Stats.BRIEF and on_terminal:
        print(dim(summary(answer.metrics, answer.ttft_s)))


async def _receive(pieces: AsyncGenerator[ChatPiece, None], answer: Answer, meter: StreamMeter, *, show: bool) -> None:
    texts: list[str] = []
    try:
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                if piece.text:
                    meter.add(time.monotonic())
                    texts.append(piece.text)
                    if show:
                        sys.stdout.write(for_stdout(piece.text))
                        sys.stdout.flush()
                answer.request_id = piece.request_id or answer.request_id
                if piece.done:
                    answer.done_reason, answer.metrics = piece.done_reason, piece.metrics
                    answer.was_prompt_cut = piece.was_prompt_cut
    finally:
        answer.text = "".join(texts)
        answer.ttft_s = meter.ttft_s


async def _tick(line: StatusLine, meter: StreamMeter) -> None:
    while True:
        line.show(meter.line(time.monotonic()))
        await asyncio.sleep(STATUS_INTERVAL_S)


def decode_rate(metrics: ChatMetrics) -> float | None:
    """Tokens per second between the first and the last token; None with fewer than two."""
    return (metrics.output_tokens - 1) / metrics.decode_s if metrics.output_tokens > 1 and metrics.decode_s else None


def prefill_rate(metrics: ChatMetrics) -> float | None:
    """Prompt tokens computed per second; cached ones are not counted. None when none was computed."""
    computed = metrics.prompt_tokens - metrics.cached_tokens
    return computed / metrics.prefill_s if computed > 0 and metrics.prefill_s else None


def summary(metrics: ChatMetrics, ttft_s: float | None) -> str:
    """One line: rate, tokens, time to the first."""
    parts = [f"{_rate(decode_rate(metrics))}, {metrics.output_tokens} tokens"]
    if ttft_s is not None:
        parts.append(f"first after {duration(ttft_s)}")
    if metrics.cached_tokens:
        parts.append(f"{metrics.cached_tokens} of {metrics.prompt_tokens} prompt tokens cached")
    return ", ".join(parts)


def metrics_table(metrics: ChatMetrics) -> str:
    """The table of `--verbose`."""
    rows = (
        ("total duration", duration(metrics.total_s)),
        ("load duration", duration(metrics.load_s)),
        ("prompt eval count", f"{metrics.prompt_tokens} token(s)"),
        ("prompt cached count", f"{metrics.cached_tokens} token(s)"),
        ("prompt eval duration", duration(metrics.prefill_s)),
        ("prompt eval rate", _rate(prefill_rate(metrics))),
        ("eval count", f"{metrics.output_tokens} token(s)"),
        ("eval duration", duration(metrics.decode_s)),
        ("eval rate", _rate(decode_rate(metrics))),
    )
    return "\n".join(f"{name + ':':<22}{value}" for name, value in rows)


def _rate(tokens_per_s: float | None) -> str:
    return "- tokens/s" if tokens_per_s is None else f"{tokens_per_s:.2f} tokens/s"
