"""Which draft models are loaded, for whom, and what happens meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from localrun.engine.request import Request
from localrun.engine.speculate.draft_model import DraftModels
from localrun.errors import BadModelFile
from localrun.wire import DraftSource
from tests.engine.speculate.fake_draft import request_of
from tests.fakes.backend import FakeBackend

TIMEOUT_S = 60


class FakeDrafter:
    """Every draft is a token of its own."""

    source, n_most = DraftSource.DRAFT_MODEL, 7

    def __init__(self, token: int) -> None:
        self.token = token
        self.dropped: list[Request] = []
        self.is_closed = False

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        assert not self.is_closed
        return [[self.token] * n_tokens for _, n_tokens in wanted]

    def decoded(self, n_rows: int) -> None: ...

    def drop(self, request: Request) -> None:
        self.dropped.append(request)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class Models:
    """Draft models named by digits. Loading one takes until it may end; "bad" cannot be loaded."""

    def __init__(self, own: str = "", *, is_slow: bool = False) -> None:
        self.opened: dict[str, FakeDrafter] = {}
        self.n_opened = 0
        self.may_end = threading.Event()
        if not is_slow:
            self.may_end.set()
        self.drafts = DraftModels(self._open, own)
        self._backend = FakeBackend(n_cells=8, n_seqs=1, n_batch=8)

    def _open(self, path: str, is_wanted: Callable[[], bool]) -> FakeDrafter:
        self.n_opened += 1
        while not self.may_end.wait(0.001):
            if not is_wanted():
                raise BadModelFile("not wanted any more")
        if path == "bad":
            raise BadModelFile("it is bad")
        self.opened[path] = FakeDrafter(int(path))
        return self.opened[path]

    def request(self, path: str = "") -> Request:
        request = request_of(self._backend, 1, [1])
        request.draft_model_path = path
        return request

    def proposed(self, *requests: Request) -> list[list[int]]:
        """What is proposed once what is being loaded is there."""
        if self.drafts._loading is not None:
            self.drafts._loading[1].exception(TIMEOUT_S)
        return self.drafts.propose([(request, 2) for request in requests])


def test_without_a_draft_model_there_are_no_drafts():
    models = Models()
    request = models.request()
    assert models.drafts.drafter_for(request) is None
    assert models.proposed(request) == [[]]
    models.drafts.close()


def test_the_engines_own_is_there_at_once():
    models = Models("1")
    assert models.proposed(models.request(), models.request("1")) == [[1, 1], [1, 1]]
    models.drafts.close()
    assert models.opened["1"].is_closed


def test_an_own_one_that_cannot_be_loaded_is_an_error():
    with pytest.raises(BadModelFile, match="it is bad"):
        Models("bad")


def test_a_named_one_is_loaded_beside_the_steps():
    models = Models("1")
    models.may_end.clear()
    own, other = models.request(), models.request("2")
    for _ in range(3):
        assert models.drafts.propose([(own, 2), (other, 2)]) == [[1, 1], []]
    models.may_end.set()
    assert models.proposed(other, own, other) == [[2, 2], [1, 1], [2, 2]]
    assert models.n_opened == 2
    models.drafts.close()
    assert models.opened["1"].is_closed
    assert models.opened["2"].is_closed


def test_another_one_waits_until_nobody_uses_the_first():
    models = Models()
    first, second, other = models.request("2"), models.request("2"), models.request("3")
    models.proposed(first)
    assert models.proposed(first, second, other) == [[2, 2], [2, 2], []]
    models.drafts.drop(first)
    assert models.proposed(second, other) == [[2, 2], []]
    models.drafts.drop(second)
    assert models.opened["2"].dropped == [first, second]
    assert models.proposed(other) == [[]]
    assert models.proposed(other) == [[3, 3]]
    assert models.opened["2"].is_closed
    models.drafts.close()


def test_one_that_nobody_uses_stays_until_another_is_named():
    models = Models()
    first = models.request("2")
    models.proposed(first)
    models.proposed(first)
    models.drafts.drop(first)
    assert models.proposed(models.request("2")) == [[2, 2]]
    assert models.n_opened == 1
    models.drafts.close()


def test_one_that_cannot_be_loaded_is_logged_once(caplog: pytest.LogCaptureFixture):
    models = Models("1")
    own, other, third = models.request(), models.request("bad"), models.request("3")
    assert models.drafts.drafter_for(other) is models.drafts
    for _ in range(3):
        assert models.proposed(own, other) == [[1, 1], []]
    assert models.drafts.drafter_for(own) is models.drafts
    assert models.drafts.drafter_for(other) is None
    assert not models.drafts._users
    assert [record.message for record in caplog.records] == [
        "requests that name the draft model bad go on without drafts: it is bad"
    ]
    models.proposed(other, third)
    assert models.proposed(other, third) == [[], [3, 3]]
    assert models.n_opened == 3
    models.drafts.close()


def test_closing_ends_what_is_being_loaded(caplog: pytest.LogCaptureFixture):
    models = Models(is_slow=True)
    models.drafts.propose([(models.request("2"), 2)])
    models.drafts.close()
    assert models.opened == {}
    assert not caplog.records
