"""Finding the cards: by the PCI bus, by nvidia-smi, by the kind of machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from localrun.doctor import Level
from localrun.doctor.gpu import Card, Vendor, cards, check_gpu, compilers
from localrun.doctor.llama_build import BuildReport
from localrun.native_build import machine as build_machine
from localrun.native_build.machine import Machine
from tests.says import says

with_links = pytest.mark.skipif(sys.platform == "win32", reason="needs programs with a #! line, and links")


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


@with_links
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


@with_links
def test_nvidias_own_tool_knows_more_than_the_bus(tmp_path: Path, tools: Path):
    add_device(tmp_path, "0000:05:00.0", "0x10de", "0x030200", "nvidia")
    add_tool(tools, "nvidia-smi", "echo 'NVIDIA H100, 550.54'; echo 'NVIDIA L4, 550.54'")
    assert cards(sys_folder=tmp_path, system="linux") == (
        Card(vendor=Vendor.NVIDIA, name="NVIDIA H100", driver="driver 550.54"),
        Card(vendor=Vendor.NVIDIA, name="NVIDIA L4", driver="driver 550.54"),
    )


@with_links
def test_a_tool_that_fails_leaves_the_card_without_a_driver(tmp_path: Path, tools: Path):
    add_device(tmp_path, "0000:05:00.0", "0x10de", "0x030200", "nvidia")
    add_tool(tools, "nvidia-smi", "echo 'No devices were found, sorry'; exit 6")
    assert cards(sys_folder=tmp_path, system="linux") == (Card(vendor=Vendor.NVIDIA, name="NVIDIA GPU", driver=""),)


@with_links
def test_windows_lists_its_video_controllers(tools: Path):
    add_tool(tools, "powershell", "echo 'AMD Radeon RX 7600|32.0.1'; echo 'Microsoft Basic Display Adapter|10.0'")
    assert cards(system="win32") == (Card(vendor=Vendor.AMD, name="AMD Radeon RX 7600", driver="driver 32.0.1"),)


@with_links
def test_macs_with_apples_processor_have_its_gpu():
    assert [card.vendor for card in cards(system="darwin", machine="arm64")] == [Vendor.APPLE]
    assert cards(system="darwin", machine="x86_64") == ()


@with_links
def test_nvidias_boards_are_known_by_their_firmware(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_machine, "device_tree", lambda _: "nvidia,p3737-0000+p3701-0000 nvidia,tegra234")
    (without_driver,) = cards(sys_folder=tmp_path, system="linux")
    assert without_driver == Card(vendor=Vendor.NVIDIA, name="NVIDIA Orin")
    assert "JetPack" in check_gpu([without_driver], report(), compilers=[]).remedy
    (tmp_path / "module/nvgpu").mkdir(parents=True)
    (card,) = cards(sys_folder=tmp_path, system="linux")
    assert card.driver == "driver nvgpu"
    assert check_gpu([card], report(), compilers=["nvcc"]).remedy == f"{REBUILD} cuda"
    unseen = check_gpu([card], report(backends=("CUDA", "CPU")), compilers=[]).remedy
    assert "--runtime nvidia" in unseen
    assert "nvidia-uvm" not in unseen
    add_tool(tools, "nvidia-smi", "echo 'Orin (nvgpu), 540.4.0'")
    assert [card.name for card in cards(sys_folder=tmp_path, system="linux")] == ["Orin (nvgpu)"]


def test_a_toolkit_that_is_not_on_the_path_is_there_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "cuda/bin").mkdir(parents=True)
    (tmp_path / "cuda/bin/nvcc").touch(mode=0o755)
    nowhere = {"PATH": "", "ROCM_PATH": str(tmp_path), "VULKAN_SDK": str(tmp_path)}
    assert compilers(Machine(environ=nowhere | {"CUDA_HOME": str(tmp_path / "cuda")})) == ["nvcc"]
    assert compilers(Machine(environ=nowhere | {"CUDA_HOME": str(tmp_path)})) == []


def test_no_bus_no_cards(tmp_path: Path):
    assert cards(sys_folder=tmp_path / "none", system="linux") == ()


NVIDIA = Card(vendor=Vendor.NVIDIA, name="NVIDIA RTX 4090", driver="driver 560.1")
AMD = Card(vendor=Vendor.AMD, name="AMD GPU", driver="amdgpu")
INTEL = Card(vendor=Vendor.INTEL, name="Intel GPU", driver="i915")
APPLE = Card(vendor=Vendor.APPLE, name="Apple GPU", driver="Metal")
REBUILD = f"{sys.executable} -m localrun.native_build install --force --backend"


def report(*devices: tuple[str, int, bool, int], backends: tuple[str, ...] = ("CPU",)) -> BuildReport:
    return BuildReport(
        version="0.3.36", library="/lib", backends=backends, gpu_offload=len(backends) > 1, cpu_features=(),
        devices=devices,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("card", "compilers", "remedy"),
    [
        (NVIDIA, ["nvcc"], f"{REBUILD} cuda"),
        (NVIDIA, [], f"(nvcc), then: {REBUILD} cuda"),
        (AMD, ["hipcc", "glslc"], f"{REBUILD} rocm"),
        (AMD, ["glslc"], f"{REBUILD} vulkan"),
        (APPLE, [], f"{REBUILD} metal"),
    ],
)
def test_a_gpu_that_the_build_cannot_use_comes_with_the_one_command(card, compilers, remedy):
    found = check_gpu([card], report(), compilers=compilers)
    assert found.level is Level.WARN
    assert found.remedy.endswith(remedy)
    assert says(found.text, card.name, card.driver)


def test_a_vulkan_build_needs_its_tools_first():
    assert check_gpu([AMD], report(), compilers=[]).remedy.startswith("install the Vulkan SDK")


@pytest.mark.parametrize(
    ("system", "card", "words", "others"),
    [
        ("linux", NVIDIA, "nvidia-modprobe", "virtual machine"),
        ("linux", AMD, "`render`", "virtual machine"),
        ("win32", NVIDIA, "CUDA_VISIBLE_DEVICES", "modprobe"),
        ("win32", AMD, "HIP_VISIBLE_DEVICES", "`render`"),
        ("darwin", APPLE, "virtual machine", "`render`"),
    ],
)
def test_what_is_told_of_a_gpu_that_the_build_does_not_see_is_for_this_system(
    monkeypatch: pytest.MonkeyPatch, system: str, card: Card, words: str, others: str
):
    monkeypatch.setattr(sys, "platform", system)
    remedy = check_gpu([card], report(backends=("GPU", "CPU")), compilers=[]).remedy
    assert words in remedy
    assert others not in remedy


def test_gpus_in_use_are_listed_with_their_memory():
    devices = (("RTX 4090", 20_000_000_000, False, 24_000_000_000), ("RTX 3060", 1, False, 12_000_000_000))
    found = check_gpu([NVIDIA, NVIDIA], report(*devices, backends=("CUDA", "CPU")), compilers=[])
    assert found.level is Level.OK
    assert says(found.text, "RTX 4090, 20.0 GB of 24.0 GB", "RTX 3060, 0 MB of 12.0 GB")


def test_without_one_that_is_worth_it_the_cpu_is_fine():
    assert check_gpu([], report(), compilers=[]).level is Level.OK
    assert check_gpu([INTEL], report(), compilers=[]).level is Level.OK


def test_a_card_without_a_driver_needs_that_first():
    bare = Card(vendor=Vendor.NVIDIA, name="NVIDIA GPU")
    found = check_gpu([bare], report(backends=("CUDA", "CPU")), compilers=["nvcc"])
    assert found.level is Level.WARN
    assert "nvidia-smi lists the card" in found.remedy


def test_a_gpu_build_that_sees_none_says_where_to_look():
    found = check_gpu([NVIDIA], report(backends=("CUDA", "CPU")), compilers=[])
    assert says(found.text, "NVIDIA RTX 4090", "560.1", "CUDA")
    assert "CUDA_VISIBLE_DEVICES" in found.remedy
    assert "/dev/nvidia-uvm" in found.remedy
    assert "render" in check_gpu([AMD], report(backends=("HIP", "CPU")), compilers=[]).remedy
