"""Builds llama-cpp-python for this machine, or takes it ready-made.

python3 -m localrun.native_build plan                   what would be done, and why
python3 -m localrun.native_build install --python P     into P's environment, unless it is there already
python3 -m localrun.native_build wheel --out FOLDER     only the wheel
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from localrun.native_build.machine import Machine
from localrun.native_build.plan import BACKENDS, make_plan, say
from localrun.native_build.wheels import BuildError, check_where, compiled_wheel, install


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="native_build.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("plan", "install", "wheel"))
    parser.add_argument(
        "--backend", choices=("auto", *BACKENDS), default="", help="default: metal on Apple silicon, else cpu"
    )
    parser.add_argument("--wheels", default=os.environ.get("LOCALRUN_WHEELS", ""), metavar="WHERE",
                        help="a folder, or the URL of an index, with ready wheels; also LOCALRUN_WHEELS")  # fmt: skip
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment to install into")
    parser.add_argument("--out", type=Path, default=Path("wheels"), help="where `wheel` puts it")
    parser.add_argument("--force", action="store_true", help="compile and install even what is there already")
    args = parser.parse_args(argv)
    machine = Machine()
    try:
        if args.command == "install":
            install(machine, args.backend, args.wheels, args.python, force=args.force)
            return 0
        plan = make_plan(machine, args.backend, is_ready=bool(args.wheels and args.command == "plan"))
        if args.command == "plan":
            if args.wheels:
                check_where(args.wheels)
            print("\n".join(say(plan, machine, args.wheels)))
            return 1 if plan.problems else 0
        if args.out.exists() and not args.out.is_dir():
            raise BuildError(f"--out: {args.out} is no folder; name another one")
        args.out.mkdir(parents=True, exist_ok=True)
        print(shutil.copy2(compiled_wheel(plan, machine, args.python, anew=args.force), args.out))
    except (BuildError, OSError, ValueError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
