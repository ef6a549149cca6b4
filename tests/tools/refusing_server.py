"""A server that answers one method, which its first argument names, as MCP or its second argument says."""

from __future__ import annotations

import json
import sys
from typing import Any

SCHEMA = {"type": "object"}
REPLIES: dict[str, Any] = {
    "initialize": {"capabilities": {"tools": {}}, "serverInfo": {"name": "refusing", "version": "1"}},
    "tools/list": {"tools": [{"name": "tool", "inputSchema": SCHEMA}]},
    "tools/call": {"content": [{"type": "text", "text": "done"}]},
}

method, reply = sys.argv[1], json.loads(sys.argv[2])
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == "initialize":
        REPLIES["initialize"]["protocolVersion"] = asked["params"]["protocolVersion"]
    answer = reply if asked["method"] == method else {"result": REPLIES.get(asked["method"], {})}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
