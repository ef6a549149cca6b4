"""Long prompts, as agents send them, and prompts that begin as others did: how long anybody waits for them, and how
much of a prefix is computed more than once.

`stall`: streams are running when a long one arrives: how long they stand still, how long the newcomer waits, and how
long it takes until all of them are done, because a server may pay for short gaps with throughput. `outgrow`: prompts
longer than a slot's share of the KV cells. `agent`: conversations that grow beyond it.

`shared`: several requests at once with one system prompt. `returning`: conversations that take turns and together are
larger than the KV pool. `restart`: one long prompt before and after a restart of the server.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import NamedTuple

from localrun.bench.metrics import gaps_s, gaps_touching_s, longest_s, stream_metrics, summary, wall_s
from localrun.bench.results import Metrics, Options, StreamRecord
from localrun.bench.session import WorkloadResult, define
from localrun.bench.streams import Endpoint, numbers

# A server may want a cell or two beyond the last token.
SPARE = 8

# --- stall ---

N_STREAMS = 3
N_PROMPT = 50
# A server that keeps them going should have some left when the newcomer's prompt is done: so many tokens at least, and
# one for so many of the prompt.
N_STREAM_OUTPUT, N_LONG_PER_OUTPUT = 256, 16
N_LONG = 2400
N_LONG_OUTPUT = 8
STEADY_PIECES = 30
N_UNSTEADY = 10


async def _stall(endpoint: Endpoint, options: Options) -> WorkloadResult:
    n_long = min(N_LONG, options.context_tokens - N_LONG_OUTPUT - SPARE)
    measured = WorkloadResult({}, {"n_streams": N_STREAMS, "n_prompt": N_PROMPT, "n_long": n_long})
    prompt = numbers(options.seed, "stall long", n_long)
    arrival = await arrive(endpoint, options, "stall", prompt, N_LONG_OUTPUT, n_streams=N_STREAMS)
    measured.metrics, measured.note = arrival.metrics, arrival.note
    if arrival.long.is_complete:
        long = arrival.long
        measured.metrics["long_prefill_tokens_per_s"] = (long.n_prompt - long.n_cached) / long.ttft_s
    return measured


class Arrival(NamedTuple):
    """What came of a long prompt beside streams. `note` says what makes it worth less."""

    metrics: Metrics
    long: StreamRecord
    note: str


async def arrive(
    endpoint: Endpoint, options: Options, label: str, prompt: list[int], n_output: int, *, n_streams: int
) -> Arrival:
    """Send `prompt` while `n_streams` are running. The window of the gaps is from its sending to its first token; a gap
    that touches it counts whole. The wall is from that sending until it and all streams are done."""
    prompts = [numbers(options.seed, f"{label} {index}", N_PROMPT) for index in range(n_streams)]
    n_each = max(N_STREAM_OUTPUT, len(prompt) // N_LONG_PER_OUTPUT)
    streams = [endpoint.begin(beside, n_each, group="streams") for beside in prompts]
    await endpoint.until(
        lambda: all(each.task.done() or len(each.record.arrivals_s) >= STEADY_PIECES for each in streams),
        options.request_timeout_s,
    )
    long = await endpoint.send(prompt, n_output, group="long")
    records = [await stream.task for stream in streams]
    if not long.is_complete:
        return Arrival({}, long, f"the long prompt failed: {long.problem}")
    start_s, end_s = long.sent_at_s, long.arrivals_s[0]
    n_early = sum(record.ended_at_s < end_s for record in records)
    note = f"{n_early} of the streams ended before the long prompt's first token" if n_early else ""
    during = [gap for record in records for gap in gaps_touching_s(_moments_s(record), start_s, end_s)]
    # While the newcomer answers: a server that stood still has more tokens left for when it is gone.
    after_s = [[at_s for at_s in record.arrivals_s if end_s <= at_s <= long.ended_at_s] for record in records]
    after = [gap for times_s in after_s for gap in gaps_s(times_s)]
    # The first pieces come while the other streams' prompts are still computed.
    steady = [[at_s for at_s in record.arrivals_s[N_UNSTEADY:] if at_s <= start_s] for record in records]
    before = [gap for times_s in steady for gap in gaps_s(times_s)]
    metrics: Metrics = {
        "longest_gap_s": longest_s(during),
        "long_ttft_s": long.ttft_s,
        "wall_s": max(record.ended_at_s for record in (long, *records)) - start_s,
        "before_longest_gap_s": longest_s(before),
    }
    for name, gaps in (("during", during), ("before", before), ("after", after), ("long", gaps_s(long.arrivals_s))):
        metrics |= summary(f"{name}_itl", gaps)
    return Arrival(metrics, long, note)


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


# --- outgrow ---

LENGTHS = (4800, 12_000)
BESIDE = (3, 1, 0)  # streams
N_OUTPUT = 32
N_MORE = 200
PAUSE_S = 10.0


async def _outgrow(endpoint: Endpoint, options: Options) -> WorkloadResult:
    """Each length beside each number of streams; what arrives alone comes again after a pause, with its answer and
    `N_MORE` tokens behind it."""
    measured = WorkloadResult({}, {"lengths": "/".join(map(str, LENGTHS)), "n_output": N_OUTPUT})
    notes = []
    for n_long in LENGTHS:
        for n_streams in BESIDE:
            name = f"{n_long}_beside_{n_streams}"
            prompt = numbers(options.seed, f"outgrow {name}", n_long)
            arrival = await arrive(endpoint, options, f"outgrow {name}", prompt, N_OUTPUT, n_streams=n_streams)
            measured.metrics |= {f"{name}_{metric}": value for metric, value in arrival.metrics.items()}
            if arrival.note:
                notes.append(f"{name}: {arrival.note}")
            if not n_streams:
                await asyncio.sleep(PAUSE_S)
                prompt += numbers(options.seed, f"outgrow {name} more", N_OUTPUT + N_MORE)
                again = await endpoint.send(prompt, N_OUTPUT, group="again")
                if again.is_complete:
                    measured.metrics[f"{n_long}_again_ttft_s"] = again.ttft_s
                    measured.metrics[f"{n_long}_again_cached_tokens"] = again.n_cached
    measured.note = "; ".join(notes)
    return measured


OUTGROW = define(
    "outgrow",
    f"prompts of {LENGTHS[0]:,} and {LENGTHS[1]:,} tokens arrive beside {BESIDE[0]}, {BESIDE[1]} and no streams",
    ("*_long_ttft_s", "*_wall_s", "*_longest_gap_s", "*_long_itl_p50_s", "*_after_itl_p50_s", "*_again_ttft_s"),
    _outgrow,
)


# --- agent ---

N_TURNS = 20
N_FIRST = 4000
TOOL_RESULT = (500, 2100)  # so that the last prompt has about 30,000 tokens
N_TURN_OUTPUT = 64


async def _agent(endpoint: Endpoint, options: Options) -> WorkloadResult:
    """One conversation of an agent, and then two at once. What a turn adds is its answer and the result of a tool."""
    measured = WorkloadResult({}, {"n_turns": N_TURNS, "n_first": N_FIRST, "n_output": N_TURN_OUTPUT})
    for n_clients in (1, 2):
        records = await asyncio.gather(*(_converse(endpoint, options, f"{n_clients}/{at}") for at in range(n_clients)))
        done = [record for turns in records for record in turns if record.is_complete]
        if len(done) < n_clients * N_TURNS:
            measured.note = f"{n_clients * N_TURNS - len(done)} turns of {n_clients} clients failed"
        if done:
            measured.metrics |= {
                f"clients_{n_clients}_wall_s": wall_s(done),
                f"clients_{n_clients}_cached_tokens": sum(record.n_cached for record in done),
            }
    return measured


async def _converse(endpoint: Endpoint, options: Options, label: str) -> list[StreamRecord]:
    sizes = random.Random(f"{options.seed} {label}")
    history = numbers(options.seed, f"agent {label}", N_FIRST)
    records = []
    for turn in range(N_TURNS):
        records.append(await endpoint.send(history, N_TURN_OUTPUT, group=f"agent {label}"))
        # Of random tokens: what the server wrote itself is not known as tokens everywhere.
        history += numbers(options.seed, f"agent {label} {turn}", N_TURN_OUTPUT + sizes.randrange(*TOOL_RESULT))
    return records


AGENT = define(
    "agent",
    f"an agent's {N_TURNS} turns, from {N_FIRST:,} to about 30,000 tokens: one conversation, then two at once",
    ("clients_*_wall_s", "clients_*_cached_tokens"),
    _agent,
)


# --- shared ---

N_REQUESTS = 8
N_SYSTEM = 1200
N_OWN = 24
N_SHARED_OUT = 32


async def _shared(endpoint: Endpoint, options: Options) -> WorkloadResult:
    system = numbers(options.seed, "shared system", N_SYSTEM)
    measured = WorkloadResult(
        {}, {"n_requests": N_REQUESTS, "n_system": N_SYSTEM, "n_own": N_OWN, "n_output": N_SHARED_OUT}
    )
    for group in ("cold", "warm"):
        own = [numbers(options.seed, f"shared {group} {index}", N_OWN) for index in range(N_REQUESTS)]
        records = await asyncio.gather(*(endpoint.send(system + message, N_SHARED_OUT, group=group) for message in own))
        measured.metrics |= stream_metrics(group, records)
    return measured


SHARED = define(
    "shared",
    f"{N_REQUESTS} requests at once with the same {N_SYSTEM:,}-token system prompt, cold, then warm",
    ("cold_wall_s", "cold_ttft_p50_s", "cold_ttft_max_s", "warm_wall_s", "warm_ttft_p50_s", "warm_ttft_max_s"),
    _shared,
)


# --- returning ---

N_CONVERSATIONS = 12
N_ROUNDS = 3
N_RETURNING_OUT = 16
POOLS = 3


async def _returning(endpoint: Endpoint, options: Options) -> WorkloadResult:
    """Each turn sends the whole conversation: what was said before, numbers that stand for the answer, and a new
    message. They stand for it because not every server returns the tokens of its answer, so that all servers are asked
    the same. At the end all conversations together are POOLS times the pool."""
    total_tokens = POOLS * options.kv_cells
    n_conversations = max(N_CONVERSATIONS, math.ceil(total_tokens / options.context_tokens))
    n_message = (total_tokens // n_conversations - SPARE) // N_ROUNDS - N_RETURNING_OUT
    measured = WorkloadResult(
        {}, {"n_conversations": n_conversations, "n_message": n_message, "n_output": N_RETURNING_OUT, "pools": POOLS}
    )
    histories: list[list[int]] = [[] for _ in range(n_conversations)]
    for turn in range(1, N_ROUNDS + 1):
        records = []
        for index, history in enumerate(histories):
            history += numbers(options.seed, f"returning {index} message {turn}", n_message)
            records.append(await endpoint.send(history, N_RETURNING_OUT, group=f"round{turn}"))
            history += numbers(options.seed, f"returning {index} answer {turn}", N_RETURNING_OUT)
        measured.metrics |= stream_metrics(f"round{turn}", records)
    return measured


RETURNING = define(
    "returning",
    f"{N_CONVERSATIONS} or more conversations in turn, {N_ROUNDS} rounds, together {POOLS} times the KV pool",
    ("round*_ttft_p50_s", "round*_wall_s", "round*_cached_tokens"),
    _returning,
)


# --- restart ---

N_RESTART_PROMPT = 1200
N_RESTART_OUT = 8


async def _restart(endpoint: Endpoint, options: Options) -> WorkloadResult:
    measured = WorkloadResult({}, {"n_prompt": N_RESTART_PROMPT, "n_output": N_RESTART_OUT})
    prompt = numbers(options.seed, "restart", N_RESTART_PROMPT)
    for group in ("cold", "cached", "restarted"):
        if group == "restarted":
            if options.restart is None:
                measured.note = "the part after a restart is skipped: this server is not ours to restart"
                break
            endpoint.target = await options.restart(endpoint.target)
            # Loads the model, where that happens on demand; it is not what is measured.
            await endpoint.send(numbers(options.seed, "restart warm-up", 16), 1, group="warm-up")
        record = await endpoint.send(prompt, N_RESTART_OUT, group=group)
        if record.is_complete:
            measured.metrics[f"{group}_ttft_s"] = record.ttft_s
            measured.metrics[f"{group}_cached_tokens"] = record.n_cached
    return measured


RESTART = define(
    "restart",
    f"the same {N_RESTART_PROMPT:,}-token prompt cold, again, and after a restart of the server",
    ("cold_ttft_s", "cached_ttft_s", "restarted_ttft_s"),
    _restart,
)
