"""What a stream tells while it runs, where a request asks for it as llama-server's clients do: how much of the prompt
is computed (`return_progress`), and the timings so far (`timings_per_token`).

A writer around the writer of the route, so that a stream that is not asked for any of it costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from localrun.server.jobs.generation import Generation
from localrun.server.jobs.job import Job
from localrun.server.openai.answer import Fields, Timings, encode, timings_of
from localrun.server.streaming import Writer
from localrun.wire import Delta, Usage


class PromptProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Of a prompt's `total` tokens so many are `processed` by now, among them those that the cache had. `time_ms` runs
    from the first step."""

    total: int
    cache: int
    processed: int
    time_ms: int


class ProgressFields(Protocol):
    """The fields of a body that ask for it."""

    @property
    def return_progress(self) -> bool | None: ...
    @property
    def timings_per_token(self) -> bool | None: ...


class Running:
    """See the module. `chunk` makes one that has no text, and the fields that it is given, for an answer. With
    `times_chunks` the writer's chunks get the timings, with `times_end` the stream's last event as well."""

    def __init__(
        self,
        writer: Writer,
        jobs: Sequence[Job],
        wanted: ProgressFields,
        chunk: Callable[[int, Fields], bytes],
        *,
        times_chunks: bool = True,
        times_end: bool = False,
    ) -> None:
        self._writer = writer
        self._records = [job.record for job in jobs]
        self._shows_timings = bool(wanted.timings_per_token)
        self._times_chunks = times_chunks and self._shows_timings
        self._chunk = chunk
        self._times_end = times_end and self._shows_timings
        # Tokens of each prompt that were told of, as long as there is more to tell.
        self._told: dict[int, int] = dict.fromkeys(range(len(jobs)), -1) if wanted.return_progress else {}

    def begin(self) -> bytes:
        return self._writer.begin()

    def take(self, index: int, delta: Delta) -> bytes:
        progress = self._progress(index, delta) if index in self._told else b""
        update = self._writer.take(index, delta)
        if update and self._times_chunks and delta.finish is None:
            update = with_fields(update, {"timings": timings_so_far(self._records[index], delta.n_output)})
        return progress + update

    def end(self) -> bytes:
        end, usage = self._writer.end(), self._records[0].usage
        return with_fields(end, {"timings": timings_of(usage)}) if self._times_end and usage is not None else end

    def _progress(self, index: int, delta: Delta) -> bytes:
        """From what the cache had to all of it, each step once."""
        record = self._records[index]
        total, n_cached = record.n_prompt, record.n_cached or 0
        if total is None:
            return b""
        is_whole = bool(delta.tokens) or delta.finish is not None
        now = [n_cached] if self._told[index] < 0 else []
        now.append(total if is_whole else min(delta.n_computed, total))
        chunks = []
        for n_processed in now:
            if n_processed <= self._told[index]:
                continue
            timings = timings_so_far(record, 0, n_processed)
            told = PromptProgress(total=total, cache=n_cached, processed=n_processed, time_ms=round(timings.prompt_ms))
            self._told[index] = n_processed
            more: Fields = {"timings": timings} if self._shows_timings else {}
            chunks.append(self._chunk(index, {"prompt_progress": told} | more))
        if is_whole:
            del self._told[index]
        return b"".join(chunks)


def timings_so_far(record: Generation, n_output: int, n_processed: int | None = None) -> Timings:
    """As at the end, of an answer that has so many tokens, or whose prompt is computed up to there."""
    n_cached, started_s = record.n_cached or 0, record.started_at_s
    first_s, last_s = record.first_token_at_s, record.last_token_at_s
    n_prompt = (record.n_prompt or 0) if n_processed is None else n_processed
    prefill_s = decode_s = 0.0
    if started_s is not None and n_prompt > n_cached:
        prefill_s = max(0.0, (time.monotonic() if first_s is None else first_s) - started_s)
    if n_output and first_s is not None and last_s is not None:
        decode_s = last_s - first_s
    usage = Usage(
        n_prompt=n_prompt, n_cached=n_cached, n_output=n_output, queued_s=0.0, prefill_s=prefill_s, decode_s=decode_s
    )
    return timings_of(usage, n_drafted=record.n_drafted, n_accepted=record.n_accepted)


_END = b"}\n\n"


def with_fields(events: bytes, fields: Fields) -> bytes:
    """The last of these events with more fields."""
    assert events.endswith(_END)
    return events[: -len(_END)] + b"," + encode(fields)[1:-1] + _END
