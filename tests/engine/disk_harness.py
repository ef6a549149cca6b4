"""Saved blocks and disk tiers for tests: small, and in a folder of the test's own."""

from __future__ import annotations

from pathlib import Path

from localrun.engine.cache.disk import KvDisk
from localrun.engine.cache.tree import DiskRecord, block_key
from localrun.kv_folders import About

FINGERPRINT = bytes(range(16))
ABOUT = About(model="some", model_path="/models/some.gguf", build="test 1", created_at_s=0.0)
LIMIT_BYTES = 64 * 1024**2


def record(tokens: list[int], parent: DiskRecord | None = None, *, is_whole: bool = False) -> DiskRecord:
    """A block of `tokens` at the end of `parent`, or at the root."""
    parent_key = parent.key if parent else b""
    start = parent.start + len(parent.tokens) if parent else 0
    return DiskRecord(block_key(parent_key, start, tokens), parent_key, start, tokens, is_whole)


def tier(root: Path, *, fingerprint: bytes = FINGERPRINT, limit_bytes: int = LIMIT_BYTES) -> KvDisk:
    return KvDisk(root, fingerprint=fingerprint, about=ABOUT, limit_bytes=limit_bytes)


def scanned(root: Path, **options: object) -> tuple[KvDisk, list[DiskRecord]]:
    """A tier as after a restart, with what it found."""
    opened = tier(root, **options)  # type: ignore[arg-type]
    return opened, opened.scan()


def flushed(disk: KvDisk) -> KvDisk:
    disk.flush(60.0)
    return disk


def path_of(disk: KvDisk, found: DiskRecord) -> Path:
    return disk.folder / f"{found.key.hex()}.kv"
