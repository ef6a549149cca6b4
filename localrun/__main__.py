"""The way in: the `localrun` command and `python -m localrun`.

Does not: import anything that `localrun --help` does not need.
"""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the command line and exit with one of the codes of `cli/exits.py`."""
    from localrun.cli.root import run

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end an answer
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
