"""Which models of this machine a new user is offered to chat with.

Does not: show them (`widgets/welcome.py`), or look for models anywhere: the daemon's list is what there is.
"""

from __future__ import annotations

from typing import Any

from localrun.errors import LocalrunError
from localrun.tui import quantity
from localrun.tui.daemon import Daemon

MAX_OFFERS = 4
# Files that are looked into, at most, to find so many.
MAX_LOOKS = 12


async def chat_models(daemon: Daemon) -> list[tuple[str, str]]:
    """Names and sizes of those that were made to chat, the latest first. The built-in model is not among them.

    A model that brings no chat template was trained to continue texts, not to answer. Raises DaemonUnreachable.
    """
    rows = [row for row in await daemon.models() if _may_chat(row)]
    rows.sort(key=lambda row: str(row.get("modified_at", "")), reverse=True)
    found: list[tuple[str, str]] = []
    for row in rows[:MAX_LOOKS]:
        try:
            shown = await daemon.show(row["name"])
        except LocalrunError:
            continue  # it went away, or its file is damaged
        if shown.get("template"):
            found.append((row["name"], quantity.size(row.get("size"))))
        if len(found) == MAX_OFFERS:
            break
    return found


def _may_chat(row: dict[str, Any]) -> bool:
    return "completion" in row.get("capabilities", ()) and row.get("source") != "built-in"
