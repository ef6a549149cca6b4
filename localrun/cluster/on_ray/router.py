"""Serve's choice of a replica, for whoever asks through a handle: by the rule of `affinity.py`, among those that Serve
knows to live and to take requests, as soon as its controller does.

What the prompt costs at each replica the door says, which sees every step of what it has there and knows where the
prompt's beginning was computed; so a router remembers nothing, and one that is new chooses as any other. Nothing is
sent to a replica for it, and no slot is held: whoever chose connects by itself, and replicas that are to end wait for
what runs there (`serve_app.py`).

Serve takes the class to other processes by value. Does not: ask anybody, or wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from localrun.cluster.affinity import Cost, Digest, pick


class PrefixRouter(RequestRouter):  # type: ignore[misc] # Ray's classes have no types
    """See the module. What is called without a prompt may go anywhere."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        asked = {} if pending_request is None else pending_request.kwargs
        there = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        costs = {name: cost for name, cost in asked.get("costs", {}).items() if name in there}
        if not costs:
            return [candidate_replicas]
        chosen = pick(asked["first"], costs)
        return [[there[chosen]], [there[name] for name in costs if name != chosen]]


async def choose(handle: Any, first: Digest, costs: Mapping[str, Cost]) -> str:
    """Which replica computes a prompt that begins with this block. Raises what handles raise."""
    async with handle.choose_replica(first=first, costs=costs, _reserve=False) as chosen:
        return str(chosen.replica_id)
