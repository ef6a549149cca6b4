"""Who got how much while everybody wanted it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.bench.shares import (
    contended_until_s,
    difference_bound_tokens,
    jain_index,
    lowest_share,
    service_by_client,
    service_tokens,
)
from tests.bench.made_records import made_record

SERVICE = st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1e6), min_size=1)


def test_service_is_the_computed_prompt_and_twice_the_output_so_far() -> None:
    record = made_record(1.0, 2.0, 3.0, 4.0, n_prompt=100, n_cached=60)
    assert service_tokens(record, 0.5) == 0.0
    assert service_tokens(record, 1.0) == 40 + 2 * 1
    assert service_tokens(record, 9.0) == 40 + 2 * 4


def test_a_piece_of_several_tokens_counts_as_these() -> None:
    assert service_tokens(made_record(1.0, 2.0, n_output=10), 1.5) == 2 * 5


def test_of_a_stream_that_was_cut_the_pieces_count() -> None:
    assert service_tokens(made_record(1.0, 2.0, 3.0, n_output=0, problem="cut"), 2.5) == 2 * 2


def test_contention_ends_when_somebody_s_last_request_has_begun() -> None:
    records = [made_record(1.0, 9.0, client="a"), made_record(5.0, 6.0, client="a"), made_record(8.0, client="b")]
    assert contended_until_s(records) == 5.0


def test_a_client_without_any_service_has_no_share() -> None:
    service = service_by_client([made_record(1.0, client="a"), made_record(client="b")], 2.0)
    assert service == {"a": 2.0, "b": 0.0}
    assert lowest_share(service) == 0.0


@given(SERVICE)
def test_shares_lie_between_nothing_and_equal(service: dict[str, float]) -> None:
    assert 0 <= lowest_share(service) <= 1 + 1e-9
    assert 1 / len(service) - 1e-9 <= jain_index(service) <= 1 + 1e-9


@given(st.floats(1, 1e6), st.integers(1, 6))
def test_equal_service_is_fair(tokens: float, n_clients: int) -> None:
    service = dict.fromkeys("abcdef"[:n_clients], tokens)
    assert lowest_share(service) == pytest.approx(1)
    assert jain_index(service) == pytest.approx(1)


def test_one_of_four_that_gets_everything_is_the_worst() -> None:
    service = {"a": 10.0, "b": 0.0, "c": 0.0, "d": 0.0}
    assert (lowest_share(service), jain_index(service)) == (0.0, 0.25)


def test_the_bound_is_twice_a_full_batch_or_a_longer_prompt() -> None:
    assert difference_bound_tokens(n_prompt=200, n_output=64, slots=8) == 2 * 2 * 8 * 264
    assert difference_bound_tokens(n_prompt=5000, n_output=1, slots=0) == 2 * 5000
