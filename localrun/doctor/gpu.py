"""Which GPUs this machine has, which of them the build can use, the one command that closes the gap, and whether each
computes what the CPU computes.

`cards` asks the PCI bus where Linux shows it, NVIDIA's own tool, the firmware of NVIDIA's boards, and the systems'
listings. Does not: load a driver or library.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from localrun.doctor import Finding, fail, ok, size, warn
from localrun.doctor.llama_build import BuildReport, rebuild
from localrun.models import builtin
from localrun.native_build.machine import Machine, tegra, tool
from localrun.processes import SYSTEM_ENCODING, end_in_words, last_words, run_text

TIMEOUT_S = 15.0
_DISPLAY_CLASS = "0x03"


class Vendor(StrEnum):
    NVIDIA = "NVIDIA"
    AMD = "AMD"
    INTEL = "Intel"
    APPLE = "Apple"


_PCI_VENDORS = {"0x10de": Vendor.NVIDIA, "0x1002": Vendor.AMD, "0x8086": Vendor.INTEL}


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """`driver` is what serves it; empty where nothing does, so nobody can use it."""

    vendor: Vendor
    name: str
    driver: str = ""


def cards(*, sys_folder: Path = Path("/sys"), system: str = sys.platform, machine: str = "") -> tuple[Card, ...]:
    """The GPUs. A card that NVIDIA's tool knows is named by it, all others by their vendor."""
    if system == "darwin":
        is_apple = (machine or platform.machine()) == "arm64"
        return (Card(vendor=Vendor.APPLE, name="Apple GPU", driver="Metal"),) if is_apple else ()
    nvidia = tuple(_from_nvidia_smi()) or tuple(_from_board(sys_folder))
    others = _from_windows() if system == "win32" else _from_pci(sys_folder)
    return (*nvidia, *(card for card in others if not (nvidia and card.vendor is Vendor.NVIDIA)))


def _from_nvidia_smi() -> Iterator[Card]:
    lines = _lines("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    for line in lines:
        name, _, driver = line.partition(",")
        if driver.strip():
            yield Card(vendor=Vendor.NVIDIA, name=name.strip(), driver=f"driver {driver.strip()}")


def _from_board(sys_folder: Path) -> Iterator[Card]:
    """NVIDIA's Jetson: its GPU is on no PCI bus, and older systems of it have no nvidia-smi."""
    name, _ = tegra()
    if name:
        driver = "driver nvgpu" if (sys_folder / "module/nvgpu").exists() else ""
        yield Card(vendor=Vendor.NVIDIA, name=name, driver=driver)


def _from_pci(sys_folder: Path) -> Iterator[Card]:
    for device in sorted(sys_folder.glob("bus/pci/devices/*")):
        try:
            kind = (device / "class").read_text("ascii").strip()
            vendor = _PCI_VENDORS.get((device / "vendor").read_text("ascii").strip().lower())
        except OSError:
            continue
        if vendor is None or not kind.startswith(_DISPLAY_CLASS):
            continue
        link = device / "driver"
        driver = link.resolve().name if link.exists() else ""
        # Its own driver answers nvidia-smi; any other one shows pictures, and computes nothing.
        if vendor is Vendor.NVIDIA:
            driver = ""
        yield Card(vendor=vendor, name=f"{vendor} GPU", driver=driver)


def _from_windows() -> Iterator[Card]:
    query = "Get-CimInstance Win32_VideoController | ForEach-Object { $_.Name + '|' + $_.DriverVersion }"
    for line in _lines("powershell", "-NoProfile", "-Command", query):
        name, _, driver = line.partition("|")
        for vendor in Vendor:
            if vendor.lower() in name.lower() or (vendor is Vendor.AMD and "radeon" in name.lower()):
                yield Card(vendor=vendor, name=name.strip(), driver=driver.strip() and f"driver {driver.strip()}")
                break


def _lines(*command: str) -> list[str]:
    program = shutil.which(command[0])
    if program is None:
        return []
    try:
        ended = run_text([program, *command[1:]], TIMEOUT_S, encoding=SYSTEM_ENCODING)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return ended.stdout.splitlines() if ended.returncode == 0 else []


# The compilers that a build for a vendor's own interface needs, and what brings them.
NVCC, HIPCC, GLSLC = "nvcc", "hipcc", "glslc"
_FOLDERS = {NVCC: ("CUDA_HOME", "/usr/local/cuda"), HIPCC: ("ROCM_PATH", "/opt/rocm"), GLSLC: ("VULKAN_SDK", "")}


def compilers(machine: Machine) -> list[str]:
    """Those that are installed, as a build will find them."""
    return [name for name, (variable, folder) in _FOLDERS.items() if tool(machine, name, variable, folder)]


def check_gpu(cards: Sequence[Card], report: BuildReport, *, compilers: Collection[str]) -> Finding:
    """`compilers` are those that are installed."""
    if report.devices:
        devices = [
            f"{name}, {size(free_bytes)} of {size(total_bytes)} free"
            for name, free_bytes, _, total_bytes in report.devices
        ]
        return ok("gpu", f"used: {'; '.join(devices)}")
    # Graphics built into a processor by Intel compute hardly faster than its cores.
    worthwhile = [card for card in cards if card.vendor is not Vendor.INTEL]
    if not worthwhile:
        more = " besides Intel graphics" if cards else ""
        return ok("gpu", f"none found{more}; engines run on the CPU")
    card = worthwhile[0]
    if not card.driver:
        return warn("gpu", f"{card.name}: it has no driver for computing", _driver_remedy(card.vendor))
    if report.gpu_offload:
        backends = ", ".join(backend for backend in report.backends if backend != "CPU")
        return warn(
            "gpu",
            f"{card.name} ({card.driver}) was found, but the build ({backends}) sees no GPU",
            _unseen_remedy(card),
        )
    return warn(
        "gpu",
        f"{card.name} ({card.driver}) was found, but this build of llama.cpp cannot use it",
        _build_remedy(card.vendor, compilers),
    )


def _build_remedy(vendor: Vendor, compilers: Collection[str]) -> str:
    if vendor is Vendor.APPLE:
        return rebuild("metal")
    if vendor is Vendor.NVIDIA:
        first = "" if NVCC in compilers else "install the CUDA toolkit (nvcc), then: "
        return first + rebuild("cuda")
    if HIPCC in compilers:
        return rebuild("rocm")
    first = "" if GLSLC in compilers else "install the Vulkan SDK (glslc and its headers), then: "
    return first + rebuild("vulkan")


def _driver_remedy(vendor: Vendor) -> str:
    if vendor is Vendor.NVIDIA and any(tegra()):
        return "install NVIDIA's JetPack, whose driver it is (nvgpu)"
    if vendor is Vendor.NVIDIA:
        return "install NVIDIA's own driver until nvidia-smi lists the card; in a container, pass it in (--gpus all)"
    return f"install the driver of {vendor} for this system, then run this again"


def _unseen_remedy(card: Card) -> str:
    is_linux = sys.platform == "linux"
    if card.vendor is Vendor.APPLE:
        return "a Mac that is a virtual machine has no GPU for Metal: run localrun on the Mac itself"
    if card.vendor is Vendor.NVIDIA:
        if any(tegra()):
            return "look at CUDA_VISIBLE_DEVICES; in a container, pass it in (--runtime nvidia)"
        text = "look at CUDA_VISIBLE_DEVICES, update the driver if it is older than the CUDA of the build"
        return text + (", and where /dev/nvidia-uvm is missing: sudo nvidia-modprobe -u -c 0" if is_linux else "")
    if not is_linux:
        return "update the driver, and look at HIP_VISIBLE_DEVICES and GGML_VK_VISIBLE_DEVICES"
    return "add yourself to the groups `render` and `video`, log in again, and look at HIP_VISIBLE_DEVICES"


# --- what `device_check` of `localrun.engine.tools.tasks` says of the built-in model on each device ---
# A device on which streams get each other's tokens answers as quickly as any other, and nothing else shows it.

NAME = "devices"
COMMAND = (sys.executable, "-P", "-m", "localrun.engine.tools.tasks", "device_check")
# A driver compiles what it has never run before.
CHECK_TIMEOUT_S = 120.0
# What drivers call devices that are the CPU: Mesa's, Google's, Microsoft's.
_SOFTWARE = ("llvmpipe", "lavapipe", "swiftshader", "microsoft basic render", "warp")
_WAY_OUT = "update the driver and llama.cpp; until then compute on the CPU: --gpu-layers 0"


class DeviceLine(msgspec.Struct, frozen=True):
    """A line of `device_check`."""

    number: int
    device: str
    n_rows: int = 0
    n_wrong: int = 0


def check_devices(
    report: BuildReport, command: Sequence[str] = COMMAND, *, timeout_s: float = CHECK_TIMEOUT_S
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
            yield fail(
                NAME, f"{each.device} computes wrong results: {each.n_wrong} of {each.n_rows} tokens of streams at "
                f"once are not those of the CPU", _WAY_OUT,
            )  # fmt: skip
    missing = [name for number, (name, *_) in enumerate(report.devices) if number not in results]
    if missing:
        yield fail(NAME, f"streams cannot be computed on {missing[0]}: {end or 'nothing was said of it'}", _WAY_OUT)
    elif end:
        yield warn(NAME, f"after everything was computed {end}", _WAY_OUT)
    if right:
        yield ok(NAME, f"streams at once get the same tokens as on the CPU: {', '.join(right)}")


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
