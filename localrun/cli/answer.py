"""One answer of a model: received, measured, and shown while it comes above a status line.

Runs in the CLI's event loop. Does not: start requests, or keep a conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from enum import StrEnum
from typing import Any, Self, TextIO

import msgspec
from rich.cells import cell_len

from localrun.cli.text import TextStyle, duration, obeys_sequences, painted, tell, wrapped
from localrun.client import ChatMetrics, ChatPiece, Client
from localrun.errors import LocalrunError
from localrun.snapshot import RequestRow
from localrun.visible import visible

STATUS_INTERVAL_S = 0.125
MIN_ROWS = 4

_SAVE = "\x1b7"
_RESTORE = "\x1b8"


class Stats(StrEnum):
    """How much is said about speed. `BRIEF` is one dim line, and only on a terminal."""

    QUIET = "quiet"
    BRIEF = "brief"
    VERBOSE = "verbose"


class Answer(msgspec.Struct, kw_only=True):
    """What came so far. `ttft_s` is as seen from here: with loading, queueing and the way through HTTP."""

    text: str = ""
    tool_calls: list[dict[str, Any]] = []
    request_id: str | None = None
    done_reason: str | None = None
    ttft_s: float | None = None
    metrics: ChatMetrics | None = None
    was_prompt_cut: bool = False


async def receive(pieces: AsyncGenerator[ChatPiece, None], answer: Answer) -> None:
    """Fill `answer` without showing anything. Raises what the stream raises."""
    await _receive(pieces, answer, StreamMeter(time.monotonic()), show=False)


async def show(
    pieces: AsyncGenerator[ChatPiece, None], answer: Answer, stats: Stats, client: Client, *, wraps: bool = True
) -> None:
    """Fill `answer` and write its text to stdout as it comes, then a line feed and the `stats`.

    On a terminal words are wrapped, unless `wraps` is false, and a status line with tokens/s, which `client` is asked
    for, is shown meanwhile, unless `stats` is quiet, the terminal wraps by itself (see `Wrapping`) or a shell has put
    this into the background. Raises what the stream raises; when interrupted, the text so far stays in `answer`, and
    the terminal is as it was.
    """
    on_terminal = sys.stdout.isatty()
    meter = StreamMeter(time.monotonic())
    watched = obeys_sequences(sys.stdout) and _is_in_front() and wraps and stats is not Stats.QUIET
    with StatusLine(sys.stdout) if watched else contextlib.nullcontext() as line, _undisturbed(line):
        ticking = asyncio.create_task(_tick(line, meter, answer, client)) if line is not None else None
        try:
            await _receive(pieces, answer, meter, show=True, wraps=wraps)
        finally:
            if ticking is not None:
                ticking.cancel()
                await asyncio.gather(ticking, return_exceptions=True)
            if answer.text and not answer.text.endswith("\n"):
                print(flush=True)
    if answer.was_prompt_cut:
        tell("note", "the prompt is longer than the context; only part of it was used")
    if answer.done_reason == "length":
        tell("note", "the answer is cut off: it reached num_predict or the end of the context")
    if answer.metrics is None:
        return
    if stats is Stats.VERBOSE:
        print(f"\n{metrics_table(answer.metrics)}", file=sys.stderr)
    elif stats is Stats.BRIEF and on_terminal:
        print(painted(wrapped(summary(answer.metrics, answer.ttft_s)), TextStyle.HEADING))


def _is_in_front() -> bool:
    """Whether the terminal is this process's to set: one in the background that does is stopped."""
    if sys.platform == "win32":
        return True
    try:
        return os.tcgetpgrp(sys.stdout.fileno()) == os.getpgrp()
    except OSError:  # a terminal without a shell
        return True


@contextlib.contextmanager
def _undisturbed(line: StatusLine | None) -> Iterator[None]:
    """What is typed while an answer comes is for the next question: it is not shown in the middle of the answer. Ctrl-Z
    gives the terminal back whole; the answer goes on without the line."""
    if line is None or sys.platform == "win32":
        yield
        return
    import termios

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGTSTP)
        line.close()
        os.kill(os.getpid(), signal.SIGTSTP)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTSTP, stop)
    before = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    if before is not None:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTSTP)
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def writing_to(stream: TextIO, *, wraps: bool = True) -> tuple[Callable[[str], None], Callable[[], None]]:
    """What writes a piece of an answer, and what writes the rest of it: harmless and, unless `wraps` is false, wrapped
    at words on a terminal, as it is elsewhere."""
    if not stream.isatty():
        return lambda text: _written(stream, text), lambda: None
    newlines = io.IncrementalNewlineDecoder(None, translate=True)  # of models that were trained on Windows' texts
    if not wraps:
        return lambda text: _written(stream, visible(newlines.decode(text))), lambda: None

    wrapping = Wrapping()

    def write(text: str) -> None:
        _written(stream, wrapping.feed(visible(newlines.decode(text)), _size_of(stream).columns))

    return write, lambda: _written(stream, wrapping.end(_size_of(stream).columns))


def _size_of(terminal: TextIO) -> os.terminal_size:
    """Of the terminal itself: COLUMNS in the environment may be of another one."""
    try:
        return os.get_terminal_size(terminal.fileno())
    except OSError:
        return os.terminal_size((0, 0))


def _written(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


_PAUSE_S = 0.25


async def _receive(
    pieces: AsyncGenerator[ChatPiece, None], answer: Answer, meter: StreamMeter, *, show: bool, wraps: bool = True
) -> None:
    texts: list[str] = []
    write, end = writing_to(sys.stdout, wraps=wraps)
    # A word that may go on is held back, but not while nothing comes.
    pause: asyncio.TimerHandle | None = None
    try:
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                if piece.text:
                    meter.add(time.monotonic())
                    texts.append(piece.text)
                    if show:
                        write(piece.text)
                        if pause is not None:
                            pause.cancel()
                        pause = asyncio.get_running_loop().call_later(_PAUSE_S, end)
                answer.tool_calls += piece.tool_calls
                answer.request_id = piece.request_id or answer.request_id
                if piece.done:
                    answer.done_reason, answer.metrics = piece.done_reason, piece.metrics
                    answer.was_prompt_cut = piece.was_prompt_cut
    finally:
        if pause is not None:
            pause.cancel()
        if show:
            end()
        answer.text = "".join(texts)
        answer.ttft_s = meter.ttft_s


async def _tick(line: StatusLine, meter: StreamMeter, answer: Answer, client: Client) -> None:
    while True:
        if answer.request_id is not None:
            with contextlib.suppress(LocalrunError):  # the stream itself says so if the daemon is gone
                meter.row = await client.request(answer.request_id)
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
    if metrics.speedup_text:
        parts.append(metrics.speedup_text)
    if ttft_s is not None:
        parts.append(f"first after {duration(ttft_s)}")
    if metrics.cached_tokens:
        parts.append(f"{metrics.cached_tokens} of {metrics.prompt_tokens} prompt tokens cached")
    return ", ".join(parts)


def metrics_table(metrics: ChatMetrics) -> str:
    """The table of `--verbose`."""
    rows = [
        ("total duration", _one_word(metrics.total_s)),
        ("load duration", _one_word(metrics.load_s)),
        ("prompt eval count", f"{metrics.prompt_tokens} token(s)"),
        ("prompt cached count", f"{metrics.cached_tokens} token(s)"),
        ("prompt eval duration", _one_word(metrics.prefill_s)),
        ("prompt eval rate", _rate(prefill_rate(metrics))),
        ("eval count", f"{metrics.output_tokens} token(s)"),
        ("eval duration", _one_word(metrics.decode_s)),
        ("eval rate", _rate(decode_rate(metrics))),
    ]
    if metrics.drafted_tokens:
        rows += [
            ("draft count", f"{metrics.drafted_tokens} token(s)"),
            ("draft accepted count", f"{metrics.accepted_tokens} token(s)"),
            ("speedup by drafts", f"{metrics.speedup:.2f}x"),
        ]
    return "\n".join(f"{name + ':':<22}{value}" for name, value in rows)


def _one_word(seconds: float) -> str:
    """A duration as Go writes it, which scripts cut out of the table: `50.1ms`, `3.40s`, `2m5.00s`."""
    if seconds < 1:
        return f"{seconds * 1000:.1f}ms"
    minutes, rest_s = divmod(round(seconds, 2), 60)
    return f"{minutes:.0f}m{rest_s:.2f}s" if minutes else f"{rest_s:.2f}s"


def _rate(tokens_per_s: float | None) -> str:
    return "- tokens/s" if tokens_per_s is None else f"{tokens_per_s:.2f} tokens/s"


class StreamMeter:
    """How an answer comes. `ttft_s` is as seen by the one who reads it; the rest is in the daemon's `row` of the
    request, since a piece may hold several tokens.

    Pure: time is an argument. All times are of one monotonic clock; `started_at_s` is when the request was sent.
    """

    def __init__(self, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self.ttft_s: float | None = None
        self.row: RequestRow | None = None

    def add(self, now_s: float) -> None:
        """A piece with text came."""
        if self.ttft_s is None:
            self.ttft_s = now_s - self._started_at_s

    def line(self, now_s: float) -> str:
        """One line for a person who watches."""
        if self.ttft_s is None:
            return f"waiting for the first token, {now_s - self._started_at_s:.1f} s"
        rate = None if self.row is None else self.row.tokens_per_s
        shown_rate = "..." if rate is None else f"{rate:.1f}"
        n_tokens = "" if self.row is None else f" {self.row.output_tokens} tokens,"
        return f"{shown_rate} tokens/s,{n_tokens} first after {self.ttft_s:.2f} s"


class StatusLine:
    """A dim line at the bottom of the terminal, under text that goes on flowing. A context manager; enter it with the
    cursor at the start of a row.

    While it is open the last row is taken out of the terminal's scrolling region (DECSTBM), so the terminal itself
    wraps and scrolls the text above it, whatever characters it is made of. Closing gives the row back. A terminal whose
    size changes in between gets its row back at once and no line for the rest of the answer.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._size: os.terminal_size | None = None

    def __enter__(self) -> Self:
        size = _size_of(self._terminal)
        if size.lines >= MIN_ROWS:
            self._size = size
            # The line feed makes room when the cursor is on the last row; setting the region moves the cursor home.
            self._write(f"\n{_SAVE}\x1b[1;{size.lines - 1}r{_RESTORE}\x1b[1A")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._size is not None:
            self._write(f"{_SAVE}\x1b[{self._size.lines};1H\x1b[2K\x1b[r{_RESTORE}")
            self._size = None

    def show(self, text: str) -> None:
        """Replace the line's text; what does not fit is cut off."""
        if self._size is None:
            return
        if _size_of(self._terminal) != self._size:
            self.close()
            return
        shown = painted(text[: self._size.columns - 1], TextStyle.HEADING, self._terminal)
        row = f"\x1b[{self._size.lines};1H\x1b[2K{shown}"
        self._write(f"{_SAVE}{row}{_RESTORE}")

    def _write(self, text: str) -> None:
        self._terminal.write(text)
        self._terminal.flush()


# A terminal wraps by itself, in the middle of words, and one that was left with its cursor behind the last column
# forgets that when a status line is drawn elsewhere: the next letter then lands on the last one. So the last column
# stays empty.

# Of scripts without blanks: lines may break at each of these.
_ALONE = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60"
_PIECE = re.compile(rf"\n|[ \t]+|[{_ALONE}]|[^ \t\n{_ALONE}]+")
_TAB = 8


class Wrapping:
    """`feed` takes pieces of a text and gives back what can be written of it so far; `end` gives the rest. Nothing but
    blanks at the end of a line is replaced, by a line break. A word that is longer than a line is cut."""

    def __init__(self) -> None:
        self._column = 0
        self._blanks = ""
        self._word = ""

    def feed(self, text: str, n_columns: int) -> str:
        """`n_columns` are the terminal's, of which the last one stays empty; 0 if nobody knows."""
        width = _width(n_columns)
        written: list[str] = []
        for found in _PIECE.finditer(self._word + text):
            piece = found[0]
            if piece == "\n":
                self._column, self._blanks = 0, ""
                written.append("\n")
            elif piece[0] in " \t":
                self._blanks += piece
            elif found.end() == len(found.string) and len(piece) < width and cell_len(piece[0]) == 1:
                self._word = piece  # it may go on
                return "".join(written)
            else:
                written += self._put(piece, width)
        self._word = ""
        return "".join(written)

    def end(self, n_columns: int) -> str:
        """What was held back."""
        word, self._word = self._word, ""
        return "".join(self._put(word, _width(n_columns))) if word else ""

    def _put(self, word: str, width: int) -> list[str]:
        blanks, self._blanks = self._blanks.replace("\t", " " * (_TAB - self._column % _TAB)), ""
        written = [blanks]
        if self._column and self._column + len(blanks) + cell_len(word) > width:
            written, self._column, blanks = ["\n"], 0, ""
        self._column += len(blanks)
        for character in word:
            n_cells = cell_len(character)
            if self._column + n_cells > width:
                written.append("\n")
                self._column = 0
            written.append(character)
            self._column += n_cells
        return written


def _width(n_columns: int) -> int:
    return n_columns - 1 if n_columns > 2 else sys.maxsize
