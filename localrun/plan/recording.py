"""What a daemon was asked, as a trace of our own form: lengths, times, and what prompts had in common.

Two prompts that begin with the same blocks begin with the same parts, those of answers among them, so that a turn of a
conversation repeats the simulated answer to the one before. Parts and clients have numbers for names: nothing is left
of the digests by which they were told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from localrun import stored
from localrun.plan.workload import ANSWER, Part
from localrun.snapshot import TrafficRow

# Of a `TrafficRow`.
BLOCK_TOKENS = 16


def write(path: Path, rows: Iterable[TrafficRow]) -> None:
    """A file that only its owner can read. Raises OSError."""
    stored.replace(path, b"".join(_lines(rows)))


def _lines(rows: Iterable[TrafficRow]) -> Iterator[bytes]:
    """In order of arrival; times count from the first."""
    ordered = sorted(rows, key=lambda row: row.at_s)
    texts: list[list[Part]] = []  # of each prompt with its answer
    text_of: dict[str, int] = {}  # by the digest of a block, the first one that has it
    clients: dict[str, str] = {}
    for number, row in enumerate(ordered):
        n_known = next((at for at, block in enumerate(row.blocks) if block not in text_of), len(row.blocks))
        n_shared = min(row.prompt_tokens, BLOCK_TOKENS * n_known)
        parts = _cut(texts[text_of[row.blocks[n_known - 1]]], n_shared) if n_known else []
        if n_shared < row.prompt_tokens:
            parts.append((f"p{number}", row.prompt_tokens - n_shared))
        texts.append([*parts, (parts[-1][0] + ANSWER, row.output_tokens)])
        for block in row.blocks[n_known:]:
            text_of[block] = number
        said: dict[str, Any] = {
            "at_s": round(row.at_s - ordered[0].at_s, 4), "prompt": parts, "output_tokens": row.output_tokens,
            "client": clients.setdefault(row.client, f"c{len(clients)}"), "lane": row.lane,
        }  # fmt: skip
        if row.target_itl_s is not None:
            said["target_itl_s"] = row.target_itl_s
        yield msgspec.json.encode(said) + b"\n"


def _cut(parts: list[Part], n_tokens: int) -> list[Part]:
    """Their beginning: the first tokens of a part are those of a shorter one with its name."""
    found: list[Part] = []
    for name, n in parts:
        if n_tokens <= 0:
            break
        found.append((name, min(n, n_tokens)))
        n_tokens -= n
    return found
