"""What both sides of a comparison are started with."""

from __future__ import annotations

from pathlib import Path

import msgspec
import psutil


class ServerFlags(msgspec.Struct, frozen=True, kw_only=True):
    """`model` is an absolute path. `latency` is a mode of ours that llama-server has no counterpart of."""

    model: Path
    slots: int
    kv_cells: int
    threads: int
    latency: str


def physical_cores() -> int:
    """What both sides are best run with; logical cores where the system does not tell."""
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
