"""Asking the build of llama.cpp in a process of its own, whatever becomes of that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from localrun.doctor import Finding, Level, llama_build
from localrun.doctor.kernel_probe import ProbeTooSlow
from localrun.doctor.llama_build import (
    BuildReport,
    ask_build,
    better_build,
    check_build,
    check_cpu,
    check_kernels,
    check_media,
    judge,
    rebuild,
)
from localrun.engine.tools.tasks import cpu_features
from localrun.hardware import kernels
from localrun.hardware.kernels import Fault, Verdict
from localrun.native_build.plan import Plan
from tests.says import says


def child(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


def failed(program: str, **more: float) -> Finding:
    found = ask_build(child(program), **more)
    assert isinstance(found, Finding)
    assert found.level is Level.FAIL
    return found


def report(*features: str) -> BuildReport:
    return BuildReport(
        version="0.3.36", library="/lib", backends=("CUDA", "CPU"), gpu_offload=True, cpu_features=features, devices=(),
        ggml="1.2",
    )  # fmt: skip


def test_the_library_for_images_and_audio() -> None:
    assert check_media().level is Level.OK
    for script, said in (("raise OSError('libmtmd.so: not found')", "not found"), ("import os; os.abort()", "SIGABRT")):
        found = check_media((sys.executable, "-c", script))
        assert (found.check, found.level) == ("media", Level.WARN)
        assert said in found.text
        assert "native_build" in found.remedy
    found = check_media((sys.executable, "-c", "import time; time.sleep(60)"), timeout_s=0.2)
    assert "more than 0.2 s" in found.text


def test_the_real_build_reports_itself():
    found = ask_build()
    assert isinstance(found, BuildReport)
    assert "CPU" in found.backends
    assert found.version
    assert Path(found.library).is_dir()
    assert [line.level for line in check_build(found)] == [Level.OK]


def test_lines_of_a_library_before_the_report_are_no_harm():
    program = "import json; print('ggml_init: found 1 device');" + (
        "print(json.dumps(dict(version='1',library='/l',backends=['CPU'],gpu_offload=False,cpu_features=[],devices=[])))"
    )
    found = ask_build(child(program))
    assert isinstance(found, BuildReport)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_build_for_another_cpu_is_named():
    found = failed("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert "built for a different CPU" in found.text
    assert found.remedy == rebuild()


def test_a_library_that_is_missing_is_quoted():
    found = failed("import sys; print('ImportError: libx.so.1: gone', file=sys.stderr); sys.exit(1)")
    assert "ImportError: libx.so.1: gone" in found.text
    cuda = failed("import sys; print('RuntimeError: libcudart.so.12: not found', file=sys.stderr); sys.exit(1)")
    assert says(cuda.text, "CUDA", "libcudart.so.12")
    assert "--backend cpu" in cuda.remedy
    assert "status 3" in failed("import sys; sys.exit(3)").text


def test_backends_that_were_passed_over_are_named():
    lines = list(check_build(msgspec.structs.replace(
        report(), modules=("libggml-cpu-zen4.so",),
        skipped={"libggml-cuda.so": "libcublas.so.12: cannot open shared object file: No such file or directory"},
    )))  # fmt: skip
    assert [line.level for line in lines] == [Level.OK, Level.WARN]
    assert "libggml-cpu-zen4.so" in lines[0].text
    assert says(lines[1].text, "libcublas.so.12", "CPU")
    (no_cpu,) = check_build(msgspec.structs.replace(report(), backends=()))
    assert no_cpu.level is Level.FAIL
    assert "native_build install" in no_cpu.remedy


def test_nonsense_and_silence_are_failures():
    assert "cannot be read" in failed("print('{}')").text
    assert "cannot be read" in failed("pass").text
    assert "more than 0.5 s" in failed("import time; time.sleep(60)", timeout_s=0.5).text


def test_features_that_the_build_leaves_unused_are_named():
    flags = {"avx", "avx2", "fma", "f16c", "avx512f"}
    slow = check_cpu(report("AVX", "F16C"), flags, machine="x86_64", remedy=rebuild)
    assert slow.level is Level.WARN
    assert "AVX2, FMA, AVX512" in slow.text
    assert slow.remedy == rebuild()
    fine = check_cpu(report("SSE3", "AVX", "AVX2", "FMA", "F16C", "AVX512"), flags, machine="x86_64")
    assert (fine.level, fine.text) == (Level.OK, "x86_64: AVX, AVX2, FMA, F16C, AVX512")
    assert check_cpu(report("AVX2"), set(), machine="AMD64").level is Level.OK
    both = {"avx_vnni", "avx512_vnni"}
    assert check_cpu(report("AVX512_VNNI"), both, machine="x86_64").level is Level.OK
    assert check_cpu(report("AVX_VNNI"), both, machine="x86_64", remedy=rebuild).level is Level.WARN
    pi_4 = check_cpu(report("NEON", "ARM_FMA"), {"fp", "asimd"}, machine="aarch64")
    assert (pi_4.level, pi_4.text) == (Level.OK, "aarch64: NEON; no dot product, so no quick kernels")
    m2 = {"asimd", "asimddp", "asimdhp", "i8mm"}
    lacking = check_cpu(report("NEON", "DOTPROD", "FP16_VA"), m2, machine="aarch64", remedy=rebuild)
    assert says(lacking.text, "MATMUL_INT8")
    # An emulator on x86 runs the program, and shows that processor's flags.
    assert check_cpu(report("NEON", "DOTPROD"), {"avx2", "fma"}, machine="aarch64").level is Level.OK


def test_a_build_that_would_come_out_the_same_is_no_remedy(monkeypatch: pytest.MonkeyPatch):
    lost = "built without MATMUL_INT8, which this processor has: GCC 9 does not know it; GCC 10 and clang 11 do"
    plan = Plan(backend="cpu", inputs={"processor": "A"}, notes=[lost])
    key = plan.record(dict(os.environ))["key"]
    monkeypatch.setattr(llama_build, "make_plan", lambda *_: plan)
    monkeypatch.setattr(llama_build, "installed", lambda _: {"key": key, "backend": "cpu"})
    assert says(better_build(), "the same again", "newer", "CC=", "GCC 10 and clang 11")
    monkeypatch.setattr(llama_build, "installed", lambda _: {"key": "another", "portable": True})
    assert better_build() == rebuild()
    plan.problems.append("no C++ compiler was found; type: apt install g++")
    assert better_build() == f"{plan.problems[0]}; {rebuild()}"


def test_features_of_llama_cpps_own_line():
    line = "CUDA : ARCHS = 890 | USE_GRAPHS = 1 | CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | REPACK = 1 | "
    assert cpu_features(line) == ["SSE3", "AVX2", "REPACK"]
    assert cpu_features("") == []


def test_the_command_fits_the_shell():
    assert rebuild() == f"{sys.executable} -m localrun.native_build install --force"
    assert rebuild("cuda", python="/a b/python").startswith('"/a b/python" -m localrun.native_build install ')
    assert rebuild("cuda", python="C:/a b/python.exe", platform="win32").startswith('& "C:/a b/python.exe" -m ')
    assert rebuild("cuda").endswith(" --backend cuda")


def test_the_command_is_one_that_exists():
    ran = subprocess.run([*rebuild("vulkan").split(), "--help"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


SOUND = Verdict(is_probed=True, quick_types=("Q4_0", "Q4_K"))


def test_a_sound_library_is_one_line_that_says_what_was_compared() -> None:
    (line,) = judge(SOUND)
    assert line.level is Level.OK
    assert "computations" in line.text
    assert "Q4_0, Q4_K" in line.text
    assert "no quick kernels" in next(judge(Verdict(is_probed=True))).text


def test_faults_are_put_together_and_come_with_the_rebuild() -> None:
    quantized = [
        Fault(name, memory, "crash (SIGSEGV)") for memory in ("attention", "window") for name in ("Q4_0", "Q8_0")
    ]
    wrong = Fault("F16", "recurrent", "compute wrong logits (130% off)")
    crashes, errors = judge(Verdict(is_probed=True, faults=(*quantized, wrong)))
    assert crashes.level is errors.level is Level.WARN
    assert says(crashes.text, "crash", "Q4_0, Q8_0", "sliding-window")
    assert says(errors.text, "wrong logits", "F16", "Mamba")
    assert "native_build install --force" in crashes.remedy


def test_what_an_engine_told_is_shown_with_its_model() -> None:
    (line,) = judge(SOUND.with_crash({"Q4_K", "Q6_K"}, "attention", "was killed by SIGSEGV", "some:7b"))
    assert line.level is Level.WARN
    assert says(line.text, "some:7b", "Q4_K, Q6_K", "SIGSEGV")


def test_a_library_that_computes_nothing_is_a_failure() -> None:
    (line,) = judge(Verdict(is_probed=True, broken="crash (SIGILL)"))
    assert line.level is Level.FAIL
    assert "different processor" in line.text
    (line,) = judge(Verdict(is_probed=True, broken="crash (SIGSEGV)"))
    assert "crash (SIGSEGV)" in line.text


def test_types_that_all_kernels_compute_wrongly_are_a_failure() -> None:
    (line,) = judge(Verdict(is_probed=True, quick_types=("Q4_0",), wrong=("Q4_K", "Q6_K")))
    assert line.level is Level.FAIL
    assert says(line.text, "Q4_K, Q6_K wrongly", "refused")
    assert "native_build install --force" in line.remedy


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
        raise ProbeTooSlow("it took more than 120 s")

    (line,) = check_kernels(tmp_path, is_deep=False, find_out=probe)
    assert line.level is Level.WARN
    assert "more than 120 s" in line.text
    # It computes no faster when it is compiled anew.
    assert line.remedy == "run this again while the machine is idle"
