"""What the doctor makes of a verdict, and when it asks for one."""

from __future__ import annotations

from pathlib import Path

from localrun import kernels
from localrun.doctor.finding import Level
from localrun.doctor.quick_kernels import check_kernels, judge
from localrun.kernel_probe import ProbeFailed
from localrun.kernels import Fault, Verdict

SOUND = Verdict(is_probed=True, quick_types=("Q4_0", "Q4_K"))


def test_a_sound_library_is_one_line_that_says_what_was_compared() -> None:
    (line,) = judge(SOUND)
    assert line.level is Level.OK
    assert "computed" in line.text
    assert "Q4_0, Q4_K" in line.text
    assert "no quick ones" in next(judge(Verdict(is_probed=True))).text


def test_faults_are_put_together_and_come_with_the_rebuild() -> None:
    quantized = [
        Fault(name, memory, "crash (SIGSEGV)") for memory in ("attention", "window") for name in ("Q4_0", "Q8_0")
    ]
    wrong = Fault("F16", "recurrent", "compute wrong logits (130% off)")
    crashes, errors = judge(Verdict(is_probed=True, faults=(*quantized, wrong)))
    assert crashes.level is errors.level is Level.WARN
    assert "crash for Q4_0, Q8_0 in ordinary, sliding-window models" in crashes.text
    assert "compute wrong logits for F16 in recurrent (Mamba) models; these load without them" in errors.text
    assert "native_build install --force" in crashes.remedy


def test_what_an_engine_told_is_shown_with_its_model() -> None:
    (line,) = judge(SOUND.with_crash({"Q4_K", "Q6_K"}, "attention", "was killed by SIGSEGV", "some:7b"))
    assert line.level is Level.WARN
    assert "an engine of some:7b (Q4_K, Q6_K) was killed by SIGSEGV" in line.text


def test_a_library_that_computes_nothing_is_a_failure() -> None:
    (line,) = judge(Verdict(is_probed=True, broken="crash (SIGILL)"))
    assert line.level is Level.FAIL
    assert "another processor" in line.text
    (line,) = judge(Verdict(is_probed=True, broken="crash (SIGSEGV)"))
    assert "crash (SIGSEGV)" in line.text


def test_it_is_probed_once_and_again_if_that_is_asked_for(tmp_path: Path) -> None:
    n_probes = 0

    def probe(folder: Path, *, anew: bool) -> Verdict:
        nonlocal n_probes
        assert anew == (n_probes == 1)
        n_probes += 1
        pair = kernels.present_pair()
        assert pair is not None
        kernels.keep(folder, pair, SOUND)
        return SOUND

    for is_deep, expected in ((False, 1), (False, 1), (True, 2)):
        assert [line.level for line in check_kernels(tmp_path, is_deep=is_deep, find_out=probe)] == [Level.OK]
        assert n_probes == expected


def test_a_probe_that_fails_is_a_finding(tmp_path: Path) -> None:
    def probe(folder: Path, *, anew: bool) -> Verdict:
        raise ProbeFailed("it took more than 120 s")

    (line,) = check_kernels(tmp_path, is_deep=False, find_out=probe)
    assert line.level is Level.FAIL
    assert "more than 120 s" in line.text
