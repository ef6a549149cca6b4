"""What a processor has that makes llama.cpp faster, and what processors are called: one table for the build, the doctor
and the count of threads.

Linux lists flags in /proc/cpuinfo, llama.cpp names features, compilers define macros, and on ARM take tags of `-march`.
Needs the standard library alone, since the build runs before anything is installed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Feature(NamedTuple):
    """One feature in everybody's words. `known_by` are the first compilers that know it, empty for all that compile
    llama.cpp."""

    ggml: str
    flag: str
    macro: str
    known_by: str = ""
    tag: str = ""


X86 = (
    Feature("AVX", "avx", "__AVX__"),
    Feature("AVX2", "avx2", "__AVX2__"),
    Feature("FMA", "fma", "__FMA__"),
    Feature("F16C", "f16c", "__F16C__"),
    Feature("AVX512", "avx512f", "__AVX512F__"),
    Feature("AVX_VNNI", "avx_vnni", "__AVXVNNI__", "GCC 11 and clang 12"),
    Feature("AVX512_VNNI", "avx512_vnni", "__AVX512VNNI__"),
    Feature("AVX512_BF16", "avx512_bf16", "__AVX512BF16__", "GCC 10 and clang 9"),
)
ARM = (
    Feature("NEON", "asimd", "__ARM_NEON"),
    Feature("DOTPROD", "asimddp", "__ARM_FEATURE_DOTPROD", tag="dotprod"),
    Feature("FP16_VA", "asimdhp", "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC", tag="fp16"),
    Feature("MATMUL_INT8", "i8mm", "__ARM_FEATURE_MATMUL_INT8", "GCC 10 and clang 11", tag="i8mm"),
    Feature("SVE", "sve", "__ARM_FEATURE_SVE", "GCC 10 and clang 11", tag="sve"),
)


def features(machine: str) -> tuple[Feature, ...]:
    """Those that a `machine`, as `platform` names it, may have."""
    return {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}.get(machine.lower(), ())


def without_halves(missing: list[str], used: Collection[str]) -> list[str]:
    """AVX_VNNI is half as wide as AVX512_VNNI, which is used instead where there are both."""
    return [name for name in missing if not (name == "AVX_VNNI" and "AVX512_VNNI" in used)]


# Apple's have many numbers for one processor: those of the second digit are one generation.
_PARTS = {
    "0x41": "d03 Cortex-A53,d04 Cortex-A35,d05 Cortex-A55,d07 Cortex-A57,d08 Cortex-A72,d09 Cortex-A73,d0a Cortex-A75,"
    "d0b Cortex-A76,d0c Neoverse-N1,d0d Cortex-A77,d40 Neoverse-V1,d41 Cortex-A78,d42 Cortex-A78AE,d44 Cortex-X1,"
    "d46 Cortex-A510,d47 Cortex-A710,d48 Cortex-X2,d49 Neoverse-N2,d4d Cortex-A715,d4e Cortex-X3,d4f Neoverse-V2,"
    "d80 Cortex-A520,d81 Cortex-A720,d82 Cortex-X4,d84 Neoverse-V3,d85 Cortex-X925,d87 Cortex-A725,d8e Neoverse-N3",
    "0x43": "0af ThunderX2",
    "0x46": "001 A64FX",
    "0x4e": "004 Carmel",
    "0x51": "001 Oryon",
    "0x61": "000 Apple's in a virtual machine,02 Apple M1,03 Apple M2,04 Apple M3,05 Apple M4",
    "0xc0": "ac3 Ampere-1,ac4 Ampere-1A",
}


def cpu_facts(cpuinfo: str) -> list[dict[str, str]]:
    """The fields of each processor in /proc/cpuinfo."""
    blocks = (block.splitlines() for block in cpuinfo.split("\n\n") if block.strip())
    pairs = ([line.partition(":") for line in block] for block in blocks)
    return [{name.strip(): value.strip() for name, _, value in block} for block in pairs]


def cpu_name(facts: list[dict[str, str]], board: str = "") -> str:
    """What the processor is called, empty if nothing says it; on ARM its board and each kind of core."""
    for name in ("model name", "cpu model", "uarch"):
        if found := [each[name] for each in facts if each.get(name)]:
            return found[0]
    parts = dict.fromkeys((each.get("CPU implementer", ""), each["CPU part"]) for each in facts if "CPU part" in each)
    kinds = dict.fromkeys(_part_name(*part) for part in parts)
    # A virtual machine's is "linux,dummy-virt".
    return ", ".join(filter(None, [board if "dummy" not in board else "", " and ".join(kinds)])) if kinds else ""


def _part_name(implementer: str, part: str) -> str:
    for known in _PARTS.get(implementer, "").split(","):
        number, _, name = known.partition(" ")
        if number and part.removeprefix("0x").startswith(number):
            return name
    return f"ARM {implementer} {part}"
