"""What the person has allowed and forbidden for good, in a file of the data folder.

What is allowed is one tool as its server described it then: a server that is started in another way, or a tool whose
description or parameters changed, is asked for again. What is forbidden stays so by its name.

The file is read whenever something is asked, so that what another window stores or takes back counts at once. One that
is damaged allows nothing.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from localrun import stored

# A window shows nothing new while it waits for another one.
_LOCK_TIMEOUT_S = 2.0


class Rule(StrEnum):
    """What is stored for a tool."""

    ALWAYS = "always"
    NEVER = "never"


class _Entry(msgspec.Struct, frozen=True):
    server: str
    tool: str
    rule: Rule
    fingerprint: str = ""


class _File(msgspec.Struct, frozen=True):
    version: int = 1
    rules: list[_Entry] = []


_decoder = msgspec.json.Decoder(_File)


class Permissions:
    """`path` None keeps them in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._in_memory: list[_Entry] = []

    def rule(self, server: str, tool: str, fingerprint: str) -> Rule | None:
        """None for a tool that has to be asked for."""
        found = next((entry for entry in self._entries() if (entry.server, entry.tool) == (server, tool)), None)
        if found is None or (found.rule is Rule.ALWAYS and found.fingerprint != fingerprint):
            return None
        return found.rule

    def store(self, server: str, tool: str, fingerprint: str, rule: Rule | None) -> None:
        """Replaces what was stored for a tool; None forgets it. Raises OSError, and then nothing has changed."""
        if self._path is None:
            self._in_memory = self._with(server, tool, fingerprint, rule)
            return
        with stored.locked(self._path, timeout_s=_LOCK_TIMEOUT_S):
            entries = self._with(server, tool, fingerprint, rule)
            stored.write(self._path, _File(rules=entries))

    def _with(self, server: str, tool: str, fingerprint: str, rule: Rule | None) -> list[_Entry]:
        entries = [entry for entry in self._entries() if (entry.server, entry.tool) != (server, tool)]
        return entries if rule is None else [*entries, _Entry(server, tool, rule, fingerprint)]

    def _entries(self) -> list[_Entry]:
        if self._path is None:
            return self._in_memory
        found = stored.read(self._path, _decoder)
        return [] if found is None else found.rules
