"""Who got how much of the server while everybody wanted it.

Service is counted as the Virtual Token Counter does (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024): prompt tokens that were computed, plus output tokens with twice the weight. From outside, a prompt's service
shows when its first token comes.

Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from localrun.bench.record import StreamRecord

OUTPUT_WEIGHT = 2.0


def contended_until_s(records: Sequence[StreamRecord]) -> float:
    """The moment at which the first client has nothing waiting any more: its last request has its first token. Until
    then all compete. Needs one completed record."""
    last_s: dict[str, float] = {}
    for record in records:
        if record.is_complete:
            last_s[record.client] = max(last_s.get(record.client, 0.0), record.arrivals_s[0])
    return min(last_s.values())


def service_tokens(record: StreamRecord, until_s: float) -> float:
    """The weighted tokens that a request had got by then."""
    n_pieces = bisect_right(record.arrivals_s, until_s)
    if n_pieces == 0:
        return 0.0
    # What was cut short never heard the server's count; there, a piece is a token.
    n_output = record.n_output or len(record.arrivals_s)
    computed = record.n_prompt - record.n_cached
    return computed + OUTPUT_WEIGHT * n_output * n_pieces / len(record.arrivals_s)


def service_by_client(records: Sequence[StreamRecord], until_s: float) -> dict[str, float]:
    """Every client that sent something has an entry."""
    service: dict[str, float] = {}
    for record in records:
        service[record.client] = service.get(record.client, 0.0) + service_tokens(record, until_s)
    return service


def lowest_share(service: dict[str, float]) -> float:
    """The least served client's part of an equal share: 1.0 is fair, 0.0 is nothing at all."""
    total = sum(service.values())
    return min(service.values()) * len(service) / total if total else 1.0


def difference_bound_tokens(*, n_prompt: int, n_output: int, slots: int) -> float:
    """The most by which the service of two clients who both wait may differ under the Virtual Token Counter: twice the
    larger of a prompt's service and that of a full batch, weighted as output (theorem 4.4 there)."""
    return 2 * max(n_prompt, OUTPUT_WEIGHT * slots * (n_prompt + n_output))


def jain_index(service: dict[str, float]) -> float:
    """1.0 when all get the same, 1/n when one of n gets everything (Jain, Chiu and Hawe, 1984)."""
    squares = sum(value * value for value in service.values())
    return sum(service.values()) ** 2 / (len(service) * squares) if squares else 1.0
