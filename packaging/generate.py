"""Writes the files that are made from the program: pages of the documentation, the manual page, the constraints.

    python packaging/generate.py                 writes all of them
    python packaging/generate.py --check settings    compares instead; ends with 1 and says which differ
    python packaging/generate.py constraints         one of them

The constraints are written only when named: they are the versions of the environment that runs this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import command_page
import constraints
import figures
import manual_page
import metrics_page
import modelfile_page
import settings_page

ROOT = Path(__file__).parents[1]
FILES: dict[str, tuple[Path, Callable[[], str]]] = {
    "settings": (ROOT / "localrun/docs/settings.md", settings_page.text),
    "cli": (ROOT / "localrun/docs/cli.md", command_page.text),
    "modelfile": (ROOT / "localrun/docs/modelfile.md", modelfile_page.text),
    "metrics": (ROOT / "localrun/docs/metrics.md", metrics_page.text),
    "manual": (ROOT / "packaging/localrun.1", manual_page.text),
    "figures": (figures.BENCH, lambda: figures.page(figures.BENCH)),
    "figures-readme": (figures.README, lambda: figures.page(figures.README)),
    "figures-performance": (figures.PERFORMANCE, lambda: figures.page(figures.PERFORMANCE)),
    "constraints": (ROOT / "packaging/constraints.txt", constraints.text),
}


def main(arguments: list[str]) -> int:
    """Write or compare. The exit code."""
    is_check = "--check" in arguments
    names = [argument for argument in arguments if argument != "--check"]
    unknown = [name for name in names if name not in FILES]
    if unknown:
        print(f"{unknown[0]} is none of {', '.join(FILES)}", file=sys.stderr)
        return 2
    n_different = 0
    for name in names or [name for name in FILES if name != "constraints"]:
        path, make = FILES[name]
        wanted = make()
        if not is_check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != wanted:
            print(f"{path.relative_to(ROOT)} is not what the program says; run python packaging/generate.py {name}")
            n_different += 1
    return 1 if n_different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
