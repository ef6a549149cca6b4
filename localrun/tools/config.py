"""The tables `[mcp.NAME]` of `tui.toml`: which servers there are and how they are reached. Pure.

    [mcp.files]
    command = "npx"
    args = ["-y", "@modelcontextprotocol/server-filesystem", "/home/me/notes"]

    [mcp.tickets]
    url = "https://tickets.example.org/mcp"
    headers = {Authorization = "Bearer ${TICKETS_TOKEN}"}

Does not: start or reach anything, or know the library for MCP.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from localrun import stored
from localrun.errors import BadRequest

# Every server and every tool.
ALL = "all"
# It begins the names that models see, which have 64 characters in all, and ends where the first `__` begins.
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]|_(?!_|$)){0,31}")
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either `command` or `url`. `${NAME}` in `args`, `env` and `headers` stands for a variable of the environment.
    `timeout_s` is for starting, and for each call; `max_result_chars` is how much of a result the model gets."""

    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str = ""
    url: str = ""
    headers: dict[str, str] = {}
    enabled: bool = True
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 60.0
    max_result_chars: Annotated[int, msgspec.Meta(ge=100, le=1_000_000)] = 20_000

    @property
    def identity(self) -> list[Any]:
        """What makes it another server, which nothing was allowed yet: all that says what runs where and as whom. As it
        is written, so the values of `${NAME}` may change, as secrets do."""
        return [self.command, list(self.args), self.env, self.cwd, self.url, self.headers]


class ToolConfig(NamedTuple):
    """The servers by name, those that are not enabled among them, and what is wrong with others, in sentences."""

    servers: dict[str, ServerSettings]
    problems: tuple[str, ...] = ()


def configured(table: object, file_name: str) -> ToolConfig:
    """From the table `mcp` of the file."""
    if not isinstance(table, dict):
        return ToolConfig({}, (f"{file_name}: mcp must be tables such as [mcp.files]",))
    servers, problems = {}, []
    for name, given in table.items():
        try:
            servers[name] = _server(name, given)
        except (ValueError, msgspec.ValidationError) as error:
            problems.append(f"{file_name}: [mcp.{name}] is left out: {error}")
    return ToolConfig(servers, tuple(problems))


def read(path: Path) -> ToolConfig:
    """From a file of which nothing else is wanted. Never raises; a file that is not there has no servers."""
    try:
        content = tomllib.loads(stored.contents(path).decode("utf-8-sig"))
    except FileNotFoundError:
        return ToolConfig({})
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return ToolConfig({}, (f"{path} cannot be read: {error}",))
    return configured(content.get("mcp", {}), path.name)


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """With the values of the variables in it. Raises BadRequest naming one that is not set."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in environment:
            raise BadRequest(f"the environment has no variable {found[1]}, which tui.toml names")
        return environment[found[1]]

    return _VARIABLE.sub(value, text)


def _server(name: str, given: object) -> ServerSettings:
    if not _NAME.fullmatch(name) or name == ALL:
        raise ValueError("a name has up to 32 of A-Z, a-z, 0-9, - and single _ in between, and is not 'all'")
    server = msgspec.convert(given, ServerSettings)
    if bool(server.command) == bool(server.url):
        raise ValueError("give either command or url")
    if server.url and (server.args or server.env or server.cwd):
        raise ValueError("args, env and cwd belong to a command, not to a url")
    if server.command and server.headers:
        raise ValueError("headers belong to a url, not to a command")
    if server.url and (urlsplit(server.url).scheme not in ("http", "https") or not urlsplit(server.url).hostname):
        raise ValueError("url must begin with http:// or https://")
    if any("\0" in text for text in (server.command, *server.args, server.cwd, *server.env, *server.env.values())):
        raise ValueError("a text has a NUL character")
    return server
