"""Where whole states are worth saving, and which of them are kept. Pure.

The state of some models (sliding windows, recurrent and hybrid layers) cannot be cut back to a common prefix. It is
therefore saved as a *checkpoint* where a later prompt is likely to continue or to diverge:

* after the first message (the system prompt, which conversations share);
* after the last two messages that the prompt holds (an edited or dropped answer);
* where it diverges from an earlier prompt (a third prompt may share that prefix too);
* after its last picture or recording (another question about it);
* before its last token (the same prompt again);
* at the end of the request (the next turn).

A step ends exactly at a checkpoint. No checkpoint is made where computing the tokens since the previous one is faster
than the copy. For each conversation, the first checkpoint is kept, the last few, and those from which several requests
started.

Does not: save anything (`cache.py`), or decide which checkpoint goes when memory is short (`tiers.py`).
"""

from __future__ import annotations

from bisect import bisect_right, insort

from localrun.engine.cache.tiers import Cost, Tiers
from localrun.engine.cache.tree import Block, PrefixKey

# The least distance between checkpoints, however fast copies are: a step that ends early has a cost, too.
CHECKPOINT_GAP_TOKENS = 32
# Per conversation: the first, and the longest ones (its end, the last prompt, the message before).
KEPT_CHECKPOINTS = 4
# The next turn of a conversation starts from its last state once. A state with more starts is a fork.
FORK_STARTS = 2


class Checkpoints:
    """See the module. `save` and `restore` are the cost of one state, however long."""

    def __init__(self, tiers: Tiers, eog_tokens: frozenset[int]) -> None:
        self.save, self.restore = Cost(), Cost()
        self._tiers = tiers
        self._eog_tokens = eog_tokens

    def pays(self, start: int, end: int) -> bool:
        """Whether a checkpoint at `end` is worth its copies, given one at `start`."""
        if not self._tiers.is_on or end - start < CHECKPOINT_GAP_TOKENS:
            return False
        return self._tiers.recompute_s(start, end - start) >= self.save.seconds + self.restore.seconds

    def stops(self, key: PrefixKey, n_cached: int, n_common: int) -> list[int]:
        """Where to save a state while computing a prompt with `n_cached` tokens in the cache, which shares its first
        `n_common` tokens with an earlier one."""
        last = key.floor(len(key.tokens) - 1)
        ends = [at for at, token in enumerate(key.tokens[:last], 1) if token in self._eog_tokens]
        # Only a few words of the template follow the last message, so one checkpoint there is enough.
        wanted = {*ends[:1], n_common, *(end for end in ends[-2:] if last - end >= CHECKPOINT_GAP_TOKENS), last}
        wanted.update(end for _, end in key.atoms[-1:] if end < last)
        stops: list[int] = []
        for stop in sorted(wanted):
            if self.pays(stops[-1] if stops else n_cached, stop):
                stops.append(stop)
        return stops

    def follow(self, stops: list[int], n_computed: int, n_common: int, n_matched: int) -> bool:
        """Whether a prompt gains by waiting for a running one with which it shares `n_common` tokens, compared with the
        `n_matched` tokens in the cache. Adds a stop where the two diverge, unless one is planned in between."""
        if n_computed >= n_common or not self.pays(n_matched, n_common):
            return False
        if not any(max(n_matched, n_computed) < stop <= n_common for stop in stops):
            insort(stops, n_common)
        return True

    def passed_over(self, start: int, end: int) -> None:
        """No state was saved at `end`, given one at `start`. The costs fade, so that one slow copy does not rule out
        all later ones."""
        if end - start >= CHECKPOINT_GAP_TOKENS:
            self.save.fade()
            self.restore.fade()

    @staticmethod
    def surplus(states: list[Block]) -> list[Block]:
        """The states of one conversation (given shortest first) that need not be kept."""
        return [state for state in states[1 : -KEPT_CHECKPOINTS + 1] if state.n_starts < FORK_STARTS]


def next_stop(stops: list[int], n_computed: int) -> int | None:
    """The first stop behind `n_computed`."""
    at = bisect_right(stops, n_computed)
    return stops[at] if at < len(stops) else None
