"""The way in: the `localrun` command and `python -m localrun`.

Does not: import anything that `localrun --help` does not need.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys


def main() -> None:
    """Run the command line and exit with one of the codes of `cli/exits.py`."""
    _open_closed_streams()
    _have_a_home()
    try:
        from localrun.cli.root import run
    except KeyboardInterrupt:
        sys.exit(130)  # as `run` does with one that comes later

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end an answer
            if sys.platform == "win32":  # where pipes and files have the system's code page until Python 3.15
                stream.reconfigure(encoding="utf-8")
            else:
                with contextlib.suppress(OSError):
                    os.set_blocking(stream.fileno(), True)  # else what a slow reader has no room for would be lost
    sys.exit(run(sys.argv[1:]))


def _open_closed_streams() -> None:
    """A program that was started with a closed stream has None in its place, and the next file it opens would get the
    stream's number."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _have_a_home() -> None:
    """Containers run programs as users that no file names, and some without HOME. Those are at home in /, as they are
    where Docker says it."""
    if not os.environ.get("HOME"):
        os.environ.pop("HOME", None)  # empty, it would hide the user's own
        if os.path.expanduser("~") == "~":
            os.environ["HOME"] = os.sep


if __name__ == "__main__":
    main()
