"""The probe on the real library: sound, with a kernel that crashes or is wrong; and whatever else its process does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from localrun.doctor.kernel_probe import COMMAND, ProbeFailed, probe, probe_and_keep
from localrun.doctor.probe_models import PROBE_MODELS, WEIGHT_TYPES, write_probe_models
from localrun.hardware import kernels
from localrun.hardware.kernels import Fault, Verdict
from localrun.models.gguf.reader import read_header
from localrun.models.memory import memory_kind
from tests.broken_kernels import broken_q4_k

MEMORIES = ("attention", "window", "recurrent", "hybrid")


def command(program: str) -> tuple[str, ...]:
    """A child that gets the files' paths as `paths`, and says what `say` is given."""
    return (sys.executable, "-c", "import json, os, signal, sys\npaths = sys.stdin.read().splitlines()\n"
            "def say(**fields): print(json.dumps(fields), flush=True)\n" + program)  # fmt: skip


def with_broken(preload: str) -> Verdict:
    return probe(("env", f"LD_PRELOAD={preload}", *COMMAND))


# --- the real library ------------------------------------------------------------------------------------------------


def test_a_broken_kernel_is_named_with_every_memory_and_no_other_type(tmp_path: Path) -> None:
    sound = probe()
    assert sound.is_probed
    assert (sound.broken, sound.wrong) == ("", ())
    if "Q4_K" not in sound.quick_types or any(fault.weight_type == "Q4_K" for fault in sound.faults):
        pytest.skip("this processor has no quick kernel for Q4_K, or a broken one")
    for signal_name in ("SIGSEGV", "SIGILL"):
        crashed = with_broken(broken_q4_k(tmp_path, signal_name))
        new = [fault for fault in crashed.faults if fault not in sound.faults]
        assert new == [Fault("Q4_K", memory, f"crash ({signal_name})") for memory in MEMORIES]
        assert crashed.quick_types == sound.quick_types
        assert not crashed.broken
    wrong = with_broken(broken_q4_k(tmp_path))
    new = [fault for fault in wrong.faults if fault not in sound.faults]
    assert [(fault.weight_type, fault.memory) for fault in new] == [("Q4_K", memory) for memory in MEMORIES]
    assert all("wrong logits" in fault.how for fault in new)


def test_the_files_are_what_they_are_probed_for(tmp_path: Path) -> None:
    written = list(write_probe_models(tmp_path))
    assert len(written) == len(WEIGHT_TYPES) * len(PROBE_MODELS)
    for weight_type, memory, path, reference in written:
        header = read_header(path)
        assert memory_kind(header) == memory
        matrices = [tensor for tensor in header.tensors if tensor.type_name != "F32"]
        assert {tensor.type_name for tensor in matrices} == {weight_type}
        assert all(tensor.shape[0] % 256 == 0 for tensor in matrices)
        assert (reference is not None) == (memory == "attention")
        if reference is not None:
            tensors = read_header(reference).tensors
            assert {tensor.type_name for tensor in tensors} == {"F32"}
            assert [(each.name, each.shape) for each in tensors] == [(each.name, each.shape) for each in header.tensors]


def test_the_program_keeps_its_verdict_and_what_engines_said(tmp_path: Path) -> None:
    pair = kernels.present_pair()
    assert pair is not None
    folder = kernels.folder(tmp_path / "cache")
    told = Verdict().with_crash({"Q4_K"}, "attention", "was killed by SIGSEGV", "some")
    kernels.keep(folder, pair, told)
    program = [sys.executable, "-P", "-m", "localrun.doctor.kernel_probe"]
    environ = os.environ | {"LOCALRUN_HOME": str(tmp_path)}
    ended = subprocess.run(
        [*program, "--polite"], env=environ, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    # Its stdin ended at once, and it with it: a probe does not outlive its daemon.
    assert ended.returncode == 1
    assert kernels.read(folder, pair) == told
    subprocess.run(program, env=environ, stdout=subprocess.DEVNULL, check=True)
    kept = kernels.read(folder, pair)
    assert kept.is_probed
    assert kept.crashes == told.crashes
    assert not probe_and_keep(folder, anew=True).crashes
    assert not kernels.read(folder, pair).crashes


# --- a process that misbehaves ---------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="there it is terminated, and its files stay")
def test_a_daemon_that_goes_leaves_no_models_behind(tmp_path: Path) -> None:
    environ = os.environ | {"LOCALRUN_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    program = [sys.executable, "-P", "-m", "localrun.doctor.kernel_probe", "--polite"]
    with subprocess.Popen(program, env=environ, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as running:
        while not list(tmp_path.glob("localrun-probe-*/*")) and running.poll() is None:
            time.sleep(0.005)
        assert running.stdin is not None
        running.stdin.close()
        assert running.wait() == 1
    assert not list(tmp_path.glob("localrun-probe-*"))


def test_what_a_killed_probe_left_is_swept_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    left, running = tmp_path / f"localrun-probe-{gone.pid}-a", tmp_path / f"localrun-probe-{os.getppid()}-b"
    for folder in (left, running):
        folder.mkdir()
        (folder / "model.gguf").touch()
    with pytest.raises(ProbeFailed):
        probe(command("sys.exit('no library')"))
    assert list(tmp_path.iterdir()) == [running]


def test_a_process_that_dies_is_started_again_behind_the_case_and_hides_nothing() -> None:
    # As where processes cannot be forked. It says what it is about to do, and every Q8_0 kills it.
    verdict = probe(
        command("""
for case, path in enumerate(paths):
    say(case=case, path="plain")
    say(case=case, path="quick")
    if "Q8_0" in path:
        os.kill(os.getpid(), signal.SIGILL)
    say(case=case, difference=0.5 if "Q6_K" in path else 0.02, buffers=["X"] if "-Q4" in path else [])
""")
    )
    crashed = {(fault.weight_type, fault.memory) for fault in verdict.faults if fault.how == "crash (SIGILL)"}
    assert crashed == {("Q8_0", memory) for memory in MEMORIES}
    wrong = {(fault.weight_type, fault.memory) for fault in verdict.faults if "50% off" in fault.how}
    assert wrong == {("Q6_K", memory) for memory in MEMORIES}
    assert set(verdict.quick_types) == {"Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0"}


def test_numbers_that_are_none_are_wrong_and_plain_kernels_that_crash_are_worse() -> None:
    verdict = probe(
        command("""
for case, path in enumerate(paths):
    say(case=case, path="plain")
    if "F16" in path:
        say(case=case, signal=4)
        continue
    say(case=case, path="quick")
    say(case=case, difference=-1.0, buffers=["X"])
""")
    )
    assert verdict.broken == "crash (SIGILL)"
    assert {fault.how for fault in verdict.faults} == {"compute wrong logits (not numbers)"}
    assert "F16" not in {fault.weight_type for fault in verdict.faults}


def test_plain_kernels_that_are_wrong_blame_no_quick_one_and_are_wrong_alone_without() -> None:
    """As on ARM with vectors of 512 bits, where the plain kernels for two types compute nonsense."""
    verdict = probe(
        command("""
for case, line in enumerate(paths):
    path, _, reference = line.partition("\t")
    say(case=case, path="plain")
    say(case=case, path="quick")
    is_wrong = any(name in path for name in ("Q4_K", "Q6_K", "Q5_K"))
    errors = {"plain_error": -1.0 if "Q5_K" in path else 157.0 if is_wrong else 0.05,
              "quick_error": 0.9 if "Q6_K" in path else 0.05} if reference else {}
    quick = ["X"] if "Q4_K" in path or "Q6_K" in path else []
    say(case=case, difference=1.5 if is_wrong else 0.0, buffers=quick, **errors)
""")
    )
    assert verdict.faults == ()
    assert set(verdict.quick_types) == {"Q4_K", "Q6_K"}
    # Quick kernels make up for the first; the second's are wrong too, and the third has none.
    assert set(verdict.wrong) == {"Q5_K", "Q6_K"}
    assert verdict.allows_quick({"Q4_K"}, "attention")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("sys.exit('ImportError: no library')", "no library"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("print('nonsense')", "status 0"),
    ],
)
def test_a_process_that_computes_nothing_is_no_verdict(program: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ProbeFailed, match=reason):
        probe_and_keep(tmp_path, command(program))
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_hangs_is_no_verdict_about_what_it_hung_in() -> None:
    with pytest.raises(ProbeFailed, match="more than 1 s"):
        probe(command("say(case=0, path='quick')\nimport time\ntime.sleep(60)"), timeout_s=1)


def test_a_verdict_is_json() -> None:
    verdict = Verdict(is_probed=True, faults=(Fault("F16", "recurrent", "crash"),))
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict
