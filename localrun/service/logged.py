"""Starts the daemon with an environment and a log of its own: `python -m localrun.service.logged START.json`.

For the Windows task scheduler, which gives a program neither. The daemon runs in this very process, so ending the task
ends the daemon.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import msgspec

from localrun.service.windows import Start


def main(arguments: list[str]) -> None:
    """Does not return: ends with the daemon's status. Raises OSError and msgspec.DecodeError for a bad START.json."""
    start = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Start)
    log_path = Path(start.log)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    os.environ.update(start.environment)
    log = log_path.open("a", encoding="utf-8", buffering=1)
    sys.stdout = sys.stderr = log
    # Engines inherit descriptor 2, not Python's objects. Without a console none of the standard ones may be open.
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    sys.argv = ["localrun", *start.arguments]
    runpy.run_module("localrun", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
