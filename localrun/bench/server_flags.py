"""What both sides of a comparison are started with."""

from __future__ import annotations

from pathlib import Path

import msgspec


class ServerFlags(msgspec.Struct, frozen=True, kw_only=True):
    """`model` is an absolute path. `latency` is a mode of ours that llama-server has no counterpart of."""

    model: Path
    slots: int
    kv_cells: int
    threads: int
    latency: str
