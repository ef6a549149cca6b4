"""What a client saw of one request: the raw material of every metric.

Times are `time.perf_counter()` of the load generator. Durations are measured from the *intended* send time, so that a
generator that falls behind its schedule does not hide the wait it caused (coordinated omission).

Does not: measure, send, or judge.
"""

from __future__ import annotations

import msgspec


class StreamRecord(msgspec.Struct, kw_only=True):
    """One request. `arrivals_s` has an entry per piece of text; a piece may carry several tokens, so `n_output`, the
    server's own count, is what totals are made of.

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
