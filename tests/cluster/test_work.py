"""What a request has still to compute, from its message to its first token."""

from __future__ import annotations

import pytest

from localrun import wire
from localrun.cluster.frames import MEDIA_TOKENS, Work


def delta(phase: wire.Phase, n_computed: int, n_output: int = 0) -> wire.Delta:
    return wire.Delta(1, phase, n_computed, n_output)


@pytest.mark.parametrize(
    ("message", "n_tokens"),
    [
        (wire.Submit(id=1, segments=(wire.Segment("x" * 400), wire.Segment("", tokens=(1, 2)))), 102),
        (wire.Submit(id=1, tokens=(1,) * 60_000), 60_000),
        (wire.Submit(id=1, tokens=(1,) * 10, resume=wire.Resume(output=(1,) * 50)), 60),
        (
            wire.Submit(id=1, segments=(wire.Segment("", media=wire.Media(wire.MediaKind.IMAGE, "/x", b"x")),)),
            MEDIA_TOKENS,
        ),
        (wire.Embed(id=1, inputs=("x" * 40, (1, 2, 3), wire.Mixed((wire.Segment("x" * 8),)))), 15),
    ],
)
def test_a_message_tells_how_much_it_is(message, n_tokens):
    assert Work(message).left_tokens == n_tokens


def test_what_is_left_shrinks_as_it_is_computed():
    work = Work(wire.Submit(id=1, segments=(wire.Segment("x" * 4000),)))
    work.on_delta(delta(wire.Phase.QUEUED, 0))
    assert work.left_tokens == 1000
    work.on_started(wire.Started(1, 0, n_prompt=900, n_cached=300))
    assert work.left_tokens == 600
    work.on_delta(delta(wire.Phase.PREFILL, 700))
    assert work.left_tokens == 200
    work.on_delta(delta(wire.Phase.DECODE, 900, 1))
    assert work.left_tokens == 0


def test_a_stream_that_goes_on_counts_until_it_is_where_it_was():
    work = Work(wire.Submit(id=1, tokens=(1,) * 100, resume=wire.Resume(output=(1,) * 50)))
    work.on_started(wire.Started(1, 0, n_prompt=100, n_cached=0))
    work.on_delta(delta(wire.Phase.PREFILL, 20, 50))
    assert work.left_tokens == 80
