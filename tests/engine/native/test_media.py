"""Media in real contexts: the same logits as libmtmd's own helper, however they were computed, kept and moved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from localrun.engine.backend import MediaChunk, MediaRows, MemoryKind
from localrun.engine.native.llama import LlamaBackend
from localrun.wire import Media
from tests.depth import DEPTH
from tests.engine.native.media import (
    PAIRS,
    Pair,
    compute,
    encoded,
    helper_logits,
    make_pair,
    media_file,
    n_tokens,
    opened,
    prompt,
    table_of,
)  # fmt: skip

# A chunk in parts, or text in other batches: rounding.
ROUNDING = 2e-2
BEFORE, AFTER = "hello there ", " what is this and why"


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), request.param)


@pytest.fixture(scope="module", params=["split", "one pool"])
def backend(request: pytest.FixtureRequest, pair: Pair) -> Iterator[LlamaBackend]:
    with opened(pair, split=request.param == "split") as backend:
        if request.param == "split" and not backend.is_split:
            pytest.skip("this model's states are whole")
        yield backend


@pytest.fixture(autouse=True)
def _empty(backend: LlamaBackend) -> None:
    n_away = backend.worker.n_seqs if backend.worker is not None else 0
    for seq in range(backend.n_seqs + n_away):
        backend.seq_remove(seq, 0)
        backend.set_chunks(seq, ())


@pytest.fixture
def media(pair: Pair, tmp_path: Path) -> Media:
    return media_file(tmp_path, pair)


def parts_of(backend: LlamaBackend, *parts: str | Media) -> list[list[int] | MediaChunk]:
    assert backend.projector is not None
    return backend.projector.tokenize(prompt(*parts))


def test_logits_are_those_of_the_helper_bit_by_bit(backend: LlamaBackend, pair: Pair, media: Media, tmp_path: Path):
    other = media_file(tmp_path, pair, seed=2)
    text = prompt(BEFORE, media, AFTER)
    logits = compute(backend, 1, parts_of(backend, BEFORE, media, AFTER))
    np.testing.assert_array_equal(logits, helper_logits(pair, text))
    others = compute(backend, 2, parts_of(backend, BEFORE, other, AFTER))
    assert np.abs(others - logits).max() > 0.1, "the model does not look"


def test_a_prompt_may_end_with_media_and_have_several(backend: LlamaBackend, pair: Pair, tmp_path: Path):
    if pair.hears:
        pytest.skip("nothing comes after sound by itself, and the helper wants no logits of its rows")
    several = [media_file(tmp_path, pair, seed, width=40 + 20 * seed) for seed in (1, 2)]
    text = prompt(several[0], BEFORE, several[1])
    logits = compute(backend, 0, parts_of(backend, several[0], BEFORE, several[1]))
    np.testing.assert_array_equal(logits, helper_logits(pair, text))


def test_rows_that_are_causal_may_be_computed_in_parts(backend: LlamaBackend, media: Media):
    parts = parts_of(backend, BEFORE, media, AFTER)
    whole = compute(backend, 0, parts)
    np.testing.assert_allclose(compute(backend, 1, parts, piece=5), whole, atol=ROUNDING)


def test_sequences_do_not_see_each_others_media(backend: LlamaBackend, pair: Pair, tmp_path: Path):
    several = [parts_of(backend, BEFORE, media_file(tmp_path, pair, seed), AFTER) for seed in (1, 2)]
    alone = []
    for parts in several:
        alone.append(compute(backend, 0, parts))
        backend.seq_remove(0, 0)
    beside = [compute(backend, seq, parts[:-1]) is not None and seq for seq, parts in enumerate(several)]
    for seq in beside:
        parts = several[seq]
        last, start = parts[-1], n_tokens(parts[:-1])
        assert isinstance(last, list)
        logits = compute(backend, seq, [last], start=start)
        np.testing.assert_allclose(logits, alone[seq], atol=ROUNDING)


def test_parts_of_several_streams_in_any_order(backend: LlamaBackend, pair: Pair, tmp_path: Path):
    """Rows of media and of text lie in the same buffers, one stream's after another's, in another order each time."""
    chance, prompts, alone = Random(3), [], []
    for seed in (1, 2, 3):
        media = media_file(tmp_path, pair, seed, width=40 + 10 * seed)
        prompts.append(parts_of(backend, BEFORE * seed, media, AFTER, media_file(tmp_path, pair, seed + 3), AFTER))
        alone.append(compute(backend, 0, prompts[-1]))
        backend.seq_remove(0, 0)
    assert all(np.abs(one - other).max() > 0.1 for one, other in itertools.combinations(alone, 2)), (
        "a mix-up could hide"
    )
    for _ in range(2 * DEPTH):
        n_done = [0, 0, 0]
        while left := [seq for seq in range(3) if n_done[seq] < len(prompts[seq])]:
            seq = chance.choice(left)
            parts, at = prompts[seq], n_done[seq]
            start, table = n_tokens(parts[:at]), table_of(parts)
            logits = compute(backend, seq, [parts[at]], start=start, table=table, piece=chance.choice((0, 3, 7)))
            n_done[seq] += 1
            if n_done[seq] == len(parts):
                np.testing.assert_allclose(logits, alone[seq], atol=ROUNDING)
        for seq in range(3):
            backend.seq_remove(seq, 0)


def test_a_saved_prompt_goes_on_elsewhere_with_the_same_logits(backend: LlamaBackend, media: Media):
    """Cut at every place, in the midst of a picture too, where states can be cut."""
    parts = parts_of(backend, BEFORE, media, AFTER, media, AFTER)
    table, end = table_of(parts), n_tokens(parts[:-1])
    expected = compute(backend, 0, parts)
    backend.seq_remove(0, 0)
    compute(backend, 0, parts[:-1])
    if backend.cuts_states:
        cuts = [0, 3, 9, end - 5, end]
        ranges = list(itertools.pairwise(cuts))
        slices = [bytes(piece) for piece in backend.state_slices(0, ranges)]
        state = backend.state_join(
            2, [(data, start, start, stop) for data, (start, stop) in zip(slices, ranges, strict=True)]
        )
    else:
        whole = backend.state_get(0, limit_bytes=1 << 30)
        assert whole is not None
        state = whole
    backend.seq_remove(0, 0)
    assert backend.state_set(2, state)
    np.testing.assert_array_equal(compute(backend, 2, [parts[-1]], start=end, table=table), expected)


def test_a_saved_prompt_goes_on_in_the_pool(backend: LlamaBackend, media: Media):
    if not backend.is_split:
        pytest.skip("one pool only")
    parts = parts_of(backend, BEFORE, media, AFTER)
    table, end = table_of(parts), n_tokens(parts[:-1])
    expected = compute(backend, 0, parts)
    backend.seq_remove(0, 0)
    compute(backend, 0, parts[:-1])
    (data,) = (bytes(piece) for piece in backend.state_slices(0, [(0, end)]))
    seq = backend.n_seqs
    backend.set_chunks(seq, table)
    assert backend.state_set(seq, backend.state_join(seq, [(data, 0, 0, end)]))
    logits = compute(backend, seq, [parts[-1]], start=end, table=table)
    np.testing.assert_allclose(logits, expected, atol=ROUNDING)


def test_a_tail_behind_a_picture_is_taken_off_and_computed_anew(backend: LlamaBackend, media: Media):
    parts = parts_of(backend, BEFORE, media, AFTER)
    start = n_tokens(parts[:-1])
    expected = compute(backend, 0, parts)
    if backend.seq_remove(0, start):
        np.testing.assert_array_equal(compute(backend, 0, [parts[-1]], start=start), expected)
    else:
        assert backend.memory_kind is not MemoryKind.ATTENTION


def test_in_one_pool_a_picture_is_shared_and_restored_in_pieces(backend: LlamaBackend, media: Media):
    """As the cache does it: through a spare sequence, cut anywhere."""
    if backend.is_split or backend.memory_kind is not MemoryKind.ATTENTION:
        pytest.skip("one pool only")
    parts = parts_of(backend, BEFORE, media, AFTER, media, AFTER)
    table, end, spare = table_of(parts), n_tokens(parts[:-1]), backend.n_seqs - 1
    expected = compute(backend, 0, parts)
    for seq in (1, spare):
        backend.set_chunks(seq, table)
    backend.seq_share(0, 1, 0, end)
    np.testing.assert_array_equal(compute(backend, 1, [parts[-1]], start=end), expected)
    cuts = [0, 7, 13, end - 1, end]
    pieces = []
    for start, stop in itertools.pairwise(cuts):
        backend.seq_share(0, spare, start, stop)
        pieces += [bytes(piece) for piece in backend.state_slices(spare, [(start, stop)])]
        backend.seq_remove(spare, 0)
    backend.seq_remove(0, 0)
    backend.seq_remove(1, 0)
    backend.set_chunks(2, table)
    for data, start, stop in zip(pieces, cuts, cuts[1:], strict=False):
        assert backend.state_set(spare, backend.state_join(spare, [(data, start, start, stop)]))
        backend.seq_share(spare, 2, start, stop)
        backend.seq_remove(spare, 0)
    np.testing.assert_allclose(compute(backend, 2, [parts[-1]], start=end), expected, atol=ROUNDING)


def test_the_background_computes_media_and_streams_go_on_meanwhile(backend: LlamaBackend, media: Media):
    if backend.worker is None:
        pytest.skip("there is none")
    parts = parts_of(backend, BEFORE, media, AFTER)
    expected = compute(backend, 0, parts)
    words = parts[-1]
    assert isinstance(words, list)
    alone = compute(backend, 1, [words])
    backend.seq_remove(1, 0)
    worker, away, at = backend.worker, backend.n_seqs, 0
    backend.set_chunks(away, table_of(parts))
    for part in parts[:-1]:
        if isinstance(part, MediaChunk):
            worker.start_media(MediaRows(away, at, part, encoded(backend, part), 0, part.n_tokens))
        else:
            count = len(part)
            worker.batch.token[:count], worker.batch.pos[:count] = part, range(at, at + count)
            worker.batch.seq[:count] = worker.batch.wants_logits[:count] = 0
            worker.start(count)
        np.testing.assert_array_equal(compute(backend, 1, [words]), alone)
        backend.seq_remove(1, 0)
        at += n_tokens([part])
        worker.finish()
    assert backend.seq_copy(away, 3)
    backend.seq_remove(away, 0)
    np.testing.assert_allclose(compute(backend, 3, [words], start=at, table=table_of(parts)), expected, atol=ROUNDING)


def test_a_chunk_of_positions_in_parts_is_whole_or_nothing(backend: LlamaBackend, media: Media):
    parts = parts_of(backend, BEFORE, media, AFTER)
    ((start, chunk), *_) = table_of(parts)
    if chunk.n_pos == chunk.n_tokens:
        pytest.skip("every row has a position")
    compute(backend, 0, parts)
    assert not backend.seq_remove(0, start + 1)
    with pytest.raises(ValueError, match="cannot go on"):
        compute(backend, 0, [[5]], start=start + chunk.n_pos)
