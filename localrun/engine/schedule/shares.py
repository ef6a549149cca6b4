"""How the prompts of a step share its prompt rows. Pure.

The rows are divided between ranks by weight, in a rank equally between clients, and of a client's requests the one with
the least to do comes first, but for a quarter that all of them share; what one does not need goes to the others. So a
short prompt never queues behind a long one nor stops it, a client gets no more by asking twice, and a lower lane is
slowed down but not stopped. Equal prompts are done one after another: in equal shares they would all be done last.

Shares are cut to whole granules where that leaves somebody else the rest: a backend with separate streams computes
equally long pieces together and what sticks out on its own.

Does not: know the budget or the cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

GRANULE_ROWS = 16
# By rank from 0 on: half as much for each lane further down. What starved has the highest lane's weight.
_WEIGHTS = (4, 2, 1)
# One part in so many of a client's rows is for all its prompts alike.
_SHARED_PART = 4
# Who wants more than this is never done in a step or two, and must not wait for all who want less.
_LONG_ROWS = 4 * GRANULE_ROWS


class Want(NamedTuple):
    """Rows that a prompt could use now, for whom, and of what rank (see `policy.py`)."""

    n_rows: int
    client: str
    rank: int


def divide(wants: Sequence[Want], room: int) -> list[int]:
    """A share of `room` for each; in sum all of it, or all that is wanted."""
    if len(wants) < 2:
        return [max(0, min(want.n_rows, room)) for want in wants]
    shares = [0] * len(wants)
    ranks: dict[int, dict[str, list[int]]] = {}
    for index, want in enumerate(wants):
        ranks.setdefault(max(0, want.rank), {}).setdefault(want.client, []).append(index)
    by_rank = [[sum(wants[index].n_rows for index in own) for own in clients.values()] for clients in ranks.values()]
    rank_rooms = _fill([sum(rows) for rows in by_rank], [_WEIGHTS[rank] for rank in ranks], max(0, room))
    for clients, client_rows, rank_room in zip(ranks.values(), by_rank, rank_rooms, strict=True):
        client_rooms = _fill(client_rows, [1] * len(clients), rank_room)
        for own, client_room in zip(clients.values(), client_rooms, strict=True):
            rows = _shortest_first([wants[index].n_rows for index in own], client_room)
            for index, n_rows in zip(own, rows, strict=True):
                shares[index] = n_rows
    return _in_granules(wants, shares)


def _fill(wants: list[int], weights: list[int], room: int) -> list[int]:
    """Shares in proportion to the weights, as far as the wants allow; in sum min(room, sum(wants))."""
    shares = [0] * len(wants)
    weight_left = sum(weights)
    for index in sorted(range(len(wants)), key=lambda index: wants[index] / weights[index]):
        shares[index] = min(wants[index], room * weights[index] // weight_left)
        room -= shares[index]
        weight_left -= weights[index]
    return shares


def _shortest_first(wants: list[int], room: int) -> list[int]:
    """Shares of one client's requests; in sum min(room, sum(wants)). Everybody gets a granule, or nobody who need not:
    a backend with separate streams makes a pass of its own for every other length."""
    shares = [0] * len(wants)
    if room // _SHARED_PART >= GRANULE_ROWS * len(wants):
        shares = _fill(wants, [1] * len(wants), room // _SHARED_PART)
    elif len(wants) > 1 and max(wants) > _LONG_ROWS:
        shares[wants.index(max(wants))] = min(GRANULE_ROWS, room)
    left = min(room, sum(wants)) - sum(shares)
    for index in sorted(range(len(wants)), key=wants.__getitem__):
        more = min(wants[index] - shares[index], left)
        shares[index] += more
        left -= more
    return shares


def _in_granules(wants: Sequence[Want], shares: list[int]) -> list[int]:
    """Cuts what sticks out of whole granules and deals it again, a granule each, the smallest share first."""
    cut = [i for i, share in enumerate(shares) if GRANULE_ROWS <= share < wants[i].n_rows]
    spare = 0
    for index in cut:
        spare += shares[index] % GRANULE_ROWS
        shares[index] -= shares[index] % GRANULE_ROWS
    for index in sorted(cut, key=shares.__getitem__):
        more = min(spare, GRANULE_ROWS, wants[index].n_rows - shares[index])
        shares[index] += more
        spare -= more
    return shares
