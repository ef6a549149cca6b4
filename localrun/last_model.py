"""The model to begin with where a person names none: the one that was used last, else one that is here.

Used is what gave an answer in the terminal interface or by `localrun run`, not what was only looked at. Its name is in
the state folder, in a file for each machine with a daemon. The built-in model is a toy: it is never remembered, and
begun with only where no other can chat.

Does not: load a model.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from localrun import stored
from localrun.config import folders
from localrun.errors import LocalrunError

BUILT_IN = "tiny"
# Models that are looked into, at most, to find one that was made to chat.
MAX_LOOKS = 12


class Models(Protocol):
    """What is asked of a daemon, as `localrun.client.Client` has it."""

    async def models(self) -> list[dict[str, Any]]: ...

    async def show(self, model: str) -> dict[str, Any]: ...


def kept_at(base_url: str) -> Path:
    """The file for the machine of the daemon at this address."""
    parts = urlsplit(base_url)
    machine = f"-{parts.hostname}".replace(":", "_") if parts.scheme == "https" else ""
    return folders().state / f"last-model{machine}"


def last_model(path: Path) -> str:
    """Empty where none is kept."""
    return stored.read_text(path)


def remember_model(path: Path, name: str) -> None:
    """A disk that keeps nothing is no reason to lose an answer."""
    if name.removesuffix(":latest") != BUILT_IN and name != last_model(path):
        with suppress(OSError):
            stored.replace(path, name.encode())


async def first_model(daemon: Models, last: str) -> str:
    """`last` while it is there, else the one in memory or the latest that was made to chat, else the built-in one.
    Raises LocalrunError."""
    if last:
        with suppress(LocalrunError):  # it is gone, or its file is damaged
            await daemon.show(last)
            return last
    rows = [row for row in await daemon.models() if _may_chat(row)]
    rows.sort(key=lambda row: (bool(row.get("loaded")), str(row.get("modified_at", ""))), reverse=True)
    for row in rows[:MAX_LOOKS]:
        with suppress(LocalrunError):
            # Without a chat template a model was trained to continue texts, not to answer.
            if (await daemon.show(row["name"])).get("template"):
                return str(row["name"])
    return BUILT_IN


def _may_chat(row: dict[str, Any]) -> bool:
    """By its source: the toy may have other names."""
    return "completion" in row.get("capabilities", ()) and row.get("source") != "built-in"
