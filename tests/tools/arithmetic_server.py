"""A server of tools over stdio, or with `--port` over HTTP. By the public examples of the SDK."""

from __future__ import annotations

import argparse

from mcp.server import MCPServer

server = MCPServer("arithmetic")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def divide(a: int, b: int) -> float:
    """Divide a by b."""
    return a / b


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    if given.port:
        server.run("streamable-http", host="127.0.0.1", port=given.port)
    else:
        server.run()
