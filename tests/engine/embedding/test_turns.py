"""The order of a step's inputs against a plain look at all tickets, and what a step and a submit cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.engine.embedding import engine as embedding_engine
from localrun.engine.embedding.engine import MOST_UNFIT
from localrun.engine.embedding.turns import EmbeddingQueue, EmbeddingRequest, StepOrder
from localrun.engine.schedule.policy import AGING_S, STARVED_S, Policy
from localrun.wire import Embed, Lane
from tests.engine.embedding.test_engine import Harness

NOW_S = 100.0

tickets = st.builds(
    lambda at, client, lane, age_s, served_age_s, n_computed, n_inputs: EmbeddingRequest(
        Embed(id=at, inputs=("x",) * n_inputs, client=client, lane=lane, arrived_at_s=NOW_S - age_s),
        n_computed=n_computed,
        served_at_s=None if served_age_s is None else NOW_S - served_age_s,
    ),
    st.integers(0, 10**6),
    st.sampled_from("abc"),
    st.sampled_from(list(Lane)),
    st.sampled_from([0.0, 1.0, AGING_S, STARVED_S]),
    st.sampled_from([None, 0.0, AGING_S]),
    st.integers(0, 3),
    st.integers(0, 4),
)


def plainly_next(turns: EmbeddingQueue, passed_over: set[EmbeddingRequest]) -> EmbeddingRequest | None:
    def key(ticket: EmbeddingRequest) -> tuple[int, int, int, float, int]:
        embed = ticket.embed
        return (
            turns.rank(ticket, NOW_S), turns.service(embed.client), ticket.n_computed, embed.arrived_at_s, ticket.id
        )  # fmt: skip

    return min(
        (one for one in turns.tickets.values() if one.has_more and one not in passed_over), key=key, default=None
    )


@given(entered=st.lists(tickets, max_size=12, unique_by=lambda ticket: ticket.id), rows=st.lists(st.integers(0, 9)))
def test_each_turn_goes_to_who_is_first_of_all(entered: list[EmbeddingRequest], rows: list[int]):
    """A turn of 0 rows passes a ticket over."""
    turns = EmbeddingQueue(max_tickets=99)
    for ticket in entered:
        turns.enter(ticket)
    this_round, passed_over = turns.round(NOW_S), set[EmbeddingRequest]()
    for n_rows in [*rows, *[0] * len(entered)]:
        expected = plainly_next(turns, passed_over)
        assert this_round.next_up() is expected
        if expected is None:
            return
        if not n_rows:
            passed_over.add(expected)
            continue
        turns.charge(expected, n_rows, NOW_S)
        expected.n_begun += 1
        if expected.has_more:
            this_round.put_back(expected)


N_TICKETS, N_INPUTS = 256, 500


class Inputs(tuple[str, ...]):
    """Counts how often somebody goes through all of them."""

    n_read = 0

    def __iter__(self) -> Iterator[str]:
        Inputs.n_read += 1
        return super().__iter__()


@pytest.mark.parametrize("n_clients", [1, 8, N_TICKETS])
def test_a_step_takes_a_few_looks_at_each_ticket_and_a_submit_one_at_its_own_inputs(
    n_clients: int, monkeypatch: pytest.MonkeyPatch
):
    harness = Harness(n_rows=512, n_seqs=64, max_queue=N_TICKETS)
    Inputs.n_read = 0
    harness.submit(0, "something to learn the rate from")
    harness.run()
    for at in range(1, N_TICKETS + 1):
        inputs = Inputs(["six"] * N_INPUTS)
        harness.engine.submit(Embed(id=at, inputs=inputs, client=str(at % n_clients), arrived_at_s=harness.now_s))
    assert Inputs.n_read <= N_TICKETS
    looks = 0

    def counted(function):  # type: ignore[no-untyped-def]
        def wrapper(*arguments: object) -> object:
            nonlocal looks
            looks += 1
            return function(*arguments)

        return wrapper

    monkeypatch.setattr(EmbeddingQueue, "rank", counted(EmbeddingQueue.rank))
    monkeypatch.setattr(Policy, "service", counted(Policy.service))
    harness.engine.step()
    assert len(set(harness.embedder.steps[-1])) == 64
    assert looks <= 2 * N_TICKETS + 8 * 64


def test_a_step_that_is_nearly_full_tokenizes_few_inputs_that_do_not_fit(monkeypatch: pytest.MonkeyPatch):
    harness = Harness(n_rows=64, n_seqs=8, max_queue=64)
    n_tokenized, tokens_of = 0, embedding_engine.inputs.tokens_of

    def counted(*arguments, **options):  # type: ignore[no-untyped-def]
        nonlocal n_tokenized
        n_tokenized += 1
        return tokens_of(*arguments, **options)

    monkeypatch.setattr(embedding_engine.inputs, "tokens_of", counted)
    for at in range(1, 41):
        harness.submit(at, "y" * 40, client=str(at))
    harness.step()
    assert n_tokenized <= 1 + MOST_UNFIT
    harness.run()
    assert len(harness.finals) == 40
    assert n_tokenized == 40


def test_a_round_of_nobody_is_over():
    assert StepOrder(EmbeddingQueue(max_tickets=1), NOW_S).next_up() is None
