"""Says what runs now, and what to do next: the last words of `make run`. The argument is the program.

.venv/bin/python packaging/next_steps.py .venv/bin/localrun
"""

from __future__ import annotations

import sys

from localrun import config, ollama_environment
from localrun.cli.daemon import LIFE, base_url, version_if_any
from localrun.cli.text import columns, say


def main(program: str) -> None:
    settings = ollama_environment.load({})
    url = base_url(settings)
    program += "" if settings.port == config.DEFAULT_PORT else f" --port {settings.port}"
    steps = {"in a browser": f"{url}/", "in a terminal": program, "find models": f"{program} search"}
    print()
    if version_if_any(settings) is not None:
        say(f"A daemon runs in the background at {url}. One that a command started {LIFE}.")
        steps["stop it now"] = f"{program} stop --daemon"
    print(columns(("Next:", ""), [(f"  {what}", how) for what, how in steps.items()]))


if __name__ == "__main__":
    main(sys.argv[1])
