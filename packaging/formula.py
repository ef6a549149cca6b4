"""Prints the Homebrew formula of a source package: the template with its address, version and checksum.

    python packaging/formula.py --url https://example.org/localrun-0.1.0.tar.gz dist/localrun-0.1.0.tar.gz

Without `--url` the formula points at the file itself, which serves to try it on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path

TEMPLATE = Path(__file__).parent / "homebrew" / "localrun.rb.in"


def formula(source: Path, url: str) -> str:
    """The formula. Raises ValueError for a file that is not named as a source package of localrun is."""
    named = re.fullmatch(r"localrun-(\d+(?:\.\d+)*\w*)\.tar\.gz", source.name)
    if named is None:
        raise ValueError(f"{source.name} is not named localrun-VERSION.tar.gz")
    values = {"URL": url, "VERSION": named[1], "SHA256": hashlib.sha256(source.read_bytes()).hexdigest()}
    lines = TEMPLATE.read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("#"))
    return re.sub(r"@(\w+)@", lambda found: values[found[1]], text)


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--url")
    given = parser.parse_args()
    try:
        sys.stdout.write(formula(given.source, given.url or given.source.absolute().as_uri()))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
