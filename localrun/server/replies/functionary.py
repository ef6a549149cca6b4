"""Functionary 3.2: a reply is parts, each with its recipient in the first line: `all`, or the tool that is called.

    all
    Let me look.>>>get_weather
    {"city": "Paris"}

The prompt ends with the `>>>` of the first part.

Pure.
"""

from __future__ import annotations

from localrun.server.replies.mark_set import MarkSet, mark_set
from localrun.server.replies.named_calls import MAX_NAME_CHARACTERS, checked_name, read_arguments
from localrun.server.replies.reply import Reply
from localrun.server.replies.source import MalformedError, Read

PART = ">>>"
_LINE_END = MarkSet(("\n",))


def read(reply: Reply, dropped: frozenset[str]) -> Read[None]:
    """Reads until the end. A part whose first line is no recipient is content as it stands."""
    source = reply.source
    marks = mark_set(dropped | {PART})
    yield from source.take(PART)
    while True:
        try:
            yield from _part(reply)
        except MalformedError:
            source.at = 0
        mark: str | None = ""
        while mark is not None and mark != PART:
            mark = yield from source.stream_until(marks, reply.content, glued=frozenset())
        if mark is None:
            return
        if not (yield from _is_recipient(reply)):
            reply.content(PART)


def _is_recipient(reply: Reply) -> Read[bool]:
    """Whether a known recipient stands in the line that begins. Takes nothing of it."""
    source = reply.source
    source.commit()
    for name in ("all", *reply.schemas):
        if (yield from source.take(f"{name}\n")):
            source.at = 0
            return True
    return False


def _part(reply: Reply) -> Read[None]:
    source = reply.source
    source.commit()
    line, _ = yield from source.until(_LINE_END, limit=MAX_NAME_CHARACTERS)
    name = checked_name(line)
    if name == "all":
        source.commit()
        return
    if name not in reply.schemas:
        raise MalformedError
    yield from read_arguments(reply, name)
    yield from source.skip_space()
    source.commit()
