"""What a model can do, by its file alone: the list that `/api/show`, `/api/tags` and `/v1/models` give.

Reads the file's header and, for the tokens to fill in with, its vocabulary; remembered per header. Does not: load the
model.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from localrun.errors import BadModelFile
from localrun.models import pooling
from localrun.models.header import Header
from localrun.models.store import Model
from localrun.server.replies import formats, recognise, thinking_tags
from localrun.server.replies.infill import fim_tokens


def capabilities(model: Model) -> tuple[str, ...]:
    """Of "completion", "tools", "thinking", "insert" and "embedding", those that apply.

    "tools" is for models whose own template knows them; others can be given tools all the same.
    """
    template = model.template
    known = _known.setdefault(model.header, {})
    if template not in known:
        known[template] = _capabilities(model.header, template)
    return known[template]


_known: WeakKeyDictionary[Header, dict[str, tuple[str, ...]]] = WeakKeyDictionary()


def _capabilities(header: Header, template: str) -> tuple[str, ...]:
    if not pooling.generates(header):
        return ("embedding",)
    result = ["completion"]
    if recognise.takes_tools(template):
        result.append("tools")
    is_harmony = recognise.call_format(template) is formats.HARMONY
    if is_harmony or thinking_tags.thinking_tags(template) is not None or thinking_tags.takes_effort(template):
        result.append("thinking")
    try:
        if fim_tokens(header) is not None:
            result.append("insert")
    except BadModelFile:
        pass  # a file that went away while it was listed
    return tuple(result)
