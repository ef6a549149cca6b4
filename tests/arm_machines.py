"""/proc/cpuinfo of ARM machines that people have, as Linux shows it, and what GCC 12 makes of `-mcpu=native` there."""

from __future__ import annotations

from typing import NamedTuple

_V8 = "fp asimd evtstrm aes pmull sha1 sha2 crc32"
_V82 = f"{_V8} atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
_APPLE = f"{_V82} jscvt fcma sha3 sha512 asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg"
_V9 = f"{_V82} sve asimdfhm dit uscat ilrcpc flagm ssbs sb sve2 flagm2 frint svei8mm i8mm bf16 bti"


class ArmMachine(NamedTuple):
    """`cores` are implementer, part and how many. `native` is what GCC 12 calls the processor: right, "nothing" if it
    drops the flag, "refused" if its own header then refuses the code. `tags` are what a build should use."""

    name: str
    cores: tuple[tuple[str, str, int], ...]
    features: str
    native: str
    tags: tuple[str, ...]
    called: str
    board: str = ""

    @property
    def cpuinfo(self) -> str:
        kinds = [(implementer, part) for implementer, part, count in self.cores for _ in range(count)]
        return "\n".join(
            f"processor\t: {number}\nBogoMIPS\t: 50.00\nFeatures\t: {self.features}\nCPU implementer\t: {implementer}\n"
            f"CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: {part}\nCPU revision\t: 1\n"
            for number, (implementer, part) in enumerate(kinds)
        )


_QUICK = ("dotprod", "fp16")
MACHINES = (
    ArmMachine("pi-3", (("0x41", "0xd03", 4),), "fp asimd evtstrm crc32 cpuid", "right", (), "Cortex-A53"),
    ArmMachine("pi-4", (("0x41", "0xd08", 4),), "fp asimd evtstrm crc32 cpuid", "right", (), "Cortex-A72"),
    ArmMachine("pi-5", (("0x41", "0xd0b", 4),), _V82, "right", _QUICK, "Raspberry Pi 5 Model B Rev 1.0, Cortex-A76",
               board="Raspberry Pi 5 Model B Rev 1.0"),
    ArmMachine("altra", (("0x41", "0xd0c", 8),), f"{_V82} ssbs", "right", _QUICK, "Neoverse-N1"),
    ArmMachine("graviton-4", (("0x41", "0xd4f", 8),), _V9, "right", (*_QUICK, "i8mm", "sve"), "Neoverse-V2"),
    ArmMachine("grace", (("0x41", "0xd4f", 72),), _V9, "right", (*_QUICK, "i8mm", "sve"), "Neoverse-V2"),
    ArmMachine("m1-asahi", (("0x61", "0x022", 4), ("0x61", "0x023", 4)), _APPLE, "nothing", _QUICK,
               "Apple MacBook Air (M1, 2020), Apple-M1", board="Apple MacBook Air (M1, 2020)"),
    ArmMachine("m2-max-asahi", (("0x61", "0x038", 4), ("0x61", "0x039", 8)), f"{_APPLE} i8mm bf16", "nothing",
               (*_QUICK, "i8mm"), "Apple-M2"),
    ArmMachine("vm-on-a-mac", (("0x61", "0x000", 4),), f"{_APPLE} i8mm bf16", "refused", (*_QUICK, "i8mm"),
               "Apple", board="linux,dummy-virt"),
    ArmMachine("orin", (("0x41", "0xd42", 8),), f"{_V82} uscat ilrcpc flagm paca pacg", "right", _QUICK,
               "Cortex-A78AE"),
    ArmMachine("snapdragon-x", (("0x51", "0x001", 12),), f"{_APPLE} i8mm bf16", "refused", (*_QUICK, "i8mm"), "Oryon"),
    ArmMachine("rk3588", (("0x41", "0xd05", 4), ("0x41", "0xd0b", 4)), _V82, "right", _QUICK,
               "Cortex-A55 and Cortex-A76"),
    ArmMachine("tensor", (("0x41", "0xd05", 4), ("0x41", "0xd41", 2), ("0x41", "0xd44", 2)), _V82, "nothing", _QUICK,
               "Cortex-A55 and Cortex-A78 and Cortex-X1"),
    ArmMachine("snapdragon-8-gen-2",
               (("0x41", "0xd46", 3), ("0x41", "0xd47", 2), ("0x41", "0xd4d", 2), ("0x41", "0xd4e", 1)),
               f"{_V82} i8mm bf16", "nothing", (*_QUICK, "i8mm"),
               "Cortex-A510 and Cortex-A710 and Cortex-A715 and Cortex-X3"),
    ArmMachine("dgx-spark", (("0x41", "0xd87", 10), ("0x41", "0xd85", 10)), _V9, "nothing", (*_QUICK, "i8mm", "sve"),
               "Cortex-A725 and Cortex-X925"),
    ArmMachine("a64fx", (("0x46", "0x001", 48),), f"{_V8} atomics fphp asimdhp cpuid asimdrdm fcma dcpop sve", "right",
               ("fp16", "sve"), "A64FX"),
    ArmMachine("thunderx2", (("0x43", "0x0af", 32),), f"{_V8} atomics cpuid asimdrdm", "right", (), "ThunderX2"),
    ArmMachine("bare-vm", (("0x00", "0x051", 4),), _V9, "refused", (*_QUICK, "i8mm", "sve"), "ARM 0x00 0x051"),
)  # fmt: skip
