"""The live rate: honest about what it cannot know yet, and about now rather than about the average."""

from __future__ import annotations

from localrun.cli.meter import RATE_MIN_PIECES, StreamMeter


def _fed(interval_s: float, count: int, start_s: float = 100.0) -> StreamMeter:
    meter = StreamMeter(start_s)
    for number in range(1, count + 1):
        meter.add(start_s + number * interval_s)
    return meter


def test_waiting_shows_for_how_long():
    assert StreamMeter(100.0).line(101.25) == "waiting for the first token, 1.2 s"


def test_no_rate_from_too_few_pieces():
    meter = _fed(0.1, RATE_MIN_PIECES - 1)
    assert meter.pieces_per_s(100.4) is None
    assert meter.line(100.4) == "... tokens/s, 4 tokens, first after 0.10 s"


def test_a_steady_stream_has_its_rate():
    meter = _fed(0.1, 100)
    assert abs(meter.pieces_per_s(110.0) - 10) < 0.6
    assert meter.ttft_s is not None
    assert abs(meter.ttft_s - 0.1) < 1e-9


def test_the_rate_is_of_the_last_moments_and_falls_when_the_stream_stalls():
    meter = _fed(0.1, 100)
    for number in range(1, 101):
        meter.add(110.0 + number * 0.01)
    assert meter.pieces_per_s(111.0) > 30
    assert meter.pieces_per_s(112.5) < 30
    assert meter.pieces_per_s(120.0) == 0.0
