"""Streams are running when a long prompt arrives: how long they stand still, how long the newcomer waits, and how long
it takes until all of them are done, because a server may pay for short gaps with throughput.
"""

from __future__ import annotations

from collections.abc import Callable

from localrun.bench.metrics import gaps_s, gaps_touching_s, longest_s, summary
from localrun.bench.results import Options, StreamRecord
from localrun.bench.streams import Endpoint, Stream, numbers
from localrun.bench.workloads.workload import Measured, define

N_STREAMS = 3
N_PROMPT = 50
# Enough that a server which keeps them going has some left when the newcomer's prompt is done.
N_STREAM_OUTPUT = 256
N_LONG = 2400
N_LONG_OUTPUT = 8
# A server may want a cell or two beyond the last token.
SPARE = 8
STEADY_PIECES = 30
N_UNSTEADY = 10


async def _stall(endpoint: Endpoint, options: Options) -> Measured:
    """The window of the gaps is from the sending of the long prompt to its first token; a gap that touches it counts
    whole. The wall is from that sending until the newcomer and all streams are done."""
    n_long = min(N_LONG, options.context_tokens - N_LONG_OUTPUT - SPARE)
    measured = Measured({}, {"n_streams": N_STREAMS, "n_prompt": N_PROMPT, "n_long": n_long})
    prompts = [numbers(options.seed, f"stall {index}", N_PROMPT) for index in range(N_STREAMS)]
    streams = [endpoint.begin(prompt, N_STREAM_OUTPUT, group="streams") for prompt in prompts]
    await endpoint.until(_have(streams, [STEADY_PIECES] * N_STREAMS), options.request_timeout_s)
    long = await endpoint.send(numbers(options.seed, "stall long", n_long), N_LONG_OUTPUT, group="long")
    records = [await stream.task for stream in streams]
    if not long.is_complete:
        measured.note = f"the long prompt failed: {long.problem}"
        return measured
    start_s, end_s = long.sent_at_s, long.arrivals_s[0]
    n_early = sum(record.ended_at_s < end_s for record in records)
    if n_early:
        measured.note = f"{n_early} of the streams ended before the long prompt's first token"
    during = [gap for record in records for gap in gaps_touching_s(_moments_s(record), start_s, end_s)]
    # The first pieces come while the other streams' prompts are still computed.
    steady = [[at_s for at_s in record.arrivals_s[N_UNSTEADY:] if at_s <= start_s] for record in records]
    before = [gap for times_s in steady for gap in gaps_s(times_s)]
    measured.metrics |= {
        "longest_gap_s": longest_s(during),
        "long_ttft_s": long.ttft_s,
        "wall_s": max(record.ended_at_s for record in (long, *records)) - start_s,
        "long_prefill_tokens_per_s": (long.n_prompt - long.n_cached) / long.ttft_s,
        "before_longest_gap_s": longest_s(before),
    }
    measured.metrics |= summary("during_itl", during) | summary("before_itl", before)
    return measured


def _have(streams: list[Stream], n_pieces: list[int]) -> Callable[[], bool]:
    """Whether each stream has its number of pieces, or has ended."""
    return lambda: all(
        stream.task.done() or len(stream.record.arrivals_s) >= count
        for stream, count in zip(streams, n_pieces, strict=True)
    )


def _moments_s(record: StreamRecord) -> list[float]:
    """The arrivals, and the end of a stream that was not complete: whatever it was that ended it, until then a person
    waited for more."""
    return record.arrivals_s if record.is_complete else [*record.arrivals_s, record.ended_at_s]


STALL = define(
    "stall",
    f"{N_STREAMS} streams are running when a {N_LONG:,}-token prompt arrives",
    ("longest_gap_s", "long_ttft_s", "wall_s", "before_itl_p50_s", "during_itl_p50_s"),
    _stall,
)
