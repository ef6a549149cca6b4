"""The way in: the `localrun` command and `python -m localrun`.

Does not: import anything that `localrun --help` does not need.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with one of the codes of `cli/exits.py`."""
    from localrun.cli.root import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
