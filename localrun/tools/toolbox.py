"""What a chat can do with tools: what is offered to the model, whether a call may run, and what comes of it.

The names that models see are `SERVER__TOOL`, of at most 64 letters, digits, `_` and `-`, as every API takes them; where
that needs a change, the end is a hash.

A call runs only if a person approves it (`Approval.ONCE`), or approved the tool before: in this chat, or for good. The
front end asks; nothing else decides.

What is allowed for good is one tool as its server described it then: a server that is started in another way, or a tool
whose description or parameters changed, is asked for again. What is forbidden stays so by its name. The file of both is
read whenever something is asked, so that what another window stores or takes back counts at once. One that is damaged
allows nothing.

Does not: ask, show, or talk to a model.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from localrun import stored
from localrun.tools.config import ServerSettings
from localrun.tools.servers import Result, ServerFailed, Servers, ServerTool
from localrun.visible import as_json, inert, shortened

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


MAX_NAME_CHARS = 64
# Rounds of calls for one question, before a person is asked whether to go on.
MAX_ROUNDS = 10
_HASH_CHARS = 8


class Tool(msgspec.Struct, frozen=True, dict=True):
    """`name` is what models see; `own_name` is the tool's name at its server. `identity` is that of its server."""

    name: str
    server: str
    own_name: str
    description: str
    schema: dict[str, Any]
    identity: list[Any]

    @cached_property
    def fingerprint(self) -> str:
        """Of all that a person relies on when allowing it."""
        facts = [self.identity, self.own_name, self.description, self.schema]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode(errors="replace")).hexdigest()

    @property
    def as_function(self) -> dict[str, Any]:
        """As `/api/chat` takes it in `tools`."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


class Approval(StrEnum):
    """What a person answers when a call is asked for."""

    NO = "no"
    ONCE = "once"
    CHAT = "chat"
    ALWAYS = "always"
    NEVER = "never"

    @property
    def may_run(self) -> bool:
        """Whether this call may run."""
        return self in (Approval.ONCE, Approval.CHAT, Approval.ALWAYS)


class Call(msgspec.Struct, frozen=True):
    """What a model wants called. `tool` is None for one that was not offered."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    tool: Tool | None = None

    @property
    def shown_arguments(self) -> str:
        """As JSON. Nothing is left out: what is shown is what the server gets."""
        return as_json(self.arguments)


class End(StrEnum):
    """How a call ended."""

    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"
    STOPPED = "stopped"


class Outcome(msgspec.Struct, frozen=True):
    """What the model and the person are told of a call that ended."""

    end: End
    text: str
    pictures: tuple[bytes, ...] = ()
    duration_s: float = 0.0


REFUSED = Outcome(End.REFUSED, "The user did not allow this call, so it was not run. Do not try it again unasked.")
STOPPED = Outcome(End.STOPPED, "The user stopped this call before it had a result.")
NOT_RUN = Outcome(End.STOPPED, "The user stopped the answer before this call was run.")


class Toolbox:
    """The tools of the servers that are enabled. `failures` tells why a server is not there, by name."""

    def __init__(self, settings: dict[str, ServerSettings], permissions: Permissions) -> None:
        enabled = {name: server for name, server in settings.items() if server.enabled}
        self.servers = Servers(enabled)
        self.failures: dict[str, str] = {}
        self._permissions = permissions
        self._tools: dict[str, tuple[Tool, ...]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the servers that are enabled."""
        return tuple(self.servers.settings)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Those that are known so far."""
        return tuple(tool for name in self.names for tool in self._tools.get(name, ()))

    async def look(self, names: Iterable[str]) -> list[str]:
        """Finds out what these servers offer, and starts those that do not run. One that failed before is left as it
        is, until `forget_failure`. Returns why others are not there."""
        wanted = [name for name in names if name not in self.failures]
        found = await asyncio.gather(*(self.servers.tools(name) for name in wanted), return_exceptions=True)
        problems = []
        for name, offered in zip(wanted, found, strict=True):
            if isinstance(offered, ServerFailed):
                self.failures[name] = offered.message
                self._tools.pop(name, None)
                problems.append(offered.message)
            elif isinstance(offered, BaseException):
                raise offered
            else:
                self._tools[name] = _named(name, self.servers.settings[name], offered)
        return problems

    def forget_failure(self, name: str) -> None:
        """The next `look` tries the server again."""
        self.failures.pop(name, None)

    def offered(self, off: Collection[str] = ()) -> list[Tool]:
        """What a model is offered: all that is known, without what is forbidden and what is `off`, servers or tools by
        their names."""
        return [
            tool
            for tool in self.tools
            if tool.server not in off and tool.name not in off and self.rule(tool) is not Rule.NEVER
        ]

    def rule(self, tool: Tool) -> Rule | None:
        """What was stored for a tool."""
        return self._permissions.rule(tool.server, tool.own_name, tool.fingerprint)

    def store(self, tool: Tool, rule: Rule | None) -> None:
        """For good. Raises OSError."""
        self._permissions.store(tool.server, tool.own_name, tool.fingerprint, rule)

    def may_run(self, tool: Tool, granted: Collection[str]) -> bool | None:
        """Whether a tool may run without being asked for; None says that a person has to be asked. `granted` are the
        fingerprints of what was allowed in this chat."""
        rule = self.rule(tool)
        if rule is Rule.NEVER:
            return False
        return True if rule is Rule.ALWAYS or tool.fingerprint in granted else None

    async def run(self, call: Call) -> Outcome:
        """Runs a call that was allowed."""
        tool, began_s = call.tool, time.monotonic()
        if tool is None:
            return Outcome(End.FAILED, f"There is no tool {shortened(call.name, MAX_NAME_CHARS)!r}.")
        result: Result = await self.servers.call(tool.server, tool.own_name, call.arguments)
        end = End.FAILED if result.is_error else End.DONE
        return Outcome(end, result.text, result.pictures, time.monotonic() - began_s)

    async def close(self) -> None:
        """Ends the servers."""
        await self.servers.close()


def calls_of(tool_calls: Sequence[dict[str, Any]], offered: Iterable[Tool]) -> list[Call]:
    """The calls of an answer of `/api/chat`."""
    by_name = {tool.name: tool for tool in offered}
    calls = []
    for given in tool_calls:
        function = given.get("function") or {}
        name, arguments = str(function.get("name", "")), function.get("arguments")
        arguments = arguments if isinstance(arguments, dict) else {}
        calls.append(Call(inert(name), arguments, str(given.get("id", "")), by_name.get(name)))
    return calls


def result_message(name: str, call_id: str, content: str) -> dict[str, Any]:
    """A call's result as `/api/chat` takes it."""
    return {"role": "tool", "content": content, "tool_name": name, "tool_call_id": call_id}


def _named(server: str, settings: ServerSettings, offered: Iterable[ServerTool]) -> tuple[Tool, ...]:
    """Of tools with the same name the first."""
    tools: dict[str, Tool] = {}
    for one in offered:
        name = model_name(server, one.name)
        tools.setdefault(name, Tool(name, server, one.name, one.description, one.schema, settings.identity))
    return tuple(tools.values())


def model_name(server: str, tool: str) -> str:
    """What models call a tool. No other server's tool is called so: a server's name has no `__`, nor `_` at its end."""
    plain = f"{server}__{tool}"
    name = re.sub(r"[^A-Za-z0-9_-]", "_", plain)
    if name == plain and len(name) <= MAX_NAME_CHARS:
        return name
    digest = hashlib.sha256(json.dumps([server, tool]).encode()).hexdigest()[:_HASH_CHARS]
    return f"{name[: MAX_NAME_CHARS - _HASH_CHARS - 1]}_{digest}"


def toolbox(settings: dict[str, ServerSettings], path: Path | None) -> Toolbox | None:
    """None where no server is enabled. `path` is the file of what was allowed."""
    if not any(server.enabled for server in settings.values()):
        return None
    return Toolbox(settings, Permissions(path))
