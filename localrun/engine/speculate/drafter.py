"""What drafts by computing: a smaller model, or heads of the model itself.

A draft is a guess of the tokens that follow a request's tokens. The next step computes them as rows of their own, and
as many are kept as the request's sampler would have chosen anyway, so a drafter can be wrong but never do harm.

Owner: the engine's main thread. Does not: decide whether a draft is worth its rows (`choice.py`), or verify it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from localrun.engine.request import Request
from localrun.wire import DraftSource


class Drafter(Protocol):
    """See the module. A draft has at most `n_most` tokens."""

    source: DraftSource
    n_most: int

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """At most so many tokens that are likely to follow each request's `tokens`; an empty list where nothing is
        ready. Never holds streams up for much longer than a step: a long prompt is caught up with over several calls.
        """

    def decoded(self, n_rows: int) -> None:
        """The backend has decoded the first rows of its batch, and nothing was sampled from them yet."""

    def drop(self, request: Request) -> None:
        """A request ends or leaves its sequence: what is known of it may be forgotten. Unknown ones are none of its
        concern."""

    def close(self) -> None:
        """Free everything."""
