"""How far a download is, in a line."""

from __future__ import annotations

from localrun.cli.pull_meter import PullMeter
from localrun.client import PullPiece

MB = 1_000_000


def piece(completed: int, total: int = 100 * MB, digest: str = "sha256:a") -> PullPiece:
    return PullPiece(status="pulling a", digest=digest, total=total, completed=completed)


def test_bytes_rate_and_time_left():
    meter = PullMeter()
    for second in range(5):
        meter.add(piece(second * 10 * MB), float(second))
    assert meter.line(4.0) == " 40% [#########...............] 40 MB / 100 MB  10 MB/s  6 s left"
    meter.add(piece(100 * MB), 5.0)
    assert meter.line(5.0) == "100% [########################] 100 MB / 100 MB"


def test_what_was_there_before_is_not_speed():
    meter = PullMeter()
    meter.add(piece(0), 0.0)
    meter.add(piece(90 * MB), 0.0)
    assert meter.bytes_per_s(0.0) is None
    meter.add(piece(91 * MB), 1.0)
    assert meter.percent == 91


def test_nothing_goes_backwards():
    meter = PullMeter()
    seen = []
    for completed in (5, 3, 0, 50, 40, 200, 100):
        meter.add(piece(completed * MB), 1.0)
        seen.append(meter.done_bytes)
    assert seen == sorted(seen)
    assert seen[-1] == 100 * MB


def test_files_are_summed_and_statuses_change_nothing():
    meter = PullMeter()
    meter.add(PullPiece(status="pulling manifest"), 0.0)
    assert (meter.total_bytes, meter.percent) == (0, 0)
    meter.add(piece(100 * MB), 0.0)
    meter.add(piece(0, 300 * MB, "sha256:b"), 0.0)
    meter.add(PullPiece(status="pulling README", total=100 * MB), 0.0)
    assert (meter.total_bytes, meter.done_bytes, meter.percent) == (500 * MB, 100 * MB, 20)


def test_a_stalled_download_has_no_time_left():
    meter = PullMeter()
    meter.add(piece(10 * MB), 0.0)
    meter.add(piece(10 * MB), 5.0)
    assert meter.line(5.0).endswith("10 MB / 100 MB  0 B/s")
