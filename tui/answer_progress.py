"""How far one answer is, in the daemon's own words. Pure.

While the answer runs, everything here comes from the request's row in the event stream, found by the request id that
came in the response header. Before the header the row is found by the client's name, which no other process uses, and
only if it is the single candidate. At the end the metrics of the answer itself are final and replace the row.
"""

from __future__ import annotations

from dataclasses import dataclass

from localrun.client import ChatMetrics
from localrun.snapshot import RequestRow, RequestState, Snapshot
from localrun.tui import short_text

# The first samples of a rate swing too wildly to be read.
FEWEST_TOKENS_FOR_A_RATE = 10


@dataclass(frozen=True)
class StatusPart:
    """One part of the status line. `keep` orders what stays when the line is too narrow: 0 always stays."""

    text: str
    keep: int
    tone: str = ""


@dataclass
class AnswerProgress:
    """`has_text` is set once a piece of the answer came, which may be before the next snapshot shows it. `outcome` is
    None while the answer runs, then one of done, stopped, failed. `doing` is what is done beside the model's answer:
    tools are started, asked for or called."""

    client_name: str
    has_text: bool = False
    doing: str = ""
    request_id: str | None = None
    row: RequestRow | None = None
    n_ctx: int | None = None
    is_preparing: bool = False
    metrics: ChatMetrics | None = None
    outcome: str | None = None
    reason: str | None = None

    def see(self, snapshot: Snapshot) -> None:
        """Takes this request's row out of a snapshot. A row that left the snapshot stays as it was last seen."""
        row = self._find(snapshot)
        if row is None:
            return
        self.row = row
        ours = [each for each in snapshot.engines if each.model == row.model and row.node in ("", each.node)]
        self.is_preparing = bool(ours) and all(engine.is_preparing for engine in ours)
        for engine in snapshot.engines:
            if engine.model == row.model and engine.n_ctx:
                self.n_ctx = engine.n_ctx

    def _find(self, snapshot: Snapshot) -> RequestRow | None:
        if self.request_id is not None:
            return next((row for row in snapshot.requests if row.id == self.request_id), None)
        if self.outcome is not None:
            return None
        ours = [row for row in snapshot.requests if row.client == self.client_name and not row.state.is_final]
        return ours[0] if len(ours) == 1 else None

    def finish(self, outcome: str, reason: str | None = None, metrics: ChatMetrics | None = None) -> None:
        """The answer ended. `reason` is the daemon's, such as `length`; `metrics` come with a complete answer only."""
        self.outcome = outcome
        self.reason = reason
        self.metrics = metrics

    @property
    def tokens_per_s(self) -> float | None:
        """Of the last second while decoding, of the whole answer at the end; None with too few tokens to tell."""
        if self.metrics is not None:
            if self.metrics.output_tokens < FEWEST_TOKENS_FOR_A_RATE or not self.metrics.decode_s:
                return None
            return self.metrics.output_tokens / self.metrics.decode_s
        if self.row is None or self.row.output_tokens < FEWEST_TOKENS_FOR_A_RATE:
            return None
        return self.row.tokens_per_s_avg if self.outcome else self.row.tokens_per_s

    def parts(self) -> list[StatusPart]:
        """The status line, most important first in reading order."""
        found = [self._state()]
        row = self.row
        if self.tokens_per_s is not None:
            found.append(StatusPart(f"{short_text.rate(self.tokens_per_s)} tok/s", 1, "rate"))
        if row is not None and row.ttft_s is not None:
            found.append(StatusPart(f"TTFT {short_text.seconds(row.ttft_s)}", 2))
        counts = self.metrics or row
        prompt, cached, output = (
            (counts.prompt_tokens, counts.cached_tokens, counts.output_tokens) if counts else (None, None, None)
        )
        if prompt is not None:
            found.append(StatusPart(f"prompt {short_text.count(prompt)}", 3))
            if cached is not None:
                found.append(StatusPart(f"cached {short_text.count(cached)}", 4))
        if output:
            found.append(StatusPart(f"output {short_text.count(output)}", 3))
        if prompt is not None and self.n_ctx:
            found.append(StatusPart(f"ctx {short_text.percent((prompt + (output or 0)) / self.n_ctx)}", 5))
        return found

    def _state(self) -> StatusPart:
        if self.doing:
            return StatusPart(self.doing, 0, "wait")
        if self.outcome == "done":
            return StatusPart("length limit" if self.reason == "length" else "done", 0, "good")
        if self.outcome is not None:
            return StatusPart(self.outcome, 0, "bad" if self.outcome == "failed" else "wait")
        row = self.row
        if self.is_preparing and row is not None and row.state in (RequestState.PREFILL, RequestState.DECODE):
            return StatusPart(f"preparing the device {prefill_percent(row)}".rstrip(), 0, "wait")
        if self.has_text:
            return StatusPart("decoding", 0, "good")
        if row is None:
            return StatusPart("sending", 0, "wait")
        match row.state:
            case RequestState.LOADING:
                return StatusPart(f"loading the model, {short_text.age(row.age_s)}", 0, "wait")
            case RequestState.QUEUED:
                place = f", place {row.queue_position}" if row.queue_position else ""
                wait = "" if row.predicted_wait_s is None else f", about {short_text.age(row.predicted_wait_s)}"
                return StatusPart(f"queued{place}{wait}", 0, "wait")
            case RequestState.PREFILL:
                return StatusPart(f"prefill {prefill_percent(row)}".rstrip(), 0, "wait")
            case RequestState.DECODE:
                return StatusPart("decoding", 0, "good")
            case _:
                return StatusPart("ending", 0, "wait")

    def caption(self) -> str:
        """One line below the finished answer."""
        parts = []
        counts = self.metrics or self.row
        if counts is not None and counts.output_tokens:
            parts.append(f"{short_text.count(counts.output_tokens)} tokens")
        if self.tokens_per_s is not None:
            parts.append(f"{short_text.rate(self.tokens_per_s)} tok/s")
        if self.metrics is not None and self.metrics.speedup_text:
            parts.append(self.metrics.speedup_text)
        if self.outcome == "stopped":
            parts.append("stopped")
        elif self.outcome == "failed":
            parts.append("incomplete")
        elif self.reason == "length":
            parts.append("cut at the length limit")
        return " · ".join(parts)


def prefill_percent(row: RequestRow) -> str:
    """How much of the prompt is computed or came from the cache; empty before its length is known. Not all of it before
    the first token of the answer."""
    if not row.prompt_tokens:
        return ""
    return short_text.percent(min(row.computed_tokens, row.prompt_tokens - 1) / row.prompt_tokens)


def fit_parts(parts: list[StatusPart], width: int, gap: int) -> list[StatusPart]:
    """The parts that fit a line of `width` cells with `gap` cells between them, dropping those of highest `keep` first,
    the last one first."""
    kept = list(parts)
    while sum(len(part.text) + gap for part in kept) - gap > width:
        droppable = [part for part in kept if part.keep]
        if not droppable:
            break
        kept.remove(max(reversed(droppable), key=lambda part: part.keep))
    return kept
