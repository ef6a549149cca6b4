"""Writes what was granted into the rows of a batch. Pure, but for the batch.

Does not: decide who gets how many rows (`scheduler.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from localrun.engine.backend import Batch
from localrun.engine.schedule.scheduler import Grant


def fill(batch: Batch, grants: Sequence[Grant], *, wants_logits: bool = True) -> list[int]:
    """The rows of `grants`, one after another from row 0. Returns the sequence of each row.

    With `wants_logits` the last row of a request that catches up with it wants its logits.
    """
    row, rows = 0, []
    for request, n_tokens in grants:
        end, first = row + n_tokens, request.n_computed
        assert request.seq is not None
        batch.token[row:end] = request.tokens[first : first + n_tokens]
        batch.pos[row:end] = range(first, first + n_tokens)
        batch.seq[row:end] = request.seq
        batch.wants_logits[row:end] = 0
        batch.wants_logits[end - 1] = wants_logits and n_tokens == request.n_pending
        rows += [request.seq] * n_tokens
        row = end
    return rows
