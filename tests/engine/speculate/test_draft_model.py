"""What a draft model holds, reads and says, on one without weights whose every stale cell shows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.request import Request
from localrun.engine.speculate.draft_model import MOST_TOKENS, DraftModel
from tests.engine.speculate.fake_draft import FakeDraftContext, check_books, expected, request_of
from tests.fakes.tokens import IM_END


class Clock:
    """Each look at it takes so long."""

    def __init__(self, tick_s: float = 0.001) -> None:
        self.now_s, self.tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


class Drafts:
    """A draft model, and requests that it drafts for."""

    def __init__(self, tick_s: float = 0.001, **given: int | float) -> None:
        self.context = FakeDraftContext(**given)  # type: ignore[arg-type]
        self.model = DraftModel(self.context, Clock(tick_s))
        self.n_requests = 0

    def request(self, tokens: list[int]) -> Request:
        self.n_requests += 1
        return request_of(self.context.backend, self.n_requests, tokens)

    def propose(self, *wanted: tuple[Request, int]) -> list[list[int]]:
        drafts = self.model.propose(wanted)
        check_books(self.model)
        held = [sequence.tokens for sequence in self.model._sequences]
        cells = [self.context.backend.tokens_of(seq) for seq in range(self.context.n_seqs)]
        assert [[token % 258 for token in tokens] for tokens in held] == cells
        for (request, n_most), draft in zip(wanted, drafts, strict=True):
            assert draft == expected(request.tokens, n_most)[: len(draft)]
        return drafts

    def says(self, request: Request, n_most: int = 3) -> bool:
        """Whether a request has all that it wants in the next call."""
        return self.propose((request, n_most)) == [expected(request.tokens, n_most)]


def prompt(number: int, length: int) -> list[int]:
    """Tokens that no other number has, and an answer that does not end soon."""
    draw = random.Random(number)
    while True:
        tokens = [draw.randrange(97, 123) for _ in range(length)]
        if IM_END not in expected(tokens, 40):
            return tokens


def test_a_draft_is_what_the_model_says_token_by_token():
    drafts = Drafts()
    request = drafts.request(prompt(1, 10))
    assert drafts.says(request, 5)
    assert drafts.context.n_rows == [10, 1, 1, 1, 1]


def test_a_draft_has_no_more_tokens_than_the_most():
    drafts = Drafts()
    assert [len(draft) for draft in drafts.propose((drafts.request(prompt(1, 10)), 40))] == [MOST_TOKENS]


def test_accepted_tokens_are_not_read_again():
    drafts = Drafts()
    request = drafts.request(prompt(1, 10))
    (draft,) = drafts.propose((request, 3))
    request.tokens += draft
    request.tokens += expected(request.tokens, 1)
    drafts.context.n_rows.clear()
    assert drafts.says(request)
    # The last token of the draft, which nobody read, and the one that the model added.
    assert drafts.context.n_rows == [2, 1, 1]


def test_what_the_model_chose_otherwise_replaces_the_draft():
    drafts = Drafts()
    request = drafts.request(prompt(1, 10))
    (draft,) = drafts.propose((request, 3))
    request.tokens += [draft[0], draft[1] + 1]
    drafts.context.n_rows.clear()
    assert drafts.says(request)
    assert drafts.context.n_rows == [1, 1, 1]


def test_all_requests_share_each_decode():
    drafts = Drafts()
    requests = [drafts.request(prompt(number, 10)) for number in range(4)]
    assert [len(draft) for draft in drafts.propose(*zip(requests, (3, 1, 2, 3), strict=True))] == [3, 1, 2, 3]
    assert drafts.context.n_rows == [40, 3, 2]


def test_asked_twice_it_says_the_same():
    drafts = Drafts()
    request = drafts.request(prompt(1, 10))
    assert drafts.says(request)
    assert drafts.says(request)


def test_a_draft_ends_with_the_token_that_ends_an_answer():
    drafts = Drafts()
    tokens = next(tokens for number in range(10_000) if IM_END in expected(tokens := [97, 98, *divmod(number, 97)], 5))
    (draft,) = drafts.propose((drafts.request(tokens), 7))
    assert draft[-1] == IM_END


@pytest.mark.parametrize(("probability", "n_tokens"), [(1.0, 7), (0.5, 3), (0.01, 1)])
def test_a_draft_ends_where_it_would_hardly_be_right(probability: float, n_tokens: int):
    drafts = Drafts(probability=probability)
    assert [len(draft) for draft in drafts.propose((drafts.request(prompt(1, 10)), 7))] == [n_tokens]


def test_tokens_of_the_other_model_alone_are_neither_said_nor_read():
    drafts = Drafts()
    drafts.context.n_vocab = 100
    request = drafts.request([*prompt(1, 10), 250])
    (draft,) = drafts.model.propose([(request, 7)])
    (whole,) = [expected(request.tokens, 7, n_vocab=100)]
    known = next((at for at, token in enumerate(whole) if token >= 100), len(whole))
    assert draft == whole[:known]


# --- catching up ---------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_caught_up_with_over_several_calls_while_others_draft():
    drafts = Drafts(n_batch=16)
    quick, slow = drafts.request(prompt(1, 8)), drafts.request(prompt(2, 100))
    n_calls = 0
    while True:
        first, second = drafts.propose((quick, 2), (slow, 2))
        n_calls += 1
        assert len(first) == 2
        if second:
            break
        quick.tokens += first
    assert n_calls == 7  # of 16 rows
    assert max(drafts.context.n_rows) <= 16


def test_one_that_wants_nothing_catches_up():
    drafts = Drafts()
    request = drafts.request(prompt(1, 30))
    assert drafts.propose((request, 0)) == [[]]
    drafts.context.n_rows.clear()
    assert drafts.says(request)
    assert drafts.context.n_rows[0] == 1


@pytest.mark.parametrize(("row_s", "n_rows"), [(0.01, 64), (0.0002, 128), (0.00001, 512)])
def test_catching_up_takes_as_many_tiles_of_rows_as_there_is_time_for(row_s: float, n_rows: int):
    drafts = Drafts(n_cells=8192, n_ctx=8192, n_batch=512)
    clock = drafts.model._clock
    decode = drafts.context.decode

    def slow_decode(n_rows: int) -> None:
        decode(n_rows)
        clock.now_s += n_rows * row_s  # type: ignore[attr-defined]

    drafts.context.decode = slow_decode  # type: ignore[method-assign]
    request = drafts.request(prompt(1, 6000))
    for _ in range(14):
        drafts.propose((request, 1))
    assert drafts.context.n_rows[0] == 64
    assert set(drafts.context.n_rows[8:14]) == {n_rows}


# --- sequences and cells ------------------------------------------------------------------------------------------


def test_of_more_requests_than_sequences_the_least_recently_used_gives_way():
    drafts = Drafts(n_seqs=2)
    first, second, third = (drafts.request(prompt(number, 10)) for number in range(3))
    drafts.propose((first, 2))
    drafts.propose((second, 2))
    assert drafts.says(third)
    assert set(drafts.model._of) == {second, third}
    assert drafts.says(first)
    assert set(drafts.model._of) == {first, third}


def test_nobody_gives_way_who_drafts_in_the_same_call():
    drafts = Drafts(n_seqs=2)
    requests = [drafts.request(prompt(number, 10)) for number in range(3)]
    assert [len(draft) for draft in drafts.propose(*((request, 2) for request in requests))] == [2, 2, 0]


def test_the_next_turn_of_a_conversation_has_little_to_catch_up_with():
    drafts = Drafts()
    request, other = drafts.request(prompt(1, 30)), drafts.request(prompt(2, 30))
    drafts.propose((request, 3), (other, 3))
    drafts.model.drop(request)
    drafts.context.n_rows.clear()
    assert drafts.says(drafts.request([*request.tokens, 97, 98]))
    assert drafts.context.n_rows[0] == 2


def test_a_common_beginning_costs_no_longer_conversation():
    drafts = Drafts()
    tokens = prompt(1, 50)
    request = drafts.request(tokens)
    drafts.propose((request, 3))
    drafts.model.drop(request)
    assert drafts.says(drafts.request([*tokens[:10], 97]))
    assert tokens in [sequence.tokens[:50] for sequence in drafts.model._sequences]


def test_a_request_beyond_the_context_has_no_drafts_and_gives_its_sequence_back():
    drafts = Drafts(n_ctx=16)
    request = drafts.request(prompt(1, 14))
    assert [len(draft) for draft in drafts.propose((request, 7))] == [3]  # two more in cells, and one that is not
    request.tokens += [97] * 3
    assert drafts.propose((request, 7)) == [[]]
    assert not drafts.model._of


def test_where_cells_are_short_those_who_left_give_theirs_first():
    drafts = Drafts(n_cells=64, n_ctx=64)
    left, waiting, wanting = (drafts.request(prompt(number, 25)) for number in range(3))
    drafts.propose((left, 1))
    drafts.model.drop(left)
    drafts.propose((waiting, 1))
    assert drafts.says(wanting)
    assert [len(sequence.tokens) for sequence in drafts.model._sequences][:2] == [0, 25]


def test_without_a_free_cell_there_is_no_draft():
    drafts = Drafts(n_cells=32, n_ctx=64)
    first, second = drafts.request(prompt(1, 20)), drafts.request(prompt(2, 20))
    assert [len(draft) for draft in drafts.propose((first, 3), (second, 3))] == [1, 0]


def test_a_failure_ends_the_drafts_and_nothing_else(caplog: pytest.LogCaptureFixture):
    drafts = Drafts()
    request = drafts.request(prompt(1, 10))
    drafts.context.fails = True
    assert drafts.model.propose([(request, 3)]) == [[]]
    drafts.context.fails = False
    assert drafts.model.propose([(request, 3)]) == [[]]
    assert [record.message for record in caplog.records] == ["the draft model failed; there are no more drafts of it"]
    drafts.model.drop(request)
    drafts.model.close()
    assert drafts.context.is_closed


# --- anything ------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    n_seqs=st.integers(1, 4), n_batch=st.integers(4, 48), n_ctx=st.integers(8, 90), is_split=st.booleans(),
    n_cells=st.integers(60, 240), seed=st.integers(0, 1 << 30), n_steps=st.integers(1, 40),
)  # fmt: skip
def test_whatever_is_accepted_cancelled_or_left_out_every_draft_is_of_the_request_as_it_is(
    n_seqs: int, n_batch: int, n_ctx: int, is_split: bool, n_cells: int, seed: int, n_steps: int
):
    draw = random.Random(seed)
    is_split = is_split and n_seqs > 1
    n_ctx = min(n_ctx, n_cells // n_seqs) if is_split else n_ctx
    drafts = Drafts(n_cells=n_cells, n_seqs=n_seqs, n_batch=n_batch, n_ctx=n_ctx, n_slots=n_seqs if is_split else 0)
    requests: list[Request] = []
    for _ in range(n_steps):
        if len(requests) < 6 and draw.random() < 0.5:
            tokens = [draw.randrange(97, 100) for _ in range(draw.randrange(1, 60))]
            shared = draw.choice(requests).tokens if requests and draw.random() < 0.5 else []
            requests.append(drafts.request([*shared, *tokens]))
        wanted = [(request, draw.randrange(0, 9)) for request in requests if draw.random() < 0.8]
        for (request, _), draft in zip(wanted, drafts.propose(*wanted), strict=True):
            request.tokens += draft[: draw.randrange(0, len(draft) + 1)]
            request.tokens.append(draw.randrange(0, 258) if draw.random() < 0.5 else expected(request.tokens, 1)[0])
        for request in list(requests):
            if draw.random() < 0.1:
                drafts.model.drop(request)
                requests.remove(request)
