"""What the doctor says of GPUs: whether they are some, and whether they compute what the CPU computes."""

from __future__ import annotations

import json
import sys

import pytest

from localrun.doctor import Level
from localrun.doctor.gpu import check_devices
from localrun.doctor.llama_build import BuildReport
from tests.devices import rpc


def report(*names: str) -> BuildReport:
    return BuildReport(
        version="0.3.36", library="/lib", backends=("Vulkan", "CPU"), gpu_offload=True, cpu_features=(),
        devices=tuple((name, 8 << 30, False, 8 << 30) for name in names),
    )  # fmt: skip


def saying(*lines: dict[str, object], then: str = "") -> list[str]:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return [sys.executable, "-c", f"print({text!r}, end='', flush=True); {then}"]


def found(*names: str, command: list[str], timeout_s: float = 60) -> list[tuple[Level, str]]:
    return [(each.level, each.text) for each in check_devices(report(*names), command, timeout_s=timeout_s)]


def test_two_of_one_name_are_two() -> None:
    lines = [{"number": 0, "device": "card", "n_rows": 60}, {"number": 1, "device": "card"}]
    levels = [level for level, _ in found("card", "card", command=saying(*lines, then="raise SystemExit(1)"))]
    assert levels == [Level.FAIL, Level.OK]


def test_an_end_after_all_is_no_failure_of_a_device_and_silence_is_one() -> None:
    [warned, fine] = found(
        "one", command=saying({"number": 0, "device": "one", "n_rows": 60}, then="raise OSError('x')")
    )
    assert (warned[0], fine[0]) == (Level.WARN, Level.OK)
    assert warned[1].endswith("exited with status 1; its last words: OSError: x")
    assert [level for level, _ in found("one", command=saying())] == [Level.FAIL]


def test_without_devices_nothing_is_computed() -> None:
    assert found(command=["/nowhere"]) == []


def test_devices_that_compute_rightly_share_a_line() -> None:
    lines = [{"number": at, "device": name, "n_rows": 60} for at, name in enumerate(("one", "two"))]
    text = "streams at once get the same tokens as on the CPU: one, two"
    assert found("one", "two", command=saying(*lines)) == [(Level.OK, text)]


def test_one_that_computes_wrongly_is_named_with_how_much() -> None:
    lines = [{"number": 0, "device": "one"}, {"number": 0, "device": "one", "n_rows": 60, "n_wrong": 4}]
    text = "one computes wrong results: 4 of 60 tokens of streams at once are not those of the CPU"
    assert found("one", command=saying(*lines)) == [(Level.FAIL, text)]


@pytest.mark.parametrize(
    ("then", "end"),
    [
        ("import os; os.abort()", "the process was killed by SIGABRT"),
        ("raise SystemExit(3)", "the process exited with status 3"),
        ("import time; time.sleep(60)", "it takes more than 1 s; its driver may still compile, so run this again"),
    ],
)
def test_one_that_ends_the_computation_is_named_too(then: str, end: str) -> None:
    lines = [{"number": 0, "device": "one", "n_rows": 60}, {"number": 1, "device": "two"}]
    assert found("one", "two", command=saying(*lines, then=then), timeout_s=1) == [
        (Level.FAIL, f"streams cannot be computed on two: {end}"),
        (Level.OK, "streams at once get the same tokens as on the CPU: one"),
    ]


@pytest.mark.parametrize(
    "name", ["llvmpipe (LLVM 15.0.6, 256 bits)", "SwiftShader Device", "Microsoft Basic Render Driver"]
)
def test_a_driver_that_computes_on_the_cpu_is_no_gpu(name: str) -> None:
    (level, text), _ = found(name, command=saying({"number": 0, "device": name, "n_rows": 60}))
    assert level is Level.WARN
    assert text.startswith(f"{name} is no GPU")


@pytest.mark.slow
def test_real_devices_and_what_is_wrong_with_one_stage_of_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        rpc.library()
    except rpc.CannotBuild as reason:
        pytest.skip(str(reason))
    with rpc.devices(2) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        [right] = check_devices(report("RPC0", "RPC1"))
        assert (right.level, right.text.count("127.0.0.1:")) == (Level.OK, 2)
        monkeypatch.setenv("LOCALRUN_TEST_STAGES", "1")
        wrong = list(check_devices(report("RPC0", "RPC1")))
    assert [each.level for each in wrong] == [Level.FAIL] * 2
    assert all("computes wrong results: " in each.text and "--gpu-layers 0" in each.remedy for each in wrong)
