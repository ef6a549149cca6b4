"""Which GPUs this machine has, whether llama.cpp can use them or not.

Asks the PCI bus where Linux shows it, NVIDIA's own tool, and the systems' listings. Does not: load a driver or library.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

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
    nvidia = tuple(_from_nvidia_smi())
    others = _from_windows() if system == "win32" else _from_pci(sys_folder)
    return (*nvidia, *(card for card in others if not (nvidia and card.vendor is Vendor.NVIDIA)))


def _from_nvidia_smi() -> Iterator[Card]:
    lines = _lines("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    for line in lines:
        name, _, driver = line.partition(",")
        if driver.strip():
            yield Card(vendor=Vendor.NVIDIA, name=name.strip(), driver=f"driver {driver.strip()}")


def _from_pci(sys_folder: Path) -> Iterator[Card]:
    for device in sorted(sys_folder.glob("bus/pci/devices/*")):
        try:
            kind = (device / "class").read_text().strip()
            vendor = _PCI_VENDORS.get((device / "vendor").read_text().strip().lower())
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
        ended = subprocess.run(
            [program, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return ended.stdout.splitlines() if ended.returncode == 0 else []
