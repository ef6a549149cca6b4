"""A server that lists and reads the files of one folder, with pictures as pictures."""

from __future__ import annotations

import sys
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver import Image

server = MCPServer("files")
FOLDER = Path(sys.argv[1])


@server.tool()
def list_files() -> list[str]:
    """The names of all files."""
    return sorted(path.name for path in FOLDER.iterdir())


@server.tool()
def read_text(name: str) -> str:
    """The text of a file."""
    return (FOLDER / Path(name).name).read_text()


@server.tool()
def read_picture(name: str) -> Image:
    """A picture."""
    return Image(path=FOLDER / Path(name).name)


if __name__ == "__main__":
    server.run()
