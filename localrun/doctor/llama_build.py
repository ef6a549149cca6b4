"""The build of llama.cpp: what a short-lived process of the engine's side says about it, and whether its kernels
compute rightly on this processor.

Does not: load the native library into this process.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from localrun.doctor import Finding, fail, ok, warn
from localrun.doctor.kernel_probe import ProbeFailed, ProbeTooSlow, probe, probe_and_keep
from localrun.hardware import kernels
from localrun.hardware.cpu_features import features, without_halves
from localrun.hardware.kernels import OTHER_PROCESSOR, Problem, Verdict, explain
from localrun.native_build.machine import Machine
from localrun.native_build.plan import make_plan
from localrun.native_build.wheels import installed
from localrun.processes import end_in_words, run_text, signal_of

TIMEOUT_S = 60.0
COMMAND = (sys.executable, "-P", "-m", "localrun.engine.tools.tasks", "build_report")
# The engine loads it the same way.
MEDIA_COMMAND = (sys.executable, "-P", "-c", "from llama_cpp import mtmd_cpp; mtmd_cpp.mtmd_default_marker()")
_BY_A_GPU = "a GPU or its driver may have ended it: look at them, or hide the GPU (CUDA_VISIBLE_DEVICES= for NVIDIA)"


class BuildReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `localrun.engine.tools.tasks build_report` prints."""

    version: str
    library: str
    backends: tuple[str, ...]
    gpu_offload: bool
    cpu_features: tuple[str, ...]
    devices: tuple[tuple[str, int, bool, int], ...]
    ggml: str = ""
    modules: tuple[str, ...] = ()
    skipped: dict[str, str] = {}


def rebuild(backend: str = "", *, python: str = sys.executable, platform: str = sys.platform) -> str:
    """The one command that builds llama.cpp again, for this processor or for a GPU; `localrun.native_build` has the
    flags."""
    program = f'"{python}"' if " " in python else python
    called = f"& {program}" if platform == "win32" and program != python else program
    return f"{called} -m localrun.native_build install --force" + (f" --backend {backend}" if backend else "")


def better_build() -> str:
    """As `rebuild`; first what has to change, where the same would come of it that is installed."""
    machine, there = Machine(), installed(sys.executable)
    plan = make_plan(machine, "" if there.get("portable") else str(there.get("backend", "")))
    is_same = plan.record(machine.environ)["key"] == there.get("key")
    first = "this compiler makes the same again; get a newer one, and name it: CC=... CXX=... " if is_same else ""
    return "; ".join([*plan.problems, first + rebuild(), *(plan.notes if is_same else ())])


def ask_build(command: Sequence[str] = COMMAND, *, timeout_s: float = TIMEOUT_S) -> BuildReport | Finding:
    """The report, or why there is none."""
    remedy = rebuild()
    try:
        ended = run_text(command, timeout_s)
    except subprocess.TimeoutExpired:
        return fail(
            "llama.cpp", f"loading it takes more than {timeout_s:g} s",
            "a GPU's driver may hang: restart the machine, or hide the GPU (CUDA_VISIBLE_DEVICES= for NVIDIA)",
        )  # fmt: skip
    if signal_of(ended.returncode) == signal.SIGILL:
        return fail("llama.cpp", "it was built for a different CPU (illegal instruction)", remedy)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines()
        problem = explain(lines[-1]) if lines else None
        if problem is not None:
            return fail("llama.cpp", problem.text, problem.remedy)
        if signal_of(ended.returncode) is not None:
            remedy = f"{_BY_A_GPU}; if it crashes all the same: {remedy}"
        return fail(
            "llama.cpp", f"it cannot be loaded: {lines[-1] if lines else end_in_words(ended.returncode)}", remedy
        )
    try:
        return msgspec.json.decode(ended.stdout.strip().splitlines()[-1], type=BuildReport)
    except (IndexError, msgspec.DecodeError) as error:
        return fail("llama.cpp", f"its report cannot be read: {error}", remedy)


def check_build(report: BuildReport) -> Iterator[Finding]:
    """The line about a build that loads, and one about each of its backends that does not."""
    ggml = f", ggml {report.ggml}" if report.ggml else ""
    text = f"llama-cpp-python {report.version}{ggml}, backends {', '.join(report.backends)}"
    modules = f" ({', '.join(report.modules)})" if report.modules else ""
    if "CPU" not in report.backends:
        yield fail("llama.cpp", f"{text}: none of its modules runs on this processor", rebuild())
    else:
        yield ok("llama.cpp", text + modules)
    for name, reason in report.skipped.items():
        problem = explain(reason) or Problem(f"{name} could not be used: {reason}", f"rebuild it: {rebuild()}")
        yield warn("llama.cpp", f"{problem.text}, so it computes on the CPU alone", problem.remedy)


def check_media(command: Sequence[str] = MEDIA_COMMAND, *, timeout_s: float = TIMEOUT_S) -> Finding:
    remedy = f"models answer to text only; rebuild llama.cpp to send them images or audio: {rebuild()}"
    try:
        ended = run_text(command, timeout_s)
    except subprocess.TimeoutExpired:
        return warn("media", f"loading libmtmd takes more than {timeout_s:g} s", remedy)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines()
        return warn(
            "media", f"libmtmd cannot be loaded: {lines[-1] if lines else end_in_words(ended.returncode)}", remedy
        )
    return ok("media", "libmtmd can be loaded, for images and audio")


def check_cpu(
    report: BuildReport, cpu_flags: Collection[str], *, machine: str, remedy: Callable[[], str] = better_build
) -> Finding:
    """`cpu_flags` are Linux's names of what the CPU can do; empty where the system does not tell."""
    known = features(machine)
    missing = [each for each in known if each.flag in cpu_flags and each.ggml not in report.cpu_features]
    if missing := without_halves(missing, report.cpu_features):
        names = ", ".join(each.ggml for each in missing)
        text = f"the build does not use {names}, which this CPU supports, so engines are slower"
        return warn("cpu", text, remedy())
    shown = ", ".join(each.ggml for each in known if each.ggml in report.cpu_features)
    if "NEON" in report.cpu_features and "DOTPROD" not in report.cpu_features:
        shown += "; no dot product, so no quick kernels"
    return ok("cpu", f"{machine}: {shown or 'no vector instructions that llama.cpp names'}")


# --- the kernels: a probe of them, or what an earlier one found ---
# The only check that computes. It takes two seconds, and none where a verdict is kept; `--deep` asks for a new one, in
# which no crash of an engine is remembered. Where localrun has no cache folder yet none is made for the verdict: the
# doctor only looks.

NAME = "kernels"
# For people, each kind of memory by what they know such models as.
_MEMORY_KINDS = {
    "attention": "ordinary", "window": "sliding-window", "recurrent": "recurrent (Mamba)", "hybrid": "hybrid",
}  # fmt: skip


def find_out(verdicts: Path, *, anew: bool) -> Verdict:
    """A new verdict. Raises ProbeFailed."""
    return probe_and_keep(verdicts, anew=anew) if verdicts.parent.is_dir() else probe()


def check_kernels(verdicts: Path, *, is_deep: bool, find_out: Callable[..., Verdict] = find_out) -> Iterator[Finding]:
    """`verdicts` is the folder where they are kept."""
    pair = kernels.present_pair()
    known = Verdict() if pair is None or is_deep else kernels.read(verdicts, pair)
    try:
        verdict = known if known.is_probed else find_out(verdicts, anew=is_deep)
    except ProbeTooSlow as error:
        yield warn(NAME, f"the test computations are not done: {error}", "run this again while the machine is idle")
        return
    except ProbeFailed as error:
        yield fail(NAME, f"a test computation with llama.cpp failed: {error}", rebuild())
        return
    yield from judge(verdict)


def judge(verdict: Verdict) -> Iterator[Finding]:
    """What a verdict means."""
    if verdict.broken:
        text = f"llama.cpp cannot compute on this processor: its kernels {verdict.broken}"
        yield fail(NAME, OTHER_PROCESSOR.text if "SIGILL" in verdict.broken else text, rebuild())
        return
    if verdict.wrong:
        text = f"llama.cpp computes {', '.join(verdict.wrong)} wrongly on this processor; such models are refused"
        yield fail(NAME, text, rebuild())
    quick = ", ".join(verdict.quick_types)
    if not verdict.faults and not verdict.crashes and not verdict.wrong:
        which = (
            f"the quick kernels for {quick} agree with the plain ones" if quick else "there are no quick kernels here"
        )
        yield ok(NAME, f"test computations with every weight type and kind of memory succeeded; {which}")
        return
    by_how: dict[str, dict[str, list[str]]] = {}
    for fault in verdict.faults:
        by_how.setdefault(fault.how.partition(" (")[0], {}).setdefault(fault.memory, []).append(fault.weight_type)
    for how, by_memory in by_how.items():
        models = _same_together({_MEMORY_KINDS[memory]: types for memory, types in by_memory.items()})
        yield warn(
            NAME, f"quick kernels {how} for {models} models; such models load without them and are slower", rebuild()
        )
    for crash in verdict.crashes:
        types = ", ".join(crash.weight_types)
        what = f"an engine of {crash.model} ({types}) {crash.how}"
        text = f"{what} and then ran without the quick kernels; such models now do"
        yield warn(NAME, text, rebuild())


def _same_together(types_of: dict[str, list[str]]) -> str:
    """ "Q4_0, Q8_0 in ordinary and hybrid": kinds of memory with the same types as one."""
    kinds_of: dict[str, list[str]] = {}
    for kind, types in types_of.items():
        kinds_of.setdefault(", ".join(types), []).append(kind)
    return " and ".join(f"{types} in {', '.join(kinds)}" for types, kinds in kinds_of.items())
