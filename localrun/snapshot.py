"""What the daemon shows of itself: the structs of `/localrun/v1/events`, `requests`, `cache` and `logs`.

The daemon writes them, the TUI, the CLI and the bench read them; nobody shows a number that is not here. Rates are
tokens per second. Durations are seconds. A value that does not exist yet is None, never 0.

Does not: measure anything.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class RequestState(StrEnum):
    """A request's way through the daemon. `LOADING` waits for its model; the last three are final."""

    LOADING = "loading"
    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in (RequestState.DONE, RequestState.CANCELLED, RequestState.FAILED)


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds, over the last minute; None without a sample."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    count: int = 0


class DraftRow(msgspec.Struct, kw_only=True):
    """What one source of drafts did: how many it made, of how many tokens, how many of these became part of the answer,
    and the seconds that making them took. `source` is lookup, prediction, grammar, mtp or draft_model."""

    source: str
    drafts: int
    drafted_tokens: int
    accepted_tokens: int
    seconds: float


class RequestRow(msgspec.Struct, kw_only=True):
    """One request. `adapters` are those that it asked for, with their scales where these are not 1: `style`,
    `terse=0.5`. `tier` is the tier that it named, which model that chose and by which rule: `smart: small, length`.
    `tokens_per_s` is of the last second of decoding, `tokens_per_s_avg` of all of it; both are None before the second
    token. `computed_tokens` counts prompt tokens computed or cached so far, `age_s` runs from arrival to now or to the
    end. While it waits for a slot, `queue_position` is its place (1 is next) and `predicted_wait_s` the time until its
    next token, as the engine expects it by now. `resumed` counts the engines that died under it. Of `drafted_tokens` so
    far `accepted_tokens` are part of the answer. Once it has ended, `drafts` says by which source (without what engines
    drafted that died), and `speedup` how many times as fast it was as without drafts. `key` names the API key that it
    came with; `client_id` is what the client or a gateway calls it (`X-Request-Id` or `X-Client-Request-Id`), and
    `trace_id` the trace that it belongs to (`traceparent`). `node` is where it is computed, in a cluster; empty while
    that is not known."""

    id: str
    client: str
    api: str
    model: str
    lane: str
    state: RequestState
    slot: int | None = None
    queue_position: int | None = None
    predicted_wait_s: float | None = None
    prompt_tokens: int | None = None
    computed_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    tokens_per_s: float | None = None
    tokens_per_s_avg: float | None = None
    ttft_s: float | None = None
    itl_p50_s: float | None = None
    age_s: float = 0.0
    finish_reason: str | None = None
    error: str | None = None
    resumed: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafts: list[DraftRow] = []
    speedup: float | None = None
    adapters: list[str] = []
    tier: str = ""
    client_id: str = ""
    trace_id: str = ""

    @property
    def draft_hit_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    key: str = ""
    node: str = ""


class KvRunRow(msgspec.Struct, array_like=True):
    """Neighbouring KV cells: first one, number, the id of the request that holds them (None: a prefix that is kept for
    later; `other`: a request of another API key), and whether others hold them as well."""

    start: int
    n_cells: int
    request: str | None
    is_shared: bool


class LongStepRow(msgspec.Struct):
    """A step of an engine that took `seconds` and was over `at_s`, in Unix time; its rows, and how many requests ran.
    `parts` are the seconds of all that the engine's main thread did since the step before: messages, collect, admit,
    restore, save, move, background, plan, drafts, decode, tokens, report. Where `cpu_s`, that thread's processor time,
    is much less, it waited."""

    at_s: float
    seconds: float
    cpu_s: float
    n_prefill_rows: int
    n_decode_rows: int
    n_draft_rows: int
    n_running: int
    parts: dict[str, float]

    @property
    def main_part(self) -> str:
        return max(self.parts, key=self.parts.__getitem__)


class EngineRow(msgspec.Struct, kw_only=True):
    """One engine process. `state` is loading, ready, stopping or failed. `expires_in_s` None means never. `gpu_bytes`
    of the `size_bytes` lie on GPUs. One that `is_preparing` takes seconds for a step, since the driver of its device
    compiles what that needs. `name` is the model's as lists have it.

    A field that `wire.StepStats` has too is copied from the engine's last step by its name. `step_s` is how long that
    step computed; `long_steps` are the longest of each of the last ten minutes, the longest first, with all that the
    engine's main thread did besides. `localrun ps --json` has all fields, its table those of `cli/running.py`, the
    monitor those of `tui/widgets/tables.py` and, of the cache, `kv_map.py`, and `/metrics` those of `ENGINE_GAUGES`.

    Totals count since it was loaded. `*_entries` are saved segments of prefixes; `disk_cache_bytes` is this model's
    part of what all models may use together. `cached_tokens_total` includes the two `*_restored_tokens_total`.
    `kv_runs` are the cells in use, up to a quarter of a second old; split streams lie one after the other, those of
    prompts in the making last, beyond `kv_cells`. `load` are the settings that were asked for when it was loaded, by a
    request, the model's parameters or its table in the settings file. `use` is text, embed or rerank.

    In a cluster `node` is where it runs, and `replica` its id if the cluster started it: `pid` is one of that node
    then, and the figures are up to a second old. `state` is unknown while nothing is heard of it.
    """

    model: str
    pid: int | None
    state: str
    name: str = ""
    n_ctx: int = 0
    slots: int = 0
    slots_busy: int = 0
    queued: int = 0
    kv_cells: int = 0
    kv_cells_used: int = 0
    kv_cells_shared: int = 0
    cached_sequences: int = 0
    ram_cache_bytes: int = 0
    step_s: float | None = None
    n_prefill_rows: int = 0
    n_decode_rows: int = 0
    n_draft_rows: int = 0
    background_s: float = 0.0
    long_steps: list[LongStepRow] = []
    target_itl_s: float | None = None
    rss_bytes: int | None = None
    size_bytes: int = 0
    gpu_bytes: int = 0
    backend: str = ""
    gpu_layers: int = 0
    layers: int = 0
    load_s: float | None = None
    is_preparing: bool = False
    expires_in_s: float | None = None
    preemptions_total: int = 0
    ram_entries: int = 0
    disk_cache_bytes: int = 0
    disk_entries: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    ram_restored_tokens_total: int = 0
    disk_restored_tokens_total: int = 0
    kv_runs: list[KvRunRow] = []
    kv_type: str = ""
    load: dict[str, str | int | float] = {}
    use: str = "text"
    node: str = ""
    replica: str = ""
    tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    output_tokens_total: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Cached over all prompt tokens."""
        return self.cached_tokens_total / self.prompt_tokens_total if self.prompt_tokens_total else None


ENGINE_GAUGES = {
    "slots": ("slots", "Slots of the engine."),
    "engine_memory_bytes": ("size_bytes", "Weights, KV cells and projectors of the engine, in memory or on a GPU."),
    "kv_cells": ("kv_cells", "KV cells, with those of the pool beside streams."),
    "kv_cells_used": ("kv_cells_used", "KV cells in use."),
    "ram_cache_bytes": ("ram_cache_bytes", "Memory taken by the saved state of idle prefixes."),
    "disk_cache_bytes": ("disk_cache_bytes", "Disk space taken by the saved state of idle prefixes."),
    "ram_cache_entries": ("ram_entries", "Saved segments of prefixes in memory."),
    "disk_cache_entries": ("disk_entries", "Saved segments of prefixes on disk."),
}
"""Gauges of `/metrics`, by name without `localrun_`: the field of a model's `EngineRow`, and the help text."""

ENGINE_COUNTERS: dict[str, tuple[str, tuple[str, ...], dict[tuple[str, ...], str]]] = {
    "restored_tokens": (
        "Prompt tokens whose saved state was copied back instead of computed, by tier.", ("tier",),
        {("ram",): "ram_restored_tokens_total", ("disk",): "disk_restored_tokens_total"},
    ),
    "media_chunks": (
        "Chunks of pictures and sound, by where their rows came from (encoded, kept).", ("rows",),
        {("encoded",): "media.n_encoded", ("kept",): "media.n_reused"},
    ),
    "media_tokens": ("Prompt tokens of pictures and sound that were computed.", (), {(): "media.n_tokens"}),
    "media_encode_seconds": ("Time that encoding pictures and sound took, with pauses.", (), {(): "media.encode_s"}),
}  # fmt: skip
"""Counters of `/metrics`, by name: the help text, the labels beside `model`, and by their values the field of
`wire.StepStats`, a total that never falls."""

NODE_TOTALS = {
    "node_output_tokens": ("output_tokens_total", "Tokens that a node's replicas generated."),
    "node_prompt_tokens": ("prompt_tokens_total", "Prompt tokens of a node's replicas, cached ones included."),
    "node_cached_tokens": ("cached_tokens_total", "Prompt tokens that a node's replicas had in their cache."),
    "node_ram_restored_tokens": (
        "ram_restored_tokens_total",
        "Prompt tokens that a node's replicas restored from memory.",
    ),
    "node_disk_restored_tokens": (
        "disk_restored_tokens_total",
        "Prompt tokens that a node's replicas restored from disk.",
    ),
    "node_preemptions": ("preemptions_total", "Times that a node's replicas put a request back."),
}
"""Counters of `/metrics` for the cluster's nodes, as `ENGINE_GAUGES`."""


class LogLine(msgspec.Struct):
    """A line of the daemon's log. `level` is debug, info, warning, error or critical; `source` the model whose engine
    wrote it, or a part of the daemon. `number` only grows; `time_s` is Unix time."""

    number: int
    time_s: float
    level: str
    source: str
    text: str


class CacheRow(msgspec.Struct, kw_only=True):
    """What is kept of one model's prompts. `pid` is None when it is not loaded, and then only the disk has something.

    `hit_rate` is cached over all prompt tokens since it was loaded; the `*_restored_tokens` are those of them that came
    out of memory or from disk. `disk_used_at_s` is Unix time. `node` is the cluster's whose replica keeps it.
    """

    model: str
    pid: int | None = None
    kv_cells: int = 0
    kv_cells_used: int = 0
    ram_bytes: int = 0
    ram_entries: int = 0
    ram_restored_tokens: int = 0
    disk_bytes: int = 0
    disk_entries: int = 0
    disk_restored_tokens: int = 0
    disk_used_at_s: float | None = None
    hit_rate: float | None = None
    node: str = ""


class CacheReport(msgspec.Struct, kw_only=True):
    """All that is kept. `ram_limit_bytes` is per loaded model, `disk_limit_bytes` for all together; 0 is off. Sums and
    limits are of this machine."""

    models: list[CacheRow]
    ram_bytes: int
    ram_limit_bytes: int
    disk_bytes: int
    disk_limit_bytes: int
    disk_folder: str


class CacheCleared(msgspec.Struct, kw_only=True):
    """What clearing freed."""

    ram_bytes: int = 0
    disk_bytes: int = 0


class PullRow(msgspec.Struct, kw_only=True):
    """One download of a model. `state`: planning, pulling, done, failed, cancelled. `completed_bytes` are on disk,
    former attempts included, and never decrease; `bytes_per_s` is of the last ten seconds; `eta_s` is None while there
    is no rate."""

    model: str
    state: str
    status: str
    total_bytes: int = 0
    completed_bytes: int = 0
    bytes_per_s: float = 0.0
    eta_s: float | None = None
    started_at_s: float = 0.0
    error: str | None = None


class BatchRow(msgspec.Struct, kw_only=True):
    """One batch that has not ended. `state` is validating, in_progress, cancelling or finalizing. `lines_per_s` is of
    the last minute, None before its second line. `waits_for` says why no line runs, or did until a moment ago; empty
    where nothing is wrong."""

    id: str
    api: str
    model: str
    state: str
    lines: int = 0
    succeeded: int = 0
    errored: int = 0
    running: int = 0
    lines_per_s: float | None = None
    expires_in_s: float = 0.0
    waits_for: str = ""
    key: str = ""


class Aggregate(msgspec.Struct, kw_only=True):
    """Sums over all engines. `*_tokens_per_s` are of the last second. Prompts are in `*_total` once their request has
    ended. In a cluster rates, `running` and `queued` include what replicas do for others; the rest is of requests that
    came to this daemon. `prefix_hit_rate` is cached prompt tokens over prompt tokens, those of running requests
    included, and `draft_hit_rate` accepted over drafted tokens, since the daemon started."""

    decode_tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    running: int = 0
    queued: int = 0
    loading: int = 0
    requests_total: int = 0
    failed_total: int = 0
    cancelled_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    output_tokens_total: int = 0
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    prefix_hit_rate: float | None = None
    draft_hit_rate: float | None = None
    ttft_s: Percentiles = Percentiles()
    itl_s: Percentiles = Percentiles()


class GpuRow(msgspec.Struct, kw_only=True):
    """One GPU, as its driver says. `memory_used_bytes` are everybody's, not only the engines'."""

    name: str
    busy_percent: float
    memory_used_bytes: int
    memory_total_bytes: int


class SystemRow(msgspec.Struct, kw_only=True):
    """The machine. `daemon_rss_bytes` is the daemon's own process; percentages are of all cores (0 to 100). `gpus` are
    those that can be asked: NVIDIA's, with the extra `nvidia`."""

    cpu_percent: float = 0.0
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    daemon_rss_bytes: int = 0
    cores: int = 0
    gpus: list[GpuRow] = []


class Snapshot(msgspec.Struct, kw_only=True):
    """Everything at one moment. `requests` holds the active ones and those that ended in the last minute (at most 100
    of them), oldest first. `batches` are those that have not ended."""

    time_s: float
    uptime_s: float
    version: str
    aggregate: Aggregate
    engines: list[EngineRow]
    requests: list[RequestRow]
    system: SystemRow
    batches: list[BatchRow] = []

    @property
    def longest_step(self) -> LongStepRow | None:
        """Of the last ten minutes and all engines."""
        steps = (row for engine in self.engines for row in engine.long_steps)
        return max(steps, key=lambda row: row.seconds, default=None)


class TrafficRow(msgspec.Struct, kw_only=True):
    """A request that has ended, without a word of it. `at_s` counts from the begin of the stream. `client` and `blocks`
    are digests with a salt that is the stream's own: of blocks of 16 tokens of the prompt and of the answer behind it,
    each with everything before it, as far as they are known."""

    at_s: float
    model: str
    client: str
    lane: str
    target_itl_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    blocks: list[str]


class UsageRow(msgspec.Struct, kw_only=True):
    """What a key, a day's requests or the requests for a model took. `prompt_tokens` includes `cached_tokens`."""

    name: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class UsageReport(msgspec.Struct, kw_only=True):
    """What was used from the day `since` on, by key, day or model."""

    by: str
    since: str
    rows: list[UsageRow]
