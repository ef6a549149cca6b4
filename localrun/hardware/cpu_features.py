"""What a processor has that makes llama.cpp faster, and what processors are called, in the words of all who name it.

Needs the standard library alone, since the build runs before anything is installed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Feature(NamedTuple):
    """In llama.cpp's words, Linux' and compilers'; which compilers know it, if not all; ARM's tag of `-march`."""

    ggml: str
    flag: str
    macro: str
    known_by: str = ""
    tag: str = ""


X86 = (
    Feature("AVX", "avx", "__AVX__"), Feature("AVX2", "avx2", "__AVX2__"), Feature("FMA", "fma", "__FMA__"),
    Feature("F16C", "f16c", "__F16C__"), Feature("AVX512", "avx512f", "__AVX512F__"),
    Feature("AVX_VNNI", "avx_vnni", "__AVXVNNI__", "GCC 11 and clang 12"),
    Feature("AVX512_VNNI", "avx512_vnni", "__AVX512VNNI__"),
    Feature("AVX512_BF16", "avx512_bf16", "__AVX512BF16__", "GCC 10 and clang 9"),
)  # fmt: skip
ARM = (
    Feature("NEON", "asimd", "__ARM_NEON"),
    Feature("DOTPROD", "asimddp", "__ARM_FEATURE_DOTPROD", tag="dotprod"),
    Feature("FP16_VA", "asimdhp", "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC", tag="fp16"),
    Feature("MATMUL_INT8", "i8mm", "__ARM_FEATURE_MATMUL_INT8", "GCC 10 and clang 11", "i8mm"),
    Feature("SVE", "sve", "__ARM_FEATURE_SVE", "GCC 10 and clang 11", "sve"),
)


def features(machine: str) -> tuple[Feature, ...]:
    """Those that a `machine`, as `platform` names it, may have."""
    return {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}.get(machine.lower(), ())


def without_halves(missing: list[Feature], used: Collection[str]) -> list[Feature]:
    """AVX_VNNI is half as wide as AVX512_VNNI, which is used instead where there are both."""
    return [each for each in missing if not (each.ggml == "AVX_VNNI" and "AVX512_VNNI" in used)]


# By implementer and part; of Apple's, which have many for one processor, their beginning.
_NAMES = (
    "41d03:Cortex-A53 41d04:Cortex-A35 41d05:Cortex-A55 41d07:Cortex-A57 41d08:Cortex-A72 41d09:Cortex-A73 "
    "41d0a:Cortex-A75 41d0b:Cortex-A76 41d0c:Neoverse-N1 41d0d:Cortex-A77 41d40:Neoverse-V1 41d41:Cortex-A78 "
    "41d42:Cortex-A78AE 41d44:Cortex-X1 41d46:Cortex-A510 41d47:Cortex-A710 41d48:Cortex-X2 41d49:Neoverse-N2 "
    "41d4d:Cortex-A715 41d4e:Cortex-X3 41d4f:Neoverse-V2 41d80:Cortex-A520 41d81:Cortex-A720 41d82:Cortex-X4 "
    "41d84:Neoverse-V3 41d85:Cortex-X925 41d87:Cortex-A725 41d8e:Neoverse-N3 430af:ThunderX2 46001:A64FX 4e004:Carmel "
    "51001:Oryon 6100:Apple 6102:Apple-M1 6103:Apple-M2 6104:Apple-M3 6105:Apple-M4 c0ac3:Ampere-1"
)
_PARTS: dict[str, str] = dict(pair.split(":") for pair in _NAMES.split())


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
    parts = [(each["CPU implementer"], each["CPU part"]) for each in facts if "CPU part" in each]
    numbers = {f"ARM {made_by} {part}": made_by[2:] + part[2:] for made_by, part in parts}
    kinds = dict.fromkeys(_PARTS.get(number) or _PARTS.get(number[:4], text) for text, number in numbers.items())
    # A virtual machine's board is "linux,dummy-virt".
    return ", ".join(filter(None, [board if "dummy" not in board else "", " and ".join(kinds)])) if kinds else ""
