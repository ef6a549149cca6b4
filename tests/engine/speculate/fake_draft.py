"""A draft model without weights, that refuses what llama.cpp refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from localrun.engine.backend import DecodeFailed
from localrun.engine.request import Request
from localrun.engine.sample.text import TextStream
from localrun.engine.speculate.draft_model import DraftModel
from localrun.wire import Sampling
from tests.fakes.backend import FakeBackend
from tests.fakes.tokens import digest_after, next_token


class FakeDraftContext:
    """A `DraftContext` whose next token is a hash of what its cells really hold. `fails` at the next decode.

    With `n_slots` each sequence has its share of the cells for itself; without, there is one pool. One token in
    `wrong_one_in` is another one."""

    def __init__(
        self, *, n_cells: int = 256, n_seqs: int = 4, n_batch: int = 64, n_ctx: int = 256, n_slots: int = 0,
        probability: float = 1.0, n_vocab: int = 258, wrong_one_in: int = 0,
    ) -> None:  # fmt: skip
        self.backend = FakeBackend(
            n_cells=n_cells, n_seqs=n_seqs, n_batch=n_batch, n_slots=n_slots, n_draft_rows=0
        )  # fmt: skip
        self.batch, self.n_seqs, self.eog_tokens = self.backend.batch, n_seqs, self.backend.eog_tokens
        self.n_cells, self.n_ctx, self.n_vocab = self.backend.n_cells, n_ctx, n_vocab
        self.probability, self.wrong_one_in = probability, wrong_one_in
        self.n_rows: list[int] = []  # of each decode
        self.fails = self.is_alone = self.is_closed = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        assert not self.is_alone
        self.is_alone = True
        yield
        self.is_alone = False

    def decode(self, n_rows: int) -> None:
        assert self.is_alone, "something else may be computing"
        if self.fails:
            raise DecodeFailed("it fails", is_fatal=True)
        self.backend.decode(n_rows)
        self.n_rows.append(n_rows)
        for seq in range(self.n_seqs):
            assert len(self.backend.tokens_of(seq)) <= self.n_ctx, "beyond the context"

    def likeliest(self, row: int) -> tuple[int, float]:
        digest = self.backend.digests[row]
        is_wrong = self.wrong_one_in and digest % self.wrong_one_in == 0
        return digest % 256 if is_wrong else next_token(digest), self.probability

    def seq_remove(self, seq: int, start: int) -> None:
        assert self.backend.seq_remove(seq, start)

    def close(self) -> None:
        self.is_closed = True


def expected(tokens: list[int], n_most: int, *, n_vocab: int = 258) -> list[int]:
    """What this draft model says after `tokens`, computed anew."""
    digest = 0
    for token in tokens:
        digest = digest_after(digest, token if token < n_vocab else 0)
    draft: list[int] = []
    while len(draft) < n_most:
        draft.append(next_token(digest))
        if draft[-1] in FakeBackend.eog_tokens:
            break
        digest = digest_after(digest, draft[-1])
    return draft


def request_of(backend: FakeBackend, number: int, tokens: list[int]) -> Request:
    """A request that has these tokens so far."""
    sampler = backend.sampler(Sampling(temperature=0), ignore_eos=False)
    return Request(number, list(tokens), len(tokens), 1 << 20, sampler, TextStream(()))


def check_books(model: DraftModel) -> None:
    """Raises AssertionError if what a draft model knows contradicts itself."""
    assert model._of == {one.request: one for one in model._sequences if one.request is not None}
    for request, sequence in model._of.items():
        assert sequence.tokens[: sequence.n_same] == request.tokens[: sequence.n_same]
    assert model._n_held <= model._context.n_cells
