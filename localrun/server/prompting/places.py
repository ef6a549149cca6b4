"""From a prompt with markers to one with the pictures and the sound in their places.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localrun.errors import BadTemplate
from localrun.server.prompting.ask import Attached, Message
from localrun.wire import Media, Segment


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
    told = {found for text in texts_of(list(messages)) for found in pattern.findall(text)}
    for one in attached:
        n_places = places.count(one.marker)
        if n_places != 1 and (n_places or one.marker in told):
            how = "has it more than once" if n_places else "leaves it out"
            raise BadTemplate(
                f"{one.field}: the chat template {how}; put it into another message, or use a template that keeps the "
                f"text of messages as it is",
                field=one.field,
            )
    return tuple(result)


def texts_of(value: Any) -> Iterator[str]:
    """Every string inside messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from texts_of(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_of(inner)


def shown(segments: Sequence[Segment]) -> tuple[str, int]:
    """A prompt as a text for people, as Ollama writes it, and how many pictures and recordings it has."""
    texts: list[str] = []
    n_media = 0
    for segment in segments:
        texts.append(segment.text if segment.media is None else f"[img-{n_media}]")
        n_media += segment.media is not None
    return "".join(texts), n_media
