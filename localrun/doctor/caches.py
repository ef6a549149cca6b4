"""How much the caches hold, and what of it belongs to no model any more."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from localrun.doctor.finding import Finding, ok, size, warn
from localrun.kv_folders import ModelFolder


def check_kv_cache(folders: Sequence[ModelFolder], *, limit_bytes: int, root: Path) -> Iterator[Finding]:
    """`folders` are those of `kv_folders.survey`."""
    used_bytes = sum(folder.size_bytes for folder in folders)
    limit = f"at most {size(limit_bytes)}" if limit_bytes else "switched off"
    yield ok("cache", f"{size(used_bytes)} of saved prompts ({limit}), {root}")
    gone_bytes = sum(folder.size_bytes for folder in folders if folder.is_abandoned)
    if gone_bytes:
        yield warn("cache", f"{size(gone_bytes)} are of models that are gone", "localrun cache prune")


def check_hub_cache(root: Path) -> Finding:
    """The cache that other programs share."""
    n_bytes = 0
    for folder, _, names in os.walk(root):
        # Snapshots link to what lies in blobs.
        if Path(folder).name == "blobs":
            n_bytes += sum((Path(folder) / name).lstat().st_size for name in names)
    return ok("cache", f"{size(n_bytes)} in the Hugging Face cache, {root}")
