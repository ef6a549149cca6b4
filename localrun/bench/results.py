"""The nouns of a benchmark: what is measured (Target), how (Options, Workload) and what came out (RunResult, made of
one StreamRecord for each request).

Names of metrics are `[<group>_]<what>_<unit>`: `c8_decode_tokens_per_s`, `cold_ttft_p50_s`, `longest_gap_s`,
`completion_ratio`, `rss_bytes`. Which direction is better follows from the name, see `better`.

Does not: send anything, or compute a metric.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import msgspec

Metrics: TypeAlias = dict[str, float]
Parameter: TypeAlias = str | int | float | bool | list[int] | None


class Target(msgspec.Struct, frozen=True):
    """A server to measure. `base_url` is without `/v1`; `pid`, where known, is the process whose memory, with its
    children's, is reported. `can_switch` is whether a request may say that it wants no drafts, as with localrun."""

    name: str
    base_url: str
    model: str
    pid: int | None = None
    can_switch: bool = False


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run may vary; the same for every target that is compared.

    `seed` decides every prompt and every arrival. Two runs with one seed send the same tokens, so what should be cold
    needs a seed that this server has not seen. `slots` and `kv_cells` are those of the servers, `context_tokens` is the
    longest request that each of them takes (with KV split among the slots that is the part of one slot). `latency`
    and `lane` are words that localrun knows, sent with every request. Workloads that may last any time take `seconds`.
    `rate_per_s`, `burstiness` and the limits are those of the workload `chat`. `restart` ends the target's server and
    starts it again, and returns it as it then is; None where nobody may do that.
    """

    seed: int
    streams: tuple[int, ...] = ()
    slots: int = 8
    kv_cells: int = 32768
    context_tokens: int = 4096
    latency: str = ""
    lane: str = ""
    seconds: float = 20.0
    rate_per_s: float = 1.0
    burstiness: float = 1.0
    ttft_limit_s: float = 2.0
    itl_limit_s: float = 0.2
    request_timeout_s: float = 600.0
    restart: Callable[[Target], Awaitable[Target]] | None = None


class RunResult(msgspec.Struct, kw_only=True):
    """One run of one workload against one target. `note` says what was skipped or cut short, empty when nothing was;
    `started_at` is the wall clock, ISO 8601 in UTC."""

    workload: str
    target: Target
    parameters: dict[str, Parameter]
    metrics: Metrics
    records: list[StreamRecord]
    note: str = ""
    started_at: str = ""


@dataclass(frozen=True)
class Workload:
    """A named load. `headline` are patterns (as of `fnmatch`) of the metrics that are shown first. One that `overloads`
    the server means some of its requests to be refused.

    `run` never raises for a request that fails: it is in the records. It raises DaemonUnreachable when nobody listens
    at all, and LocalrunError when the target refuses the first small request.
    """

    name: str
    summary: str
    run: Callable[[Target, Options], Coroutine[Any, Any, RunResult]]
    headline: tuple[str, ...]
    overloads: bool = False

    def shown(self, metrics: Mapping[str, float]) -> list[str]:
        """The names of the headline metrics that there are, in the headline's order."""
        return [name for pattern in self.headline for name in metrics if fnmatchcase(name, pattern)]


def better(metric: str) -> Literal["lower", "higher"]:
    """Rates, ratios, cached tokens and the place of the knee should be high; all else, such as times and bytes, low."""
    return "higher" if metric.endswith(("_per_s", "_ratio", "_streams", "cached_tokens")) else "lower"


class StreamRecord(msgspec.Struct, kw_only=True):
    """What a client saw of one request: the raw material of every metric. `arrivals_s` has an entry per piece of text;
    a piece may carry several tokens, so `n_output`, the server's own count, is what totals are made of. Of `n_drafted`
    tokens that were guessed for it `n_accepted` are part of the answer.

    Times are `time.perf_counter()` of the load generator. Durations are measured from the *intended* send time, so that
    a generator that falls behind its schedule does not hide the wait it caused (coordinated omission).

    `group` names the part of the workload that it belongs to. `problem` is why it did not complete, empty when it did;
    `status` is the HTTP status (0: no answer came), `retry_after_s` what a refusal asked to wait.
    """

    intended_at_s: float
    sent_at_s: float
    group: str = ""
    client: str = ""
    lane: str = ""
    arrivals_s: list[float] = msgspec.field(default_factory=list)
    ended_at_s: float = 0.0
    n_prompt: int = 0
    n_cached: int = 0
    n_output: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    text: str = ""
    status: int = 0
    problem: str = ""
    retry_after_s: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the answer came to its end, with text in it."""
        return not self.problem and bool(self.arrivals_s)

    @property
    def ttft_s(self) -> float:
        """Time to first token, from the intended send time. Only where text arrived."""
        return self.arrivals_s[0] - self.intended_at_s

    @property
    def latency_s(self) -> float:
        """From the intended send time to the last text. Only where text arrived."""
        return self.arrivals_s[-1] - self.intended_at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None below two tokens."""
        if self.n_output < 2 or not self.arrivals_s:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.n_output - 1)
