"""The fake must refuse what llama.cpp refuses and notice what it is there to notice."""

from __future__ import annotations

import pytest

from localrun.engine.backend import DecodeFailed, NoRoom
from localrun.wire import Sampling
from tests.engine.harness import expected_output
from tests.fakes.backend import FakeBackend
from tests.fakes.tokens import IM_END, next_token


def backend(n_cells: int = 32) -> FakeBackend:
    return FakeBackend(n_cells=n_cells, n_seqs=4, n_batch=16)


def compute(fake: FakeBackend, seq: int, tokens: list[int], *, start: int = 0) -> int:
    """The token that follows, greedily."""
    count, batch = len(tokens), fake.batch
    batch.token[:count], batch.pos[:count], batch.seq[:count] = tokens, range(start, start + count), seq
    batch.wants_logits[:count] = 0
    batch.wants_logits[count - 1] = 1
    fake.decode(count)
    return fake.sampler(Sampling(temperature=0), ignore_eos=True).sample(count - 1)


def test_the_next_token_follows_from_the_whole_prefix_and_from_nothing_else():
    tokens = list(b"some text")
    together = compute(backend(), 0, tokens)
    fake = backend()
    compute(fake, 1, list(b"noise"))
    for position, token in enumerate(tokens):
        step_by_step = compute(fake, 2, [token], start=position)
    assert together == step_by_step == expected_output(tokens, 1)[0]
    assert compute(backend(), 0, [tokens[0] + 1, *tokens[1:]]) != together


def test_sharing_removing_and_restoring_keep_the_prefix():
    fake = backend()
    compute(fake, 0, list(b"abcdef"))
    fake.seq_share(0, 1, 0, 3)
    fake.seq_remove(0, 3)
    state = fake.state_get(1, limit_bytes=1000)
    assert state is not None
    fake.seq_remove(1, 0)
    assert fake.state_set(3, state)
    assert fake.tokens_of(3) == list(b"abc")
    assert fake.n_used == 6
    assert compute(fake, 3, list(b"x"), start=3) == compute(fake, 0, list(b"x"), start=3)


def test_a_full_pool_refuses_and_changes_nothing():
    fake = backend(n_cells=20)
    compute(fake, 0, list(b"0123456789"))
    compute(fake, 1, list(b"012345"))
    with pytest.raises(NoRoom):
        compute(fake, 2, list(b"01234"))
    assert fake.n_used == 16
    state = fake.state_get(0, limit_bytes=1000)
    assert not fake.state_set(3, state)
    assert fake.tokens_of(3) == []
    compute(fake, 2, list(b"0123"))


def test_what_llama_would_refuse_or_abort_on_is_refused():
    fake = backend()
    with pytest.raises(DecodeFailed, match="not the next one"):
        compute(fake, 0, [1], start=2)
    with pytest.raises(ValueError, match="sequence of the batch"):
        compute(fake, 4, [1])
    with pytest.raises(ValueError, match="17 rows"):
        fake.decode(17)
    with pytest.raises(ValueError, match="vocabulary"):
        fake.piece(258)


def test_a_stale_cell_or_a_hole_is_noticed():
    fake = backend()
    compute(fake, 0, list(b"abcdef"))
    with pytest.raises(AssertionError, match="twice"):
        fake.seq_share(0, 0, 0, 3)
    fake.seq_remove(0, 2, 4)
    with pytest.raises(DecodeFailed, match="not the next one"):
        compute(fake, 0, [1], start=6)


def test_text_goes_in_and_comes_out_and_control_tokens_have_no_text():
    fake = backend()
    tokens = fake.tokenize("né<|im_end|>", parse_special=True)
    assert tokens == [*"né".encode(), IM_END]
    assert b"".join(map(fake.piece, tokens)) == "né".encode()
    assert IM_END not in fake.tokenize("<|im_end|>", parse_special=False)


def test_generations_end_now_and_then_unless_told_not_to():
    outputs = [next_token(digest * 7919) for digest in range(5000)]
    assert 0 < outputs.count(IM_END) < 200
    assert IM_END not in [next_token(digest * 7919, ignore_eos=True) for digest in range(5000)]
