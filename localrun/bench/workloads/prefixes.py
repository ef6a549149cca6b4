"""Prompts that begin as others did: how much of a prefix is computed more than once.

`shared`: several requests at once with one system prompt. `returning`: conversations that take turns and together are
larger than the KV pool. `restart`: one long prompt before and after a restart of the server.
"""

from __future__ import annotations

import asyncio
import math

from localrun.bench.metrics import stream_metrics
from localrun.bench.results import Options
from localrun.bench.session import WorkloadResult, define
from localrun.bench.streams import Endpoint, numbers

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
# A server may want a cell or two beyond the last token.
SPARE = 8


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
