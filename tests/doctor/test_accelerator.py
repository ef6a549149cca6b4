"""The GPUs that are there against those that the build can use."""

from __future__ import annotations

import sys

import pytest

from localrun.doctor.accelerator import check_gpu
from localrun.doctor.finding import Level
from localrun.doctor.graphics import Card, Vendor
from localrun.doctor.llama_build import BuildReport

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
        (NVIDIA, [], f"install the CUDA toolkit (nvcc), then: {REBUILD} cuda"),
        (AMD, ["hipcc", "glslc"], f"{REBUILD} rocm"),
        (AMD, ["glslc"], f"{REBUILD} vulkan"),
        (APPLE, [], f"{REBUILD} metal"),
    ],
)
def test_a_gpu_that_the_build_cannot_use_comes_with_the_one_command(card, compilers, remedy):
    found = check_gpu([card], report(), compilers=compilers)
    assert (found.level, found.remedy) == (Level.WARN, remedy)
    assert f"{card.name} ({card.driver}) is here, but this build of llama.cpp cannot use it" == found.text


def test_a_vulkan_build_needs_its_tools_first():
    assert check_gpu([AMD], report(), compilers=[]).remedy.startswith("install the Vulkan SDK")


def test_gpus_in_use_are_listed_with_their_memory():
    devices = (("RTX 4090", 20_000_000_000, False, 24_000_000_000), ("RTX 3060", 1, False, 12_000_000_000))
    found = check_gpu([NVIDIA, NVIDIA], report(*devices, backends=("CUDA", "CPU")), compilers=[])
    assert found.level is Level.OK
    assert found.text == "used: RTX 4090, 20.0 GB of 24.0 GB free; RTX 3060, 0 MB of 12.0 GB free"


def test_without_one_that_is_worth_it_the_cpu_is_fine():
    assert check_gpu([], report(), compilers=[]).text == "none here; engines compute on the CPU"
    assert check_gpu([INTEL], report(), compilers=[]).level is Level.OK


def test_a_card_without_a_driver_needs_that_first():
    bare = Card(vendor=Vendor.NVIDIA, name="NVIDIA GPU")
    found = check_gpu([bare], report(backends=("CUDA", "CPU")), compilers=["nvcc"])
    assert found.level is Level.WARN
    assert "nvidia-smi lists the card" in found.remedy


def test_a_gpu_build_that_sees_none_says_where_to_look():
    found = check_gpu([NVIDIA], report(backends=("CUDA", "CPU")), compilers=[])
    assert found.text == "NVIDIA RTX 4090 (driver 560.1) is here, but the build (CUDA) sees no GPU"
    assert "CUDA_VISIBLE_DEVICES" in found.remedy
    assert "/dev/nvidia-uvm" in found.remedy
    assert "render" in check_gpu([AMD], report(backends=("HIP", "CPU")), compilers=[]).remedy
