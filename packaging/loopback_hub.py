"""A model hub on this machine, for the smoke test: it offers the built-in model as `someone/tiny-GGUF`.

    python packaging/loopback_hub.py CHECKOUT ENDPOINT_FILE

writes its address to ENDPOINT_FILE and serves until its standard input ends, so that it never outlives who started it.
Does not: reach anything outside of loopback.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Serve until the standard input ends."""
    checkout, endpoint_file = Path(sys.argv[1]), Path(sys.argv[2])
    sys.path.insert(0, str(checkout))
    from tests.hub.repository import Repository
    from tests.hub.server import Hub

    model = (checkout / "models/builtin/tiny.gguf").read_bytes()
    with Hub(Repository("someone/tiny-GGUF", {"tiny-F16.gguf": model})) as hub:
        endpoint_file.write_text(hub.endpoint, encoding="utf-8")
        sys.stdin.read()


if __name__ == "__main__":
    main()
