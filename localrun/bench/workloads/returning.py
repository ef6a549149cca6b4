"""Conversations that take turns and together are larger than the KV pool: what is left of each when it comes back."""

from __future__ import annotations

import math

from localrun.bench.metrics import stream_metrics
from localrun.bench.results import Options
from localrun.bench.streams import Endpoint, numbers
from localrun.bench.workloads.workload import Measured, define

N_CONVERSATIONS = 12
N_ROUNDS = 3
N_OUTPUT = 16
POOLS = 3
# A server may want a cell or two beyond the last token.
SPARE = 8


async def measure(endpoint: Endpoint, options: Options) -> Measured:
    """Each turn sends the whole conversation: what was said before, numbers that stand for the answer, and a new
    message. They stand for it because not every server returns the tokens of its answer, so that all servers are asked
    the same. At the end all conversations together are POOLS times the pool."""
    total_tokens = POOLS * options.kv_cells
    n_conversations = max(N_CONVERSATIONS, math.ceil(total_tokens / options.context_tokens))
    n_message = (total_tokens // n_conversations - SPARE) // N_ROUNDS - N_OUTPUT
    measured = Measured(
        {}, {"n_conversations": n_conversations, "n_message": n_message, "n_output": N_OUTPUT, "pools": POOLS}
    )
    histories: list[list[int]] = [[] for _ in range(n_conversations)]
    for turn in range(1, N_ROUNDS + 1):
        records = []
        for index, history in enumerate(histories):
            history += numbers(options.seed, f"returning {index} message {turn}", n_message)
            records.append(await endpoint.send(history, N_OUTPUT, group=f"round{turn}"))
            history += numbers(options.seed, f"returning {index} answer {turn}", N_OUTPUT)
        measured.metrics |= stream_metrics(f"round{turn}", records)
    return measured


WORKLOAD = define(
    "returning",
    f"{N_CONVERSATIONS} or more conversations in turn, {N_ROUNDS} rounds, together {POOLS} times the KV pool",
    ("round*_ttft_p50_s", "round*_wall_s", "round*_cached_tokens"),
    measure,
)
