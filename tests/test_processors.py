"""Machines made of files, and this one under `taskset`."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from localrun.hardware.processors import (
    Processors,
    counted_processors,
    elsewhere,
    idle_s,
    of_linux,
    of_macos,
    others_busy_s,
    run_sysctl,
    unused_now,
    usable,
)
from tests.arm_machines import MACHINES, ArmMachine
from tests.says import says

V2_ROOT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_ROOT = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"


class Machine:
    """The files of a made machine, below a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: object) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def cores(self, cores: Sequence[Collection[int]]) -> None:
        """The hyperthreads of each core, by number; two cores of four are a package."""
        for index, numbers in enumerate(cores):
            for number in numbers:
                topology = f"sys/devices/system/cpu/cpu{number}/topology"
                self.write(f"{topology}/thread_siblings_list", ",".join(map(str, sorted(numbers))))
                self.write(f"{topology}/core_id", index % 2)
                self.write(f"{topology}/physical_package_id", index // 2)
        n_processors = sum(map(len, cores))
        self.write("sys/devices/system/cpu/online", f"0-{n_processors - 1}")

    def cgroup(self, own: str, *mounts: str) -> None:
        self.write("proc/self/cgroup", own)
        self.write("proc/self/mountinfo", "\n".join(["22 1 8:1 / / rw - ext4 /dev/sda1 rw", *mounts]))

    def processors(self, allowed: Collection[int]) -> Processors:
        return of_linux(self.root, allowed)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def counts(processors: Processors) -> list[int]:
    return [each.n_threads for each in processors.candidates()]


def pairs(n_cores: int) -> list[tuple[int, int]]:
    """Hyperthreads as AMD and Intel number them: the second threads come after all cores."""
    return [(number, number + n_cores) for number in range(n_cores)]


# --- topology --------------------------------------------------------------------------------------------------------


def test_sixteen_cores_with_two_threads_each(machine: Machine):
    machine.cores(pairs(16))
    machine.write("proc/cpuinfo", "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9124 16-Core")
    found = machine.processors(range(32))
    assert (found.performance_cores, found.efficiency_cores, found.n_allowed) == (16, 0, 32)
    assert [tuple(each) for each in found.candidates()] == [
        (16, "cores"), (32, "hyperthreads"), (8, "a half of the cores"), (4, "a quarter of the cores"),
    ]  # fmt: skip
    assert (found.limit, found.numbers, found.usual_threads) == ("", "", 16)
    assert found.identity == "AMD EPYC 9124 16-Core, 16 cores with 32 hyperthreads of 32, at most 32"


def test_hyperthreads_are_told_apart_by_core_and_package_where_there_are_no_lists(machine: Machine):
    machine.cores([(0, 4), (1, 5), (2, 6), (3, 7)])
    for path in machine.root.rglob("thread_siblings_list"):
        path.unlink()
    assert machine.processors(range(8)).performance_cores == 4


def test_fast_and_slow_cores_of_an_intel_hybrid(machine: Machine):
    machine.cores([*((2 * number, 2 * number + 1) for number in range(8)), *((number,) for number in range(16, 24))])
    machine.write("sys/devices/cpu_core/cpus", "0-15")
    machine.write("sys/devices/cpu_atom/cpus", "16-23")
    found = machine.processors(range(24))
    assert (found.performance_cores, found.efficiency_cores) == (8, 8)
    assert [tuple(each) for each in found.candidates()] == [
        (8, "performance cores"), (16, "performance and efficiency cores"), (24, "hyperthreads"),
        (4, "a half of the performance cores"),
    ]  # fmt: skip
    assert says(found.kinds, "8 performance", "8 efficiency", "24 hyperthreads")


def test_bound_to_the_slow_cores_these_are_all_there_is(machine: Machine):
    machine.cores([(0, 1), (2, 3), (4,), (5,), (6,), (7,)])
    machine.write("sys/devices/cpu_core/cpus", "0-3")
    machine.write("sys/devices/cpu_atom/cpus", "4-7")
    found = machine.processors({4, 5, 6, 7})
    assert (found.performance_cores, found.efficiency_cores, counts(found)) == (4, 0, [4])
    assert found.limit == "bound to 4 of 8 processors"


@pytest.mark.parametrize(
    ("capacities", "fast", "slow"),
    [
        ([446] * 4 + [871] * 3 + [1024], 4, 4),  # little, middle and prime of a telephone
        ([530] * 4 + [1024] * 4, 4, 4),  # RK3588
        ([1024] * 4, 4, 0),  # four equal ones
    ],
)
def test_big_and_little_cores_of_an_arm(machine: Machine, capacities: list[int], fast: int, slow: int):
    machine.cores([(number,) for number in range(len(capacities))])
    machine.write("proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c")
    for number, capacity in enumerate(capacities):
        machine.write(f"sys/devices/system/cpu/cpu{number}/cpu_capacity", capacity)
    found = machine.processors(range(len(capacities)))
    assert (found.name, found.performance_cores, found.efficiency_cores) == ("Neoverse-N1", fast, slow)
    assert counts(found)[: 2 if slow else 1] == ([fast, fast + slow] if slow else [fast])


def test_the_middle_cores_of_three_kinds_are_tried_with_the_big_ones(machine: Machine):
    machine.cores([(number,) for number in range(8)])
    for number, capacity in enumerate([160, 162, 160, 160, 498, 498, 1024, 1024]):
        machine.write(f"sys/devices/system/cpu/cpu{number}/cpu_capacity", capacity)
    found = machine.processors(range(8))
    assert counts(found) == [2, 8, 4]
    assert found.candidates()[2].reason == "performance cores and as many others"


@pytest.mark.parametrize("arm", MACHINES, ids=lambda arm: arm.name)
def test_an_arm_is_called_by_its_board_and_its_cores(machine: Machine, arm: ArmMachine):
    machine.write("proc/cpuinfo", arm.cpuinfo)
    if arm.board:
        machine.write("proc/device-tree/model", f"{arm.board}\0")
    assert machine.processors({0}).name == arm.called


def test_without_sys_each_processor_counts_or_what_the_system_says_of_cores(machine: Machine):
    assert machine.processors({0, 1, 2}).performance_cores == 3
    found = of_linux(machine.root, range(8), n_machine=8, n_cores=4)
    assert (found.performance_cores, found.n_allowed, found.quota, counts(found)) == (4, 8, None, [4, 8])
    assert of_linux(machine.root, {3}, n_machine=8, n_cores=4).performance_cores == 1


# --- limits ----------------------------------------------------------------------------------------------------------


def test_an_affinity_leaves_cores_and_hyperthreads(machine: Machine):
    machine.cores(pairs(8))
    found = machine.processors({0, 1, 8, 9, 3})
    assert (found.performance_cores, found.n_allowed, found.numbers) == (3, 5, "0-1,3,8-9")
    assert (counts(found), found.limit) == ([3, 5], "bound to 5 of 16 processors")
    assert machine.processors({9}).usual_threads == 1


def test_a_container_with_two_of_64_processors_by_quota(machine: Machine):
    machine.cores(pairs(32))
    machine.cgroup("0::/", V2_ROOT)
    machine.write("sys/fs/cgroup/cpu.max", "200000 100000")
    found = machine.processors(range(64))
    assert (found.quota, found.most_threads, found.performance_cores) == (2.0, 2, 32)
    assert [tuple(each) for each in found.candidates()] == [(2, "a quota of 2 of 64 processors")]


def test_a_quota_in_the_middle_leaves_what_fits_below_it(machine: Machine):
    machine.cores(pairs(32))
    machine.cgroup("0::/", V2_ROOT)
    machine.write("sys/fs/cgroup/cpu.max", "4000000 100000")
    assert counts(machine.processors(range(64))) == [32, 40, 16, 8]


@pytest.mark.parametrize(("quota", "n_threads"), [("150000 100000", 1), ("50000 100000", 1), ("max 100000", 4)])
def test_a_part_of_a_processor_is_no_thread_but_one_there_must_be(machine: Machine, quota: str, n_threads: int):
    machine.cores([(number,) for number in range(4)])
    machine.cgroup("0::/", V2_ROOT)
    machine.write("sys/fs/cgroup/cpu.max", quota)
    assert machine.processors(range(4)).usual_threads == n_threads


def test_the_least_quota_on_the_way_up_counts(machine: Machine):
    machine.cores([(number,) for number in range(16)])
    machine.cgroup("0::/kubepods.slice/pod.slice/box.scope", V2_ROOT)
    machine.write("sys/fs/cgroup/kubepods.slice/cpu.max", "1200000 100000")
    machine.write("sys/fs/cgroup/kubepods.slice/pod.slice/cpu.max", "300000 100000")
    machine.write("sys/fs/cgroup/kubepods.slice/pod.slice/box.scope/cpu.max", "max 100000")
    machine.write("sys/fs/cgroup/other.slice/cpu.max", "100000 100000")
    assert machine.processors(range(16)).quota == 3.0


def test_version_1_too_and_beside_a_version_2_without_the_controller(machine: Machine):
    machine.cores([(number,) for number in range(8)])
    hybrid = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    machine.cgroup("4:memory:/\n3:cpu,cpuacct:/user/me\n0::/user/me", V1_ROOT, hybrid)
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", -1)
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100000)
    machine.write("sys/fs/cgroup/cpu,cpuacct/user/cpu.cfs_quota_us", 250000)
    machine.write("sys/fs/cgroup/cpu,cpuacct/user/cpu.cfs_period_us", 50000)
    assert machine.processors(range(8)).quota == 5.0


@pytest.mark.parametrize("own", ["/docker/4711", "/", "/../../elsewhere"])
def test_in_a_container_its_own_cgroup_is_the_mount(machine: Machine, own: str):
    """Mounted is the cgroup of the container; what `/proc` calls it is seen from outside, from inside, or hidden."""
    machine.cores([(number,) for number in range(8)])
    mount = "32 31 0:29 /docker/4711 /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu"
    machine.cgroup(f"3:cpu:{own}", mount)
    machine.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", 200000)
    machine.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", 100000)
    assert machine.processors(range(8)).quota == 2.0


def test_files_that_make_no_sense_are_no_limit(machine: Machine):
    machine.cores([(0,), (1,)])
    machine.cgroup("garbage\n0::/x", "garbage", "1 2 - cgroup2", V2_ROOT)
    machine.write("sys/fs/cgroup/cpu.max", "200000 0")
    machine.write("sys/fs/cgroup/x/cpu.max", "a b c")
    assert (machine.processors({0, 1}).quota, machine.processors({0, 1}).usual_threads) == (None, 2)


# --- other systems ---------------------------------------------------------------------------------------------------


def test_fast_and_slow_cores_of_a_mac():
    said = {
        "machdep.cpu.brand_string": "Apple M4 Pro\n", "hw.logicalcpu": "14\n", "hw.physicalcpu": "14\n",
        "hw.perflevel0.physicalcpu": "10\n", "hw.perflevel1.physicalcpu": "4\n",
    }  # fmt: skip
    found = of_macos(said.get)
    assert (found.name, found.performance_cores, found.efficiency_cores) == ("Apple M4 Pro", 10, 4)
    assert counts(found) == [10, 14, 5]


def test_a_mac_with_an_intel_processor_has_hyperthreads():
    said = {"machdep.cpu.brand_string": "Intel(R) Core(TM) i7", "hw.logicalcpu": "8\n", "hw.physicalcpu": "4\n"}
    found = of_macos(said.get)
    assert (found.performance_cores, found.efficiency_cores, counts(found)) == (4, 0, [4, 8])


def test_a_program_that_is_not_there_says_nothing(monkeypatch: pytest.MonkeyPatch):
    def missing(*arguments: object, **options: object) -> None:
        raise FileNotFoundError("/usr/sbin/sysctl")

    monkeypatch.setattr(subprocess, "run", missing)
    assert run_sysctl("hw.logicalcpu") is None
    assert of_macos(run_sysctl).n_allowed == os.cpu_count()


def test_windows_by_what_psutil_says():
    found = elsewhere("Intel64 Family 6", 24, range(24), 16)
    assert (counts(found), found.limit) == ([16, 24, 8, 4], "")
    found = elsewhere("Intel64 Family 6", 24, [0, 1, 2, 3], 16)
    assert (counts(found), found.limit, found.numbers) == ([4], "bound to 4 of 24 processors", "0-3")


# --- this machine ----------------------------------------------------------------------------------------------------


def test_processors_that_nobody_else_uses(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert unused_now(machine.root) == math.inf, "the system does not say"
    machine.write("proc/stat", "cpu  1 2 3\nprocs_running 4\nprocs_blocked 0")
    machine.write("proc/self/task/7/stat", "7 (a (strange) name) R 1 2")
    machine.write("proc/self/task/8/stat", "8 (python) S 1 2")
    assert unused_now(machine.root, pause_s=0.0) == 8 - 3


def test_this_machine_says_what_is_idle_and_unused():
    assert idle_s() >= 0
    assert unused_now() <= (os.cpu_count() or 1) or sys.platform != "linux"


def test_where_the_system_hides_it_nobody_else_is_busy(monkeypatch: pytest.MonkeyPatch):
    """Android lets no program read /proc/stat."""

    def refused(*, percpu: bool = False) -> None:
        raise PermissionError("/proc/stat")

    monkeypatch.setattr("psutil.cpu_times", refused)
    before_s = idle_s()
    time.sleep(0.01)
    assert idle_s() - before_s >= 0.01 * (os.cpu_count() or 1)
    assert others_busy_s() == 0


def test_processors_that_are_switched_off_are_not_counted(machine: Machine):
    machine.write("sys/devices/system/cpu/online", "0,2-3")
    assert list(counted_processors(3, machine.root)) == [0, 2, 3]
    assert list(counted_processors(4, machine.root)) == [0, 1, 2, 3], "one was switched on meanwhile"


def test_this_machine_has_something():
    found = usable()
    assert 1 <= found.usual_threads <= found.most_threads <= found.n_machine
    assert found.name


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_a_process_that_is_bound_to_one_processor_uses_one_thread():
    first = str(min(os.sched_getaffinity(0)))
    program = (
        "from localrun.hardware.processors import usable; found = usable(); print(found.usual_threads, found.numbers)"
    )
    command = ["taskset", "-c", first, sys.executable, "-c", program]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert said[0] == "1"
    assert said[1:] == ([first] if (os.cpu_count() or 1) > 1 else [])


def test_what_sysctl_says_ends_without_its_line_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rosetta is known by the text "1"."""
    said = subprocess.CompletedProcess([], 0, stdout="1\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    assert run_sysctl("sysctl.proc_translated") == "1"
