"""Counters of an engine, and the statistics that go with every step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from localrun.engine.cache.pool import Pool
from localrun.engine.schedule.scheduler import Scheduler
from localrun.wire import StepStats


@dataclass
class Totals:
    """Counters since the start. `step_s`, `n_prefill_rows` and `n_decode_rows` are of the step at hand, to which rows
    count that the background computed since the step before it."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    step_s: float = 0.0
    n_prefill_rows: int = 0
    n_decode_rows: int = 0

    def note_rows(self, *, n_prefill: int, n_decode: int) -> None:
        """Rows were computed."""
        self.prefill_tokens += n_prefill
        self.decode_tokens += n_decode
        self.n_prefill_rows += n_prefill
        self.n_decode_rows += n_decode

    def note_step(self, *, n_prefill: int, n_decode: int, step_s: float) -> None:
        """A step was computed, which took so long."""
        self.steps += 1
        self.step_s = step_s
        self.note_rows(n_prefill=n_prefill, n_decode=n_decode)

    def end_step(self) -> None:
        """The step was reported."""
        self.n_prefill_rows = self.n_decode_rows = 0

    def stats(self, pool: Pool, scheduler: Scheduler) -> StepStats:
        """What people are told of a step."""
        cells, store = pool.cells, pool.store
        return StepStats(
            step=self.steps,
            step_s=self.step_s,
            n_prefill_rows=self.n_prefill_rows,
            n_decode_rows=self.n_decode_rows,
            n_running=len(scheduler.running),
            n_queued=len(scheduler.waiting),
            kv_cells_used=cells.n_used,
            kv_cells_shared=cells.n_shared,
            cached_sequences=pool.n_cached_sequences,
            ram_cache_bytes=store.size_bytes,
            prefill_tokens_total=self.prefill_tokens,
            decode_tokens_total=self.decode_tokens,
            prompt_tokens_total=self.prompt_tokens,
            cached_tokens_total=self.cached_tokens,
            preemptions_total=self.preemptions,
            ram_entries=store.n_ram_entries,
            disk_cache_bytes=store.disk_bytes,
            disk_entries=store.n_disk_entries,
            ram_restored_tokens_total=store.ram_hit_tokens,
            disk_restored_tokens_total=store.disk_hit_tokens,
        )
