"""Buckets: what is let in, when, and what is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.access.keys import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, TOKENS, Key, Limit
from localrun.access.quotas import Bucket, Quota
from localrun.errors import RateLimited


def key(*limits: Limit, n_concurrent: int = 0) -> Key:
    return Key(
        id="a", name="zed", salt=b"", hash=b"", check=b"", created_at_s=0.0, limits=limits, n_concurrent=n_concurrent
    )


def test_requests_fill_up_again_one_by_one() -> None:
    quota = Quota(key(Limit(REQUESTS, 60, 60.0)), 0.0)
    for _ in range(60):
        quota.admit(0.0)
    with pytest.raises(RateLimited, match="60/min") as refused:
        quota.admit(0.25)
    assert refused.value.retry_after_s == pytest.approx(0.75)
    assert refused.value.kind == REQUESTS
    quota.admit(1.0)
    with pytest.raises(RateLimited):
        quota.admit(1.0)


def test_a_refusal_takes_nothing() -> None:
    quota = Quota(key(Limit(REQUESTS, 2, 60.0), Limit(TOKENS, 10, 60.0)), 0.0)
    quota.admit(0.0)
    quota.use(8, 20, 0.0)
    for _ in range(5):
        with pytest.raises(RateLimited, match="tokens") as refused:
            quota.admit(0.0)
    assert refused.value.retry_after_s == pytest.approx((1 + 18) * 6)
    assert quota.standings(0.0)[REQUESTS].remaining == 1


def test_tokens_by_kind() -> None:
    quota = Quota(key(Limit(TOKENS, 100, 60.0), Limit(PROMPT_TOKENS, 50, 60.0), Limit(OUTPUT_TOKENS, 50, 60.0)), 0.0)
    quota.admit(0.0)
    quota.use(30, 10, 0.0)
    left = quota.standings(0.0)
    assert [left[kind].remaining for kind in (TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS)] == [60, 20, 40]


def test_the_tightest_of_several_times_is_shown() -> None:
    quota = Quota(key(Limit(REQUESTS, 10, 1.0), Limit(REQUESTS, 20, 86400.0)), 0.0)
    for second in range(15):
        quota.admit(float(second))
    standing = quota.standings(15.0)[REQUESTS]
    assert (standing.limit.amount, standing.remaining) == (20, 5)


def test_as_many_run_at_once_as_may() -> None:
    quota = Quota(key(n_concurrent=2), 0.0)
    quota.admit(0.0)
    quota.admit(0.0)
    with pytest.raises(RateLimited, match="2 requests running"):
        quota.admit(0.0)
    quota.leave()
    quota.admit(0.0)


def test_what_was_written_down_counts_after_a_restart() -> None:
    limits = (Limit(REQUESTS, 10, 100.0), Limit(TOKENS, 100, 100.0))
    before = Quota(key(*limits), 0.0)
    for _ in range(10):
        before.admit(0.0)
    before.use(90, 30, 0.0)
    after = Quota(key(*limits), 20.0, before.levels())
    standings = after.standings(20.0)
    assert (standings[REQUESTS].remaining, standings[TOKENS].remaining) == (2, 0)
    # A clock that was set back gives nothing away.
    assert Quota(key(*limits), -50.0, before.levels()).standings(-50.0)[REQUESTS].remaining == 0


def test_other_limits_keep_the_level() -> None:
    quota = Quota(key(Limit(REQUESTS, 10, 60.0)), 0.0)
    for _ in range(8):
        quota.admit(0.0)
    quota.follow(key(Limit(REQUESTS, 20, 60.0)), 0.0)
    assert quota.standings(0.0)[REQUESTS].remaining == 2
    quota.follow(key(Limit(REQUESTS, 1, 60.0)), 0.0)
    quota.admit(0.0)
    with pytest.raises(RateLimited):
        quota.admit(0.0)


@given(
    st.integers(1, 1000),
    st.sampled_from([1.0, 60.0, 86400.0]),
    st.lists(st.tuples(st.floats(0, 1000), st.integers(0, 50)), max_size=60),
)
def test_nobody_takes_more_than_a_bucket_and_what_it_got(
    amount: int, per_s: float, asked: list[tuple[float, int]]
) -> None:
    bucket = Bucket(Limit(TOKENS, amount, per_s), 0.0)
    now_s, taken = 0.0, 0
    for pause_s, wanted in asked:
        now_s += pause_s
        if bucket.fill(now_s) >= wanted:
            bucket.take(wanted)
            taken += wanted
        assert bucket.level <= amount
        assert taken <= amount * (1 + now_s / per_s) + 1e-6 * max(1, taken)
        assert bucket.wait_s(now_s) == 0 or bucket.level < 1
