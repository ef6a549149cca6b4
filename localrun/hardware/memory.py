"""How much memory there is to load models into."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import psutil

from localrun.hardware import cgroups


class Memory(NamedTuple):
    """What programs could still take without swapping, and what there is in all."""

    available_bytes: int
    total_bytes: int


def machine_memory(root: Path = Path("/")) -> Memory:
    """By the system, or what the limits around this process leave: of a container, or of a service."""
    try:
        said = psutil.virtual_memory()
        available, total = int(said.available), int(said.total)
    except OSError:  # the file system that tells containers of their memory has ended, or hides it
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        available, total = os.sysconf("SC_AVPHYS_PAGES") * page_bytes, os.sysconf("SC_PHYS_PAGES") * page_bytes
    limited = cgroups.memory(root)
    return Memory(available, total) if limited is None else Memory(min(available, limited[0]), min(total, limited[1]))
