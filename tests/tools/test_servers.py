"""What is said of servers that answer, but not with what was asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from localrun.tools.config import ServerSettings
from localrun.tools.servers import Result, ServerFailed, Servers

REFUSAL = {"error": {"code": -32000, "message": "the token has expired"}}
OLD = {"protocolVersion": "1999-01-01", "capabilities": {}, "serverInfo": {"name": "old", "version": "1"}}


def refusing(method: str, reply: dict[str, Any]) -> Servers:
    script = str(Path(__file__).with_name("refusing_server.py"))
    return Servers({"one": ServerSettings(command=sys.executable, args=(script, method, json.dumps(reply)))})


@pytest.mark.parametrize(
    ("method", "reply", "reason"),
    [
        ("initialize", REFUSAL, "the token has expired"),
        ("tools/list", REFUSAL, "the token has expired"),
        ("initialize", {"result": OLD}, "1999-01-01"),
        ("tools/list", {"result": {"tools": [{"name": "odd", "inputSchema": 7}]}}, "tools.0.inputSchema"),
    ],
)
async def test_a_server_that_cannot_be_used_is_not_said_to_have_ended(
    method: str, reply: dict[str, Any], reason: str
) -> None:
    servers = refusing(method, reply)
    try:
        with pytest.raises(ServerFailed) as raised:
            await servers.tools("one")
    finally:
        await servers.close()
    assert raised.value.message.startswith("the server one cannot be used: ")
    assert reason in raised.value.message


async def test_an_error_of_a_tool_with_the_code_of_closed_connections_ends_nothing() -> None:
    servers = refusing("tools/call", REFUSAL)
    try:
        for _ in range(2):
            assert await servers.call("one", "tool", {}) == Result("the token has expired", is_error=True)
            assert servers.is_running("one")
    finally:
        await servers.close()
