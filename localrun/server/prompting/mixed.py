"""Inputs that clients write in tokens: a list of ids, or of texts and ids one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from localrun.errors import BadRequest
from localrun.wire import Segment


def is_one(items: Iterable[Any]) -> bool:
    """Whether a list is one input, and not several: token ids, or texts and token ids."""
    kinds = {type(item) for item in items}
    return int in kinds and kinds <= {int, str}


def segments_of(
    content: str | Iterable[str | int], n_vocab: int, *, field: str, trusted: bool = True
) -> tuple[Segment, ...]:
    """A text, or texts with token ids between them. Raises BadRequest for an id outside the vocabulary."""
    if isinstance(content, str):
        return (Segment(content, trusted),)
    segments: list[Segment] = []
    ids: list[int] = []
    for item in content:
        if isinstance(item, int):
            ids.append(item)
            continue
        if ids:
            segments.append(segment_of(ids, n_vocab, field))
            ids = []
        segments.append(Segment(item, trusted))
    return (*segments, segment_of(ids, n_vocab, field)) if ids else tuple(segments)


def segment_of(tokens: list[int], n_vocab: int, field: str) -> Segment:
    """Raises BadRequest for an id outside the vocabulary."""
    if max(tokens) >= n_vocab:
        raise BadRequest(f"{field}: {max(tokens)} is not a token of this model, which has {n_vocab}", field=field)
    return Segment("", tokens=tuple(tokens))
