"""Our own side of a comparison: `localrun serve` with files of its own.

LOCALRUN_HOME is a folder of its own, so a restart finds the cache on disk that the process before it left, and the
user's own daemon, models and cache are not touched. Other `LOCALRUN_*` variables go through: they are how a comparison
is run with one setting changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from localrun.bench.server_flags import ServerFlags
from localrun.bench.server_process import ServerProcess

NAME = "localrun"


def local_server(flags: ServerFlags, folder: Path) -> ServerProcess:
    """A daemon on a free port with its files in `folder`; not started yet."""
    # -P: the folder that the user happens to be in must not be a place to import from.
    command = [sys.executable, "-P", "-m", "localrun", "serve", "--host", "127.0.0.1"]
    command += ["--slots", str(flags.slots), "--kv-cells", str(flags.kv_cells), "--threads", str(flags.threads)]
    command += ["--latency", flags.latency, "--keep-alive-s", "-1"]
    home = folder / "home"
    environ = {"LOCALRUN_HOME": str(home)}
    return ServerProcess(NAME, command, str(flags.model), folder / "localrun.log", environ=environ, files=home)
