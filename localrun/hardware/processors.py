"""Which processors this process may use, what they are, and how many threads are worth trying on them.

A machine's number of processors says little: a container may have 2 of 64, a task may be bound to some of them
(affinity), two may be hyperthreads of one core, and some cores may be slow ones that save power. On Linux all of that
is read from files, below a root that is an argument, so that tests can make any machine. A quota (`cgroups.py`) is
rounded down: threads beyond it are stopped for a part of every period, which harms streams. Elsewhere `sysctl` (macOS)
or psutil say what they know.

psutil alone counts cores of the whole machine and knows no quota and no kinds of cores. loky's `cpu_count` looks at one
cgroup and not at those above it, rounds up, counts hyperthreads as cores where an affinity is set, and gives one number
where several are to be tried.

Does not: bind threads to processors; the system's scheduler prefers fast cores by itself.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from localrun.hardware import cgroups
from localrun.hardware.cgroups import text_of as _text
from localrun.hardware.cpu_features import cpu_facts, cpu_name

# A core that has less than this part of the best one's capacity is one to save power: 0.25 to 0.52 is usual for these,
# 0.83 and more for the middle ones of three kinds.
EFFICIENCY_SHARE = 0.7
# llama.cpp makes no more.
MOST_THREADS = 512
# With fewer threads than this a half of them is not worth trying.
LEAST_HALVES = 4

Sysctl = Callable[[str], str | None]


class Candidate(NamedTuple):
    """A number of threads, and in words what they are."""

    n_threads: int
    reason: str


class Processors(msgspec.Struct, frozen=True, kw_only=True):
    """What a process may use. `quota` is processor seconds per second, None without one.

    Cores are physical ones; `n_allowed` counts hyperthreads, of the `n_machine` that the machine has. `numbers` are the
    system's names of those allowed, as in `0-3,8`, empty where nothing is bound.
    """

    name: str
    n_machine: int
    n_allowed: int
    performance_cores: int
    efficiency_cores: int = 0
    quota: float | None = None
    numbers: str = ""

    @property
    def most_threads(self) -> int:
        """Threads that can run at once; at least 1."""
        n_threads = self.n_allowed if self.quota is None else min(self.n_allowed, int(self.quota))
        return max(1, min(n_threads, MOST_THREADS))

    @property
    def usual_threads(self) -> int:
        """One thread for each fast core: a second thread on one core, or a slow core, often only keeps the others
        waiting."""
        return self.candidates()[0].n_threads

    def candidates(self) -> tuple[Candidate, ...]:
        """Numbers worth trying, the usual one first."""
        cores = self.performance_cores + self.efficiency_cores
        is_hybrid = self.efficiency_cores > 0
        found = [Candidate(self.performance_cores, "performance cores" if is_hybrid else "cores")]
        if is_hybrid:
            found.append(Candidate(cores, "performance and efficiency cores"))
        if is_hybrid and 2 * self.performance_cores < cores:  # of three kinds, the big and the middle ones
            found.append(Candidate(2 * self.performance_cores, "performance cores and as many others"))
        if self.n_allowed > cores:
            found.append(Candidate(self.n_allowed, "hyperthreads"))
        found = [
            each if each.n_threads <= self.most_threads else Candidate(self.most_threads, self.limit) for each in found
        ]
        # A small model's threads wait for each other more than they compute, and memory may feed no more.
        found += [
            Candidate(found[0].n_threads // part, f"a {word} of the {found[0].reason}")
            for part, word in ((2, "half"), (4, "quarter"))
            if found[0].n_threads // part >= LEAST_HALVES
        ]
        return tuple({each.n_threads: each for each in reversed(found)}[n] for n in dict.fromkeys(n for n, _ in found))

    @property
    def limit(self) -> str:
        """What keeps this process from the whole machine, in words; empty if nothing does."""
        words = []
        if self.n_allowed < self.n_machine:
            words.append(f"bound to {self.n_allowed} of {self.n_machine} processors")
        if self.quota is not None and self.quota < self.n_allowed:
            words.append(f"a quota of {self.quota:g} of {self.n_machine} processors")
        return ", ".join(words)

    @property
    def kinds(self) -> str:
        """The cores, in words."""
        if self.efficiency_cores:
            cores = f"{self.performance_cores} performance and {self.efficiency_cores} efficiency cores"
        else:
            cores = f"{self.performance_cores} core{'s' if self.performance_cores != 1 else ''}"
        n_cores = self.performance_cores + self.efficiency_cores
        return cores if self.n_allowed <= n_cores else f"{cores} with {self.n_allowed} hyperthreads"

    @property
    def identity(self) -> str:
        """One text for what was measured here to be good elsewhere: the same in every process with as much to use."""
        return f"{self.name}, {self.kinds} of {self.n_machine}, at most {self.most_threads}"


def usable() -> Processors:
    """Of the calling process, now."""
    system: str = sys.platform  # a plain text, or type checkers leave out what follows on their own system
    if system == "linux":
        return of_linux(Path("/"), os.sched_getaffinity(0), n_machine=os.cpu_count(), n_cores=_psutil_cores())
    if system == "darwin":
        return of_macos(run_sysctl)
    bound: list[int] = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else []
    return elsewhere(platform.processor() or platform.machine(), os.cpu_count() or 1, bound, _psutil_cores())


def others_busy_s() -> float:
    """Processor seconds that other programs took of what this process may use, counted from some moment in the past;
    exact to some hundredths. What disturbs a measurement is the difference of two."""
    allowed = os.sched_getaffinity(0) if sys.platform == "linux" else None
    busy_s = 0.0
    try:
        counted = psutil.cpu_times(percpu=True)
    except OSError:  # as in `idle_s`
        return 0.0
    for number, times in zip(counted_processors(len(counted), Path("/")), counted, strict=True):
        if allowed is None or number in allowed:
            busy_s += sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
    return busy_s - time.process_time()


def idle_s() -> float:
    """Seconds that processors of this machine were idle, of all together, since some moment in the past."""
    try:
        times = psutil.cpu_times()
    except OSError:  # hidden, as on Android: as if all of them always were
        return time.monotonic() * (os.cpu_count() or 1)
    # Linux counts apart when a processor is idle and a program waits for a disk.
    return float(times.idle + getattr(times, "iowait", 0.0))


def unused_now(root: Path = Path("/"), *, n_looks: int = 3, pause_s: float = 0.001) -> float:
    """Processors that no other process has work for at this moment; infinite where the system does not tell.

    The most of some looks: whoever asked for something just now is still awake, and done a millisecond later.
    """
    unused, n_all = -math.inf, os.cpu_count() or 1
    for look in range(n_looks):
        if unused == n_all:
            break
        if look:
            time.sleep(pause_s)
        runnable = re.search(r"^procs_running (\d+)$", _text(root / "proc/stat") or "", re.MULTILINE)
        if runnable is None:
            return math.inf
        own = sum(_is_running(_text(path)) for path in (root / "proc/self/task").glob("*/stat"))
        unused = max(unused, n_all - max(0, int(runnable[1]) - own))
    return unused


def _is_running(stat: str | None) -> bool:
    """By a thread's line in /proc, where its state follows its name in brackets."""
    return (stat or "").rpartition(") ")[2].startswith("R")


def counted_processors(n_counted: int, root: Path) -> Sequence[int]:
    """The numbers of those that the system counts the time of, in order: processors that are switched off are left out
    there."""
    online = sorted(_numbers(_text(root / "sys/devices/system/cpu/online")))
    return online if len(online) == n_counted else range(n_counted)


def of_linux(
    root: Path, allowed: Collection[int], *, n_machine: int | None = None, n_cores: int | None = None
) -> Processors:
    """By the files below `root`. `allowed` is the affinity. `n_machine` and `n_cores` count processors and cores where
    no file does."""
    cores: dict[object, list[int]] = {}
    has_topology = False
    for number in sorted(allowed):
        core = _core(root / f"sys/devices/system/cpu/cpu{number}/topology")
        has_topology = has_topology or core is not None
        cores.setdefault(number if core is None else core, []).append(number)
    if has_topology:
        slow = _slow(root, allowed)
        n_slow = sum(numbers[0] in slow for numbers in cores.values())
    else:
        n_slow = 0
        n_cores = min(n_cores or len(allowed), len(allowed))
    board = (_text(root / "proc/device-tree/model") or "").strip("\0\n ")
    n_present = len(_numbers(_text(root / "sys/devices/system/cpu/online"))) or n_machine or len(allowed)
    return Processors(
        name=cpu_name(cpu_facts(_text(root / "proc/cpuinfo") or ""), board) or platform.machine(),
        n_machine=max(n_present, len(allowed)),
        n_allowed=max(1, len(allowed)),
        performance_cores=max(1, len(cores) - n_slow if has_topology or n_cores is None else n_cores),
        efficiency_cores=n_slow,
        quota=cgroups.quota(root),
        numbers=_ranges(allowed) if len(allowed) < n_present else "",
    )


def of_macos(sysctl: Sysctl) -> Processors:
    """By what `sysctl -n` says of a name; None for one that it does not know. There is no affinity to look at. Cores
    of level 0 are the fast ones; a Mac with an Intel processor has no levels, but hyperthreads."""

    def number(name: str) -> int:
        said = sysctl(name)
        return int(said) if said and said.strip().isdecimal() else 0

    logical = number("hw.logicalcpu") or os.cpu_count() or 1
    fast = number("hw.perflevel0.physicalcpu")
    slow = number("hw.perflevel1.physicalcpu") if fast else 0
    return Processors(
        name=(sysctl("machdep.cpu.brand_string") or platform.machine()).strip(),
        n_machine=logical,
        n_allowed=logical,
        performance_cores=fast or number("hw.physicalcpu") or logical,
        efficiency_cores=slow,
    )


def elsewhere(name: str, n_machine: int, bound: Collection[int], n_cores: int | None) -> Processors:
    """Windows and the BSDs, by what psutil says: `bound` is the affinity, empty where there is none. It does not tell
    slow cores from fast ones."""
    n_allowed = len(bound) or n_machine
    return Processors(
        name=name,
        n_machine=max(n_machine, n_allowed),
        n_allowed=n_allowed,
        performance_cores=max(1, min(n_allowed, n_cores or n_allowed)),
        numbers=_ranges(bound) if n_allowed < n_machine else "",
    )


def run_sysctl(name: str) -> str | None:
    """What macOS says of a name."""
    try:
        ended = subprocess.run(
            ["/usr/sbin/sysctl", "-n", name], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
            timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


# --- kinds of cores --------------------------------------------------------------------------------------------------


def _core(topology: Path) -> object:
    """Which core a processor belongs to; None where that is not said."""
    siblings = _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list")
    if siblings and siblings.strip():
        return siblings.strip()
    core = _text(topology / "core_id")
    return None if core is None else (_text(topology / "physical_package_id"), core.strip())


def _slow(root: Path, allowed: Collection[int]) -> set[int]:
    """Those of the allowed processors that save power; none if all do."""
    devices = root / "sys/devices"
    slow = set().union(*(_numbers(_text(devices / kind / "cpus")) for kind in ("cpu_atom", "cpu_lowpower")))
    if not slow:
        said = {number: _text(devices / f"system/cpu/cpu{number}/cpu_capacity") for number in allowed}
        capacities = {number: int(text) for number, text in said.items() if text and text.strip().isdecimal()}
        best = max(capacities.values(), default=0)
        slow = {number for number, capacity in capacities.items() if capacity < EFFICIENCY_SHARE * best}
    slow &= set(allowed)
    return slow if slow != set(allowed) else set()


def _numbers(text: str | None) -> set[int]:
    """The list `0-3,8` as numbers."""
    found: set[int] = set()
    for part in (text or "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return found


def _ranges(numbers: Collection[int]) -> str:
    """Numbers as the list `0-3,8`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _psutil_cores() -> int | None:
    count: int | None = psutil.cpu_count(logical=False)
    return count
