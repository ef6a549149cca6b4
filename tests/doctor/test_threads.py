from __future__ import annotations

from localrun.doctor.finding import Level
from localrun.doctor.threads import check_threads
from localrun.processors import Processors
from localrun.thread_choice import Kept, Shape, Threads

HYBRID = Processors(name="made", n_machine=24, n_allowed=24, performance_cores=8, efficiency_cores=8)
BOXED = Processors(name="made", n_machine=64, n_allowed=64, performance_cores=32, quota=2.5)


def kept(model: str, threads: Threads, *, at_s: float = 0.0, processors: Processors = HYBRID) -> Kept:
    return Kept(
        processors=processors.identity, build="b", shape=Shape(1, 1), threads=threads, model=model, n_tried=(8, 16),
        at_s=at_s,
    )  # fmt: skip


def test_it_says_what_there_is_and_what_will_be_tried():
    found = check_threads(HYBRID, [], wanted=0)
    assert found.level is Level.OK
    assert found.text == (
        "8 (8 performance and 8 efficiency cores with 24 hyperthreads); an engine also tries 4, 16, 24 when it is idle "
        "after its first load"
    )


def test_what_was_measured_under_these_limits_is_told_newest_last():
    entries = [
        kept("newer", Threads(8, 24), at_s=5), kept("older", Threads(8, 16), at_s=4),
        kept("boxed", Threads(1, 1), processors=BOXED), *(kept(f"old{n}", Threads(1, 1), at_s=n) for n in range(3)),
    ]  # fmt: skip
    text = check_threads(HYBRID, entries, wanted=0).text
    assert text.partition("measured: ")[2] == (
        "old2 1 for streams and 1 for prompts; older 8 for streams and 16 for prompts; "
        "newer 8 for streams and 24 for prompts"
    )


def test_a_quota_is_named():
    assert check_threads(BOXED, [], wanted=0).text == (
        "2 (32 cores with 64 hyperthreads, a quota of 2.5 of 64 processors)"
    )


def test_a_number_that_is_set_is_told_and_warned_of_where_it_is_too_large():
    assert check_threads(BOXED, [], wanted=2).level is Level.OK
    found = check_threads(BOXED, [], wanted=3)
    assert (found.level, found.check) == (Level.WARN, "threads")
    assert "only 2 can run at once" in found.text
    assert "LOCALRUN_THREADS" in found.remedy
