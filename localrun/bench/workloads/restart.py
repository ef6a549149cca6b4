"""The same long prompt before and after a restart of the server: whether its cache survives."""

from __future__ import annotations

from localrun.bench.results import Options
from localrun.bench.streams import Endpoint, numbers
from localrun.bench.workloads.workload import Measured, define

N_PROMPT = 1200
N_OUTPUT = 8


async def measure(endpoint: Endpoint, options: Options) -> Measured:
    measured = Measured({}, {"n_prompt": N_PROMPT, "n_output": N_OUTPUT})
    prompt = numbers(options.seed, "restart", N_PROMPT)
    for group in ("cold", "cached", "restarted"):
        if group == "restarted":
            if options.restart is None:
                measured.note = "the part after a restart is skipped: this server is not ours to restart"
                break
            endpoint.target = await options.restart(endpoint.target)
            # Loads the model, where that happens on demand; it is not what is measured.
            await endpoint.send(numbers(options.seed, "restart warm-up", 16), 1, group="warm-up")
        record = await endpoint.send(prompt, N_OUTPUT, group=group)
        if record.is_complete:
            measured.metrics[f"{group}_ttft_s"] = record.ttft_s
            measured.metrics[f"{group}_cached_tokens"] = record.n_cached
    return measured


WORKLOAD = define(
    "restart",
    f"the same {N_PROMPT:,}-token prompt cold, again, and after a restart of the server",
    ("cold_ttft_s", "cached_ttft_s", "restarted_ttft_s"),
    measure,
)
