"""The GPUs that are there against those that the build can use, and the one command that closes the gap. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from localrun.doctor.finding import Finding, ok, size, warn
from localrun.doctor.graphics import Card, Vendor
from localrun.doctor.llama_build import BuildReport, rebuild

# The compilers that a build for a vendor's own interface needs, and what brings them.
NVCC, HIPCC, GLSLC = "nvcc", "hipcc", "glslc"
COMPILERS = (NVCC, HIPCC, GLSLC)


def check_gpu(cards: Sequence[Card], report: BuildReport, *, compilers: Collection[str]) -> Finding:
    """`compilers` are those of `COMPILERS` that are installed."""
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
        return ok("gpu", f"none here{more}; engines compute on the CPU")
    card = worthwhile[0]
    if not card.driver:
        return warn("gpu", f"{card.name}: no driver that computes serves it", _driver_remedy(card.vendor))
    if report.gpu_offload:
        backends = ", ".join(backend for backend in report.backends if backend != "CPU")
        return warn(
            "gpu", f"{card.name} ({card.driver}) is here, but the build ({backends}) sees no GPU", _unseen_remedy(card)
        )
    return warn(
        "gpu",
        f"{card.name} ({card.driver}) is here, but this build of llama.cpp cannot use it",
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
    if vendor is Vendor.NVIDIA:
        return "install NVIDIA's own driver until nvidia-smi lists the card; in a container, pass it in (--gpus all)"
    return f"install the driver of {vendor} for this system, then run this again"


def _unseen_remedy(card: Card) -> str:
    if card.vendor is Vendor.NVIDIA:
        return (
            "look at CUDA_VISIBLE_DEVICES, update the driver if it is older than the CUDA of the build, and where "
            "/dev/nvidia-uvm is missing: sudo nvidia-modprobe -u -c 0"
        )
    return "add yourself to the groups `render` and `video`, log in again, and look at HIP_VISIBLE_DEVICES"
