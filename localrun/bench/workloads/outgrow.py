"""What agents send: prompts longer than a slot's share of the KV cells, and conversations that grow beyond it."""

from __future__ import annotations

import asyncio
import random

from localrun.bench.metrics import wall_s
from localrun.bench.results import Options, StreamRecord
from localrun.bench.streams import Endpoint, numbers
from localrun.bench.workloads.stall import arrive
from localrun.bench.workloads.workload import WorkloadResult, define

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
