"""Segments of prompts: of inputs that clients write in tokens (a list of ids, or of texts and ids one after the other),
and of prompts with markers, which get the pictures and the sound in their places.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from localrun.errors import BadRequest, BadTemplate
from localrun.server.prompting.ask import Attached, Message
from localrun.server.templates.marks import texts_in
from localrun.wire import Media, Segment


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
        raise BadRequest.of(field, f"{max(tokens)} is not a token of this model, which has {n_vocab}")
    return Segment("", tokens=tuple(tokens))


def placed(
    segments: Sequence[Segment], attached: Sequence[Attached], decoded: Mapping[str, Media], messages: Sequence[Message]
) -> tuple[Segment, ...]:
    """The prompt of `messages`. Raises BadTemplate where a template left a marker of theirs out, changed it, or has it
    twice."""
    pattern = re.compile("|".join(one.marker for one in attached))
    fields: dict[str, str] = {one.marker: one.field for one in attached}
    result: list[Segment] = []
    places: list[str] = []
    for segment in segments:
        at = 0
        for found in pattern.finditer(segment.text):
            if found.start() > at:
                result.append(Segment(segment.text[at : found.start()], segment.trusted))
            places.append(found[0])
            result.append(Segment("", media=decoded[found[0]], field=fields[found[0]]))
            at = found.end()
        if at == 0:
            result.append(segment)
        elif at < len(segment.text):
            result.append(Segment(segment.text[at:], segment.trusted))
    told = {found for text in texts_in(list(messages)) for found in pattern.findall(text)}
    for one in attached:
        n_places = places.count(one.marker)
        if n_places != 1 and (n_places or one.marker in told):
            how = "has it more than once" if n_places else "leaves it out"
            raise BadTemplate.of(
                one.field,
                f"the chat template {how}; put it into another message, or use a template that keeps the "
                f"text of messages as it is",
            )
    return tuple(result)


def shown(segments: Sequence[Segment]) -> tuple[str, int]:
    """A prompt as a text for people, as Ollama writes it, and how many pictures and recordings it has."""
    texts: list[str] = []
    n_media = 0
    for segment in segments:
        texts.append(segment.text if segment.media is None else f"[img-{n_media}]")
        n_media += segment.media is not None
    return "".join(texts), n_media
