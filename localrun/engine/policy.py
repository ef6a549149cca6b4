"""Who is next: lanes, fairness between clients, aging. Pure; time is an argument.

Inside a lane the client with the least counted service goes first. Service is uncached prompt tokens plus twice the
output tokens, and a client that becomes active is lifted to the least service of the active ones, so that idling saves
up no credit (the Virtual Token Counter of Sheng et al., OSDI 2024). Waiting lifts a request by one lane per
`AGING_S`; after `STARVED_S` it goes before all that have not waited so long, so nobody waits for ever.

Does not: know slots, cells or budgets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from localrun.engine.request import Request
from localrun.wire import Lane

AGING_S = 20.0
STARVED_S = 60.0
OUTPUT_WEIGHT = 2
_RANK = {Lane.INTERACTIVE: 0, Lane.DEFAULT: 1, Lane.BATCH: 2}


class Policy:
    """Counts service per client and orders requests by it."""

    def __init__(self) -> None:
        self._service: dict[str, int] = {}
        self._active: Counter[str] = Counter()

    def enter(self, client: str) -> None:
        """A request of this client arrived."""
        if not self._active[client]:
            floor = min((self._service[other] for other in self._active if self._active[other]), default=0)
            self._service[client] = max(self._service.get(client, 0), floor)
        self._active[client] += 1

    def leave(self, client: str) -> None:
        """A request of this client ended. The last client to leave takes all accounts with it."""
        self._active[client] -= 1
        if not self._active[client]:
            del self._active[client]
        if not self._active:
            self._service.clear()

    def charge(self, client: str, *, n_prefill: int, n_output: int) -> None:
        """A step served this client."""
        self._service[client] += n_prefill + OUTPUT_WEIGHT * n_output

    def service(self, client: str) -> int:
        """Counted service of an active client."""
        return self._service.get(client, 0)

    def order(self, waiting: Iterable[Request], now_s: float) -> list[Request]:
        """Waiting requests, next first."""
        return sorted(waiting, key=lambda request: self._key(request, now_s))

    def victim(self, running: Iterable[Request]) -> Request:
        """The running request to take off when cells run out: of the lowest lane, the youngest."""
        return max(running, key=lambda request: (_RANK[request.lane], request.arrived_at_s, request.id))

    def _key(self, request: Request, now_s: float) -> tuple[int, int, float, int]:
        waited_s = now_s - request.arrived_at_s
        if waited_s >= STARVED_S:
            return -1, 0, request.arrived_at_s, request.id
        rank = max(0, _RANK[request.lane] - int(waited_s / AGING_S))
        return rank, self._service[request.client], request.arrived_at_s, request.id
