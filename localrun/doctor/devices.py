"""Whether each GPU computes what the CPU computes, and whether it is one: what `localrun.engine.tools.device_check`, a
process of its own, says of the built-in model there.

A device on which streams get each other's tokens answers as quickly as any other, and nothing else shows it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec

from localrun.doctor.finding import Finding, fail, ok, warn
from localrun.doctor.llama_build import BuildReport
from localrun.models import builtin
from localrun.processes import end_in_words, last_words, run_text

NAME = "devices"
COMMAND = (sys.executable, "-P", "-m", "localrun.engine.tools.device_check")
# A driver compiles what it has never run before.
TIMEOUT_S = 120.0
# What drivers call devices that are the CPU: Mesa's, Google's, Microsoft's.
_SOFTWARE = ("llvmpipe", "lavapipe", "swiftshader", "microsoft basic render", "warp")
_WAY_OUT = "update the driver and llama.cpp; until then compute on the CPU: --gpu-layers 0"


class DeviceLine(msgspec.Struct, frozen=True):
    """A line of `localrun.engine.tools.device_check`."""

    number: int
    device: str
    n_rows: int = 0
    n_wrong: int = 0


def check_devices(
    report: BuildReport, command: Sequence[str] = COMMAND, *, timeout_s: float = TIMEOUT_S
) -> Iterator[Finding]:
    """A line for each device that is not as it should be, else one for all; nothing where there is none."""
    if not report.devices:
        return
    for name, *_ in report.devices:
        if any(word in name.lower() for word in _SOFTWARE):
            yield warn(
                NAME, f"{name} is no GPU: a driver computes on the CPU, slower than llama.cpp does by itself",
                "use --gpu-layers 0, or hide it (GGML_VK_VISIBLE_DEVICES)",
            )  # fmt: skip
    said, end = _run([*command, str(builtin.model_path())], timeout_s)
    results = {each.number: each for each in said if each.n_rows}
    right = [each.device for each in results.values() if not each.n_wrong]
    for each in results.values():
        if each.n_wrong:
            yield _judged(each)
    missing = [name for number, (name, *_) in enumerate(report.devices) if number not in results]
    if missing:
        yield fail(NAME, f"streams cannot be computed on {missing[0]}: {end or 'nothing was said of it'}", _WAY_OUT)
    elif end:
        yield warn(NAME, f"after everything was computed {end}", _WAY_OUT)
    if right:
        yield ok(NAME, f"streams at once get the same tokens as on the CPU: {', '.join(right)}")


def _judged(said: DeviceLine) -> Finding:
    return fail(
        NAME, f"{said.device} computes wrong results: {said.n_wrong} of {said.n_rows} tokens of streams at once "
        f"are not those of the CPU", _WAY_OUT,
    )  # fmt: skip


def _run(command: Sequence[str], timeout_s: float) -> tuple[list[DeviceLine], str]:
    """What was said, and how it ended if it did not end well."""
    try:
        ended = run_text(command, timeout_s)
        output, end = ended.stdout, ""
        if ended.returncode:
            end = f"the process {end_in_words(ended.returncode)}{last_words(ended.stderr)}"
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout.decode(errors="replace") if isinstance(expired.stdout, bytes) else ""
        end = f"it takes more than {timeout_s:g} s; its driver may still compile, so run this again"
    said = []
    for line in output.splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            said.append(msgspec.json.decode(line, type=DeviceLine))
    return said, end
