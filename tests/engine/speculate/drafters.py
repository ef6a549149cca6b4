"""Drafters and choices for tests: right, wrong and random ones, over the fake backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from localrun.engine.request import Request
from localrun.engine.speculate.choice import DraftChoice, DraftLimits, DraftPolicy, DraftStream, RowCosts
from localrun.engine.speculate.speculation import Speculation
from localrun.wire import DraftSource
from tests.fakes.backend import FakeBackend
from tests.fakes.tokens import digest_after, next_token


class Oracle:
    """Drafts what the fake would say, with as many mistakes as it is told to: `share_right` of its tokens are."""

    source = DraftSource.DRAFT_MODEL
    n_most = 15

    def __init__(self, seed: int, share_right: float) -> None:
        self._random = Random(seed)
        self._share_right = share_right
        self.n_calls = 0

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        self.n_calls += 1
        return [self._draft(request, n_tokens) for request, n_tokens in wanted]

    def _draft(self, request: Request, n_tokens: int) -> list[int]:
        digest = 0
        for token in request.tokens:
            digest = digest_after(digest, token)
        draft: list[int] = []
        for _ in range(self._random.randint(0, n_tokens)):
            token = next_token(digest, ignore_eos=not request.ends_at_eog)
            digest = digest_after(digest, token)
            draft.append(token if self._random.random() < self._share_right else self._random.randrange(258))
        return draft

    def decoded(self, n_rows: int) -> None:
        pass

    def drop(self, request: Request) -> None:
        pass

    def close(self) -> None:
        pass


def always(choose: Callable[[Sequence[DraftStream], RowCosts, DraftLimits], DraftChoice | None]) -> DraftPolicy:
    """This choice, in every step."""
    return DraftPolicy(may_pay=lambda *_, **__: True, choose=choose)


def any_rows(seed: int) -> DraftPolicy:
    """A choice at random within the limits, whatever it costs."""
    random = Random(seed)

    def choose(streams: Sequence[DraftStream], costs: RowCosts, limits: DraftLimits) -> DraftChoice | None:
        n_left, n_rows = limits.most_rows, []
        for _ in streams:
            n_rows.append(random.randint(0, min(limits.most_each, n_left)))
            n_left -= n_rows[-1]
        return DraftChoice(tuple(n_rows), 1.5, 1.0)

    return always(choose)


def drafting(seed: int, share_right: float) -> Callable[[FakeBackend, Callable[[], float]], Speculation]:
    """For a `Harness`: an oracle whose drafts get any number of rows."""
    oracle = Oracle(seed, share_right)
    return lambda backend, clock: Speculation(backend, clock, drafter_of=lambda request: oracle, policy=any_rows(seed))
