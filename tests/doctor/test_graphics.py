"""Finding the cards: by the PCI bus, by nvidia-smi, by the kind of machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from localrun.doctor.graphics import Card, Vendor, cards

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs programs with a #! line, and links")


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing in it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def add_tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def add_device(root: Path, slot: str, vendor: str, kind: str, driver: str = "") -> None:
    device = root / "bus/pci/devices" / slot
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")
    if driver:
        (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(root / "drivers" / driver)


def test_cards_of_the_pci_bus(tmp_path: Path):
    add_device(tmp_path, "0000:00:02.0", "0x8086", "0x030000", "i915")
    add_device(tmp_path, "0000:00:1f.0", "0x8086", "0x060100")  # no graphics
    add_device(tmp_path, "0000:03:00.0", "0x1002", "0x038000", "amdgpu")
    add_device(tmp_path, "0000:04:00.0", "0x1af4", "0x030000")  # of a virtual machine
    # Its pictures come from nouveau, which computes nothing.
    add_device(tmp_path, "0000:05:00.0", "0x10de", "0x030200", "nouveau")
    assert cards(sys_folder=tmp_path, system="linux") == (
        Card(vendor=Vendor.INTEL, name="Intel GPU", driver="i915"),
        Card(vendor=Vendor.AMD, name="AMD GPU", driver="amdgpu"),
        Card(vendor=Vendor.NVIDIA, name="NVIDIA GPU", driver=""),
    )


def test_nvidias_own_tool_knows_more_than_the_bus(tmp_path: Path, tools: Path):
    add_device(tmp_path, "0000:05:00.0", "0x10de", "0x030200", "nvidia")
    add_tool(tools, "nvidia-smi", "echo 'NVIDIA H100, 550.54'; echo 'NVIDIA L4, 550.54'")
    assert cards(sys_folder=tmp_path, system="linux") == (
        Card(vendor=Vendor.NVIDIA, name="NVIDIA H100", driver="driver 550.54"),
        Card(vendor=Vendor.NVIDIA, name="NVIDIA L4", driver="driver 550.54"),
    )


def test_a_tool_that_fails_leaves_the_card_without_a_driver(tmp_path: Path, tools: Path):
    add_device(tmp_path, "0000:05:00.0", "0x10de", "0x030200", "nvidia")
    add_tool(tools, "nvidia-smi", "echo 'No devices were found, sorry'; exit 6")
    assert cards(sys_folder=tmp_path, system="linux") == (Card(vendor=Vendor.NVIDIA, name="NVIDIA GPU", driver=""),)


def test_windows_lists_its_video_controllers(tools: Path):
    add_tool(tools, "powershell", "echo 'AMD Radeon RX 7600|32.0.1'; echo 'Microsoft Basic Display Adapter|10.0'")
    assert cards(system="win32") == (Card(vendor=Vendor.AMD, name="AMD Radeon RX 7600", driver="driver 32.0.1"),)


def test_macs_with_apples_processor_have_its_gpu():
    assert [card.vendor for card in cards(system="darwin", machine="arm64")] == [Vendor.APPLE]
    assert cards(system="darwin", machine="x86_64") == ()


def test_no_bus_no_cards(tmp_path: Path):
    assert cards(sys_folder=tmp_path / "none", system="linux") == ()
