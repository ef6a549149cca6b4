"""The files of a model that is split over several: their names, and which of them a file is.

Pure. llama.cpp opens the first file and finds the others by its name, `NAME-00001-of-00003.gguf`
(`llama_split_path` in llama.cpp), so a first file of another name cannot be run.

Does not: read anything (`gguf`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from localrun.models.header import Value

# Published models have at most some hundred; each costs an open file in the engine.
MAX_SHARDS = 1_000

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class Split(NamedTuple):
    """What a file says of itself: the `number`th of `n_shards`, from 0, and `n_tensors` in all of them together."""

    number: int
    n_shards: int
    n_tensors: int


def split_of(metadata: Mapping[str, Value]) -> Split | None:
    """The file's place in a split model; None for a model in one file."""
    number, n_shards, n_tensors = (metadata.get(f"split.{key}", 0) for key in ("no", "count", "tensors.count"))
    if not isinstance(n_shards, int) or not isinstance(number, int) or not isinstance(n_tensors, int) or n_shards <= 1:
        return None
    return Split(number, n_shards, n_tensors)


def shard_problem(path: Path, split: Split) -> str | None:
    """Why the file at `path` cannot be opened as the first of its model, as the end of a sentence; None if it can."""
    named = _NUMBERED.fullmatch(path.name)
    if split.n_shards > MAX_SHARDS:
        return f"is one of {split.n_shards} files of a model; the limit is {MAX_SHARDS}"
    if split.number:
        first = shard_paths(path, split)[0].name if named else "the one whose name ends in -00001"
        return f"is file {split.number + 1} of {split.n_shards} of a model; open the first one, {first}"
    if named is None or (int(named["number"]), int(named["count"])) != (1, split.n_shards):
        return (
            f"is the first of {split.n_shards} files of a model, but its name does not end in "
            f"-00001-of-{split.n_shards:05}.gguf, by which the others are found; give all their own names back, or "
            f"join them with `llama-gguf-split --merge`"
        )
    return None


def later_shards(path: Path) -> list[Path]:
    """The other files of the model whose first file `path` is by its name; none for other names."""
    named = _NUMBERED.fullmatch(path.name)
    if named is None or int(named["number"]) != 1 or int(named["count"]) > MAX_SHARDS:
        return []
    return shard_paths(path, Split(0, int(named["count"]), 0))[1:]


def shard_paths(path: Path, split: Split) -> list[Path]:
    """All files of the model that the numbered file `path` belongs to, in order."""
    stem = path.name[: -len("-00001-of-00001.gguf")]
    return [
        path.with_name(f"{stem}-{number:05}-of-{split.n_shards:05}.gguf") for number in range(1, split.n_shards + 1)
    ]
