"""Whether llama.cpp computes rightly here: the probe of its kernels, or what it found before.

The only check that computes. It takes two seconds, and none where a verdict is kept; `--deep` asks for a new one, in
which no crash of an engine is remembered. Where localrun has no cache folder yet none is made for the verdict: the
doctor only looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from localrun import kernels
from localrun.doctor.finding import Finding, fail, ok, warn
from localrun.doctor.llama_build import rebuild
from localrun.kernel_probe import ProbeFailed, probe, probe_and_keep
from localrun.kernels import Verdict
from localrun.library_problems import OTHER_PROCESSOR

NAME = "kernels"
# For people, each kind of memory by what they know such models as.
_MEMORY = {
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
    except ProbeFailed as error:
        yield fail(NAME, f"llama.cpp was to compute something, and did not: {error}", rebuild())
        return
    yield from judge(verdict)


def judge(verdict: Verdict) -> Iterator[Finding]:
    """What a verdict means."""
    if verdict.broken:
        text = f"llama.cpp cannot compute on this processor: its kernels {verdict.broken}"
        yield fail(NAME, OTHER_PROCESSOR.text if "SIGILL" in verdict.broken else text, rebuild())
        return
    quick = ", ".join(verdict.quick_types)
    if not verdict.faults and not verdict.crashes:
        which = f"quick ones for {quick} agree with the plain ones" if quick else "there are no quick ones here"
        yield ok(NAME, f"computed with every weight type and kind of memory; {which}")
        return
    by_how: dict[str, dict[str, list[str]]] = {}
    for fault in verdict.faults:
        by_how.setdefault(fault.how.partition(" (")[0], {}).setdefault(fault.memory, []).append(fault.weight_type)
    for how, by_memory in by_how.items():
        models = _same_together({_MEMORY[memory]: types for memory, types in by_memory.items()})
        yield warn(NAME, f"quick kernels {how} for {models} models; these load without them, and are slower", rebuild())
    for crash in verdict.crashes:
        types = ", ".join(crash.weight_types)
        text = f"an engine of {crash.model} ({types}) {crash.how} and ran without the quick kernels; such models now do"
        yield warn(NAME, text, rebuild())


def _same_together(types_of: dict[str, list[str]]) -> str:
    """ "Q4_0, Q8_0 in ordinary and hybrid": kinds of memory with the same types as one."""
    kinds_of: dict[str, list[str]] = {}
    for kind, types in types_of.items():
        kinds_of.setdefault(", ".join(types), []).append(kind)
    return " and ".join(f"{types} in {', '.join(kinds)}" for types, kinds in kinds_of.items())
