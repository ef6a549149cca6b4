"""Random traces of requests with and without media over the fake backend, in every layout and kind of memory.

The fake's next token is a hash of what a row really sees: the rows of chunks with their places, and the positions of
tokens. So a row that was computed for another picture, at another position, twice or not at all, changes the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.backend import DecodeFailed, MemoryKind
from localrun.engine.cache import cells, copies
from localrun.engine.sample.text import Prompt, prompt_of
from localrun.engine.speculate.speculation import Speculation
from localrun.wire import Adapter, Finish, Lane, Media, MediaKind, Segment, Submit
from tests.depth import DEPTH
from tests.engine.harness import Harness, expected_media_output
from tests.engine.memory_disk import MemoryDisk
from tests.engine.test_adapters import A, B
from tests.fakes.media import PATCH_PIXELS, FakeProjector


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> Iterator[None]:
    """Chunks are longer than what is saved, restored and moved at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "COMPACT_CELLS", 24)
        patch.setattr(cells, "MOVE_TOKENS", 24)
        patch.setattr(copies, "BLOCK_TOKENS", 24)
        patch.setattr(copies, "PIECE_TOKENS", 48)
        yield


def _picture(name: str, nx: int, ny: int) -> Segment:
    size = (nx * PATCH_PIXELS, ny * PATCH_PIXELS)
    digest = hashlib.sha256(f"{name} {size}".encode()).digest()
    return Segment("", media=Media(MediaKind.IMAGE, name, digest, *size))


def _sound(name: str, seconds: int) -> Segment:
    return Segment(
        "", media=Media(MediaKind.AUDIO, name, hashlib.sha256(name.encode()).digest(), 0, 0, 16_000 * seconds)
    )


# Few pictures, so that prompts share them: some larger than a batch, and one too small to be shared.
parts = st.sampled_from(
    [
        *(Segment(text) for text in ("system ", "ab", "user: ", "z" * 40, "message" * 6 + "<|im_end|>")),
        *(_picture(name, *size) for name in "ab" for size in ((5, 3), (9, 8))),
        _picture("dot", 2, 1),
        _sound("bark", 1),
        _sound("song", 3),
    ]
)
submits = st.fixed_dictionaries(
    {
        "prompt": st.lists(parts, min_size=1, max_size=5).map(tuple),
        "n_predict": st.integers(0, 24),
        "client": st.sampled_from(["one", "two"]),
        "lane": st.sampled_from(list(Lane)),
        "target_itl_s": st.sampled_from([None, 0.0, 0.02]),
        "adapters": st.sampled_from([None, None, (A,), (B,)]),
    }
)
events = st.one_of(submits, st.integers(1, 6), st.tuples(st.just("cancel"), st.integers(0, 12)))
shapes = st.fixed_dictionaries(
    {
        "n_cells": st.sampled_from([256, 400, 640]),
        "n_slots": st.integers(1, 5),
        "n_batch": st.sampled_from([32, 80]),
        "n_seqs": st.integers(5, 10),
        "ram_cache_bytes": st.sampled_from([0, 4000, 1 << 20]),
        "memory_kind": st.sampled_from(
            [MemoryKind.ATTENTION, MemoryKind.ATTENTION, MemoryKind.WINDOW, MemoryKind.HYBRID]
        ),
        "is_split": st.booleans(),
        "n_background_seqs": st.integers(1, 2),
        "background_looks": st.integers(1, 4),
    }
)
projectors = st.fixed_dictionaries(
    {
        "is_causal": st.booleans(),
        "is_mrope": st.booleans(),
        "has_ends": st.booleans(),
        "looks": st.integers(1, 8),
    }
)


class Asked(NamedTuple):
    """A request."""

    prompt: Prompt
    n_predict: int
    adapters: tuple[Adapter, ...]


def _run(harness: Harness, trace: list) -> dict[int, Asked]:
    asked: dict[int, Asked] = {}
    for event in trace:
        if isinstance(event, dict):
            request_id = len(asked)
            prompt = prompt_of(harness.backend, Submit(id=0, segments=event["prompt"]))
            asked[request_id] = Asked(prompt, event["n_predict"], event["adapters"] or ())
            harness.submit(request_id, **event)
        elif isinstance(event, int):
            for _ in range(event):
                harness.step()
        else:
            harness.engine.cancel(event[1])
    harness.run()
    return asked


def _check(harness: Harness, asked: dict[int, Asked], *allowed: str) -> None:
    projector = harness.backend.projector
    assert projector is not None
    assert set(harness.finals) == set(asked), "a request without an end"
    for request_id, (prompt, n_predict, adapters) in asked.items():
        final = harness.finals[request_id]
        n_most = min(n_predict, harness.backend.n_ctx - len(prompt.tokens))
        got = harness.tokens.get(request_id, [])
        if final.finish is Finish.ERROR:
            assert final.error_code in ("context_length_exceeded", "bad_request", *allowed), final.error_message
            if not got:
                continue
        expected = expected_media_output(prompt, projector, n_most, adapters)
        assert got == expected[: len(got)], "output differs from the request's own"
        if final.finish is Finish.LENGTH:
            assert got == expected
    assert harness.backend.n_open_samplers == 0, "a sampler leaked"
    assert not harness.engine.scheduler.running
    assert not harness.engine.scheduler.waiting
    assert not any(harness.backend._chunks.get(seq) for seq in harness.engine.cache._free), "a table of nobody's"


@given(shapes, projectors, st.lists(events, max_size=30), st.booleans())
@settings(max_examples=120 * DEPTH)
def test_every_answer_is_the_request_s_own(shape: dict, kind: dict, trace: list, drafts: bool):
    harness = Harness(**shape, projector=FakeProjector(**kind), speculation=Speculation if drafts else None)
    _check(harness, _run(harness, trace))


@given(shapes, projectors, st.lists(events, max_size=20), st.lists(events, max_size=20))
@settings(max_examples=60 * DEPTH)
def test_after_a_restart_too(shape: dict, kind: dict, first: list, second: list):
    disk = MemoryDisk()
    for trace in (first, second):
        harness = Harness(**shape, projector=FakeProjector(**kind), disk=disk)
        _check(harness, _run(harness, trace))
        harness.engine.close()
        harness.engine.cache.tiers.flush(1.0, harness._clock)


outcomes = st.lists(st.sampled_from(["done", "done", "aborted", "broken off", "refused"]), max_size=30)
problems = st.lists(
    st.sampled_from([None, None, ValueError("bad file"), DecodeFailed("no", is_fatal=False)]), max_size=6
)


@given(shapes, projectors, st.lists(submits, min_size=1, max_size=6), outcomes, problems)
@settings(max_examples=60 * DEPTH)
def test_what_fails_harms_nobody_else(shape: dict, kind: dict, batch: list, planned: list[str], problems: list):
    projector = FakeProjector(**kind)
    projector.problems = list(problems)

    harness = Harness(**shape, projector=projector)
    backend = harness.backend
    decode, decode_media, n_failed = backend.decode, backend.decode_media, [0]

    def failing(call: Callable[[], None]) -> None:
        outcome = planned.pop(0) if planned and n_failed[0] < 2 else "done"
        n_failed[0] = 0 if outcome == "done" else n_failed[0] + 1
        if outcome == "refused":
            raise DecodeFailed("refused", is_fatal=False)
        if outcome == "aborted":
            raise DecodeFailed("aborted", is_fatal=True)
        call()
        if outcome == "broken off":
            raise DecodeFailed("broken off", is_fatal=True)

    backend.decode = lambda *arguments: failing(lambda: decode(*arguments))
    backend.decode_media = lambda part: failing(lambda: decode_media(part))
    asked = {}
    for request_id, one in enumerate(batch):
        prompt = prompt_of(backend, Submit(id=0, segments=one["prompt"]))
        asked[request_id] = Asked(prompt, one["n_predict"], one["adapters"] or ())
        harness.submit(request_id, **one)
        harness.step()
    harness.run()
    _check(harness, asked, "engine_failed")
