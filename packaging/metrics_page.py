"""`localrun/docs/metrics.md`: every family of `/metrics`, from the registry that a daemon shows."""

from __future__ import annotations

from prometheus_client.core import Metric

from localrun.config import Settings
from localrun.server.http.exchange import LoopWatch
from localrun.server.jobs.registry import Registry
from localrun.server.metering.telemetry import Telemetry

HEAD = """\
# Metrics, and the log of requests

`/metrics` is for Prometheus, in its text format or as OpenMetrics. Counters count since the daemon started. No series
names a request or a client. The label `model` is the name that a model was loaded under; requests for a copy of it
count there, too, because they run on the same engine. It is empty for requests that never reached a model. When a model
is deleted, its series disappear.

```yaml
scrape_configs:
  - job_name: localrun
    static_configs:
      - targets: ["127.0.0.1:11434"]
    # Only where the daemon asks for keys: localrun key create --name prometheus --admin --read-only
    authorization:
      credentials: "lrk_..."
```

| what | query |
|---|---|
"""

QUERIES = {
    "tokens per second": "sum by (model) (rate(localrun_output_tokens_total[1m]))",
    "the same of each node of a cluster": "sum by (node) (rate(localrun_node_output_tokens_total[1m]))",
    "TTFT, 95th percentile": "histogram_quantile(0.95, "
    "sum by (le, model) (rate(localrun_time_to_first_token_seconds_bucket[5m])))",
    "share of prompt tokens from the prefix cache": "rate(localrun_cached_tokens_total[5m]) "
    "/ rate(localrun_prompt_tokens_total[5m])",
    "errors of the daemon itself": 'sum(increase(localrun_http_responses_total{status=~"5.."}[5m])) > 0',
    "requests refused because the queue was full": "sum by (model) "
    '(increase(localrun_request_ends_total{reason="queue_full"}[5m])) > 0',
    "share of KV cells in use": "localrun_kv_cells_used / localrun_kv_cells",
    "answers that reached their limit": 'rate(localrun_request_ends_total{reason="length"}[5m])',
}

FAMILIES = """
In a [cluster](cli.md#localrun-cluster) scrape every node that takes requests, each by itself: sums over them count
nothing twice. What is of requests is counted by the daemon that they came to. What is of engines has the label `node`;
the head's daemon tells of all replicas, and has the `localrun_node_` families.

A series starts at 0 where its labels are known beforehand, so that `increase` sees the first event. Connections that
are refused before there is a request (`400`, `408`, `431`, `503` for too many connections) have the family
`connection`.

## Families

| name | type | labels | |
|---|---|---|---|
"""

LLAMA = """
On Linux there is also `process_*` of the daemon's own process, without its engines.

## llama-server's names

Monitors and dashboards that were made for llama-server find its names, each over all models:

| name | type | |
|---|---|---|
"""

LOG = r"""
## The log of requests

With `--request-log text` (or `json`) the daemon's log gets one line for each HTTP request when it has ended. It is off
by default, and never has prompts or answers.

```text
POST /v1/chat/completions 200 1.234s id=req_6f... model=tiny prompt_tokens=16 cached_tokens=0 \
output_tokens=10 ttft_s=0.050 reason=length from=127.0.0.1 client=curl client_id=my-42
```

As JSON a line is one object with the same fields, `method`, `path`, `status`, `duration_s` and `time`. The status is
499 where the client left before there was an answer. `id` is in the answer's header (`x-request-id`, Anthropic's
`request-id`) and in `/localrun/v1/requests`; `client_id` is what a gateway sent as `X-Request-Id` or
`X-Client-Request-Id`, and `trace_id` comes from `traceparent`. `localrun logs -f` shows the log wherever the daemon
runs.
"""


class _Nodes:
    """A cluster, which has families of its own."""

    node, is_counted_here = "", True

    def totals(self) -> dict[tuple[str, str], dict[str, int]]:
        return {}


def text() -> str:
    """The whole page."""
    metrics = Telemetry(Settings(), Registry(), list, nodes=_Nodes()).metrics
    metrics.registry.register(LoopWatch())
    families = [
        family for family in metrics.registry.collect() if not family.name.startswith(("process_", "llamacpp:"))
    ]
    labels = {family._name: family._labelnames for family in metrics.families}
    own = [_row(family, labels.get(family.name, getattr(family, "_labelnames", ()))) for family in families]
    llama = [
        f"| `{_exposed(family)}` | {family.type} | {family.documentation} |\n"
        for family in metrics.registry.collect()
        if family.name.startswith("llamacpp:")
    ]
    queries = "".join(f"| {what} | `{query}` |\n" for what, query in QUERIES.items())
    return HEAD + queries + FAMILIES + "".join(sorted(own)) + LLAMA + "".join(llama) + LOG


def _row(family: Metric, labels: tuple[str, ...]) -> str:
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{_exposed(family)}` | {family.type} | {shown} | {family.documentation} |\n"


def _exposed(family: Metric) -> str:
    return family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
