"""One embedding request inside the engine: its inputs, how far they are, and what they became. Pure.

Inputs are tokenized one by one, when their turn comes: a request of a thousand texts holds nobody up before it has
begun, and one that is cancelled has cost nothing more.

Invariant: `current` is set exactly while an input is partly computed or about to be; `seq` while it is partly computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from localrun.engine.embedding.embedder import FloatVector
from localrun.engine.embedding.inputs import Tokens
from localrun.wire import Embed, Pooling, Usage

# For predictions and for what people see before the tokens are counted: English text has about four.
_CHARACTERS_PER_TOKEN = 4


@dataclass
class Current:
    """The input at hand: `n_computed` of its tokens are done; `vector` is what they were pooled to so far."""

    index: int
    tokens: list[int]
    n_cut: int
    n_computed: int = 0
    vector: FloatVector | None = None

    @property
    def n_left(self) -> int:
        return len(self.tokens) - self.n_computed

    def take(self, vector: FloatVector, n_rows: int, pooling: Pooling) -> None:
        """What the next `n_rows` tokens were pooled to. A mean of parts is weighed by their lengths; else the first
        part counts, or the last one."""
        if self.vector is None or pooling in (Pooling.LAST, Pooling.RANK):
            self.vector = vector
        elif pooling is Pooling.MEAN:
            share = np.float32(n_rows / (self.n_computed + n_rows))
            self.vector = self.vector + (vector - self.vector) * share
        self.n_computed += n_rows


@dataclass(eq=False)
class Ticket:
    """See the module. Times are seconds of the monotonic clock."""

    embed: Embed
    n_begun: int = 0
    n_computed: int = 0
    current: Current | None = None
    seq: int | None = None
    n_done: int = 0
    served_at_s: float | None = None
    started_at_s: float | None = None

    @property
    def id(self) -> int:
        return self.embed.id

    @property
    def has_more(self) -> bool:
        """Whether there is an input that was not begun."""
        return self.n_begun < len(self.embed.inputs)

    @property
    def is_done(self) -> bool:
        return self.n_done == len(self.embed.inputs)

    def next_input(self, tokens_of: Callable[[Embed, int], Tokens]) -> Current:
        """The input to go on with; tokenizes one if none is at hand. Raises what `tokens_of` raises."""
        if self.current is None:
            tokens, n_cut = tokens_of(self.embed, self.n_begun)
            self.current = Current(self.n_begun, tokens, n_cut)
            self.n_begun += 1
        return self.current

    @cached_property
    def about_tokens(self) -> int:
        """About how many tokens it has in all."""
        query = len(self.embed.query or "")
        return sum(
            1 + (len(one) if isinstance(one, tuple) else (query + len(one)) // _CHARACTERS_PER_TOKEN)
            for one in self.embed.inputs
        )

    @property
    def about_left(self) -> int:
        """About how many of them are to be computed, by the share of its inputs that is done."""
        n_inputs = len(self.embed.inputs)
        return self.about_tokens * (n_inputs - self.n_done) // n_inputs

    def usage(self, now_s: float) -> Usage:
        """Counts and times so far."""
        started = self.started_at_s if self.started_at_s is not None else now_s
        return Usage(
            n_prompt=self.n_computed,
            n_cached=0,
            n_output=0,
            queued_s=max(0.0, started - self.embed.arrived_at_s),
            prefill_s=max(0.0, now_s - started),
            decode_s=0.0,
        )
