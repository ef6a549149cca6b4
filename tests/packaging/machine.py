"""A machine made of programs that say what a test wants: `machine.add("nvidia-smi", "echo ...")`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
# What the scripts need of any machine.
TOOLS = ("awk", "bash", "dirname", "env", "grep", "ln", "mkdir", "mv", "paste", "readlink", "rm", "sed", "sort", "tr")


class Machine:
    """Nothing is on PATH but the usual tools, Python, a compiler, and what a test adds."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.home = folder / "home"
        self.bin.mkdir()
        self.home.mkdir()
        for name in TOOLS:
            found = shutil.which(name)
            assert found is not None, f"this test needs {name}"
            (self.bin / name).symlink_to(found)
        self.add("python3", f'exec {sys.executable} "$@"')
        self.add("cc", "exit 0")
        self.add("c++", "exit 0")
        self.is_system("Linux", "x86_64")

    def add(self, name: str, script: str) -> None:
        """A program of the machine, in the shell's language."""
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n", encoding="utf-8")
        path.chmod(0o755)

    def says(self, name: str, text: str) -> None:
        """A program that prints one text, whatever it is asked."""
        self.add(name, f"while IFS= read -r line; do printf '%s\\n' \"$line\"; done <<'END'\n{text}\nEND")

    def is_system(self, system: str, machine: str) -> None:
        """What `uname` says, and Python's `platform`."""
        self.add("uname", f'[ "$1" = -m ] && echo {machine} || echo {system}')
        says = f"platform.system, platform.machine = lambda: {system!r}, lambda: {machine!r}"
        (self.bin / "sitecustomize.py").write_text(f"import platform\n{says}\n", encoding="utf-8")

    def install(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `packaging/install.sh`."""
        environ = {
            "PATH": str(self.bin),
            "HOME": str(self.home),
            "PYTHONPATH": str(self.bin),
            "CUDA_HOME": "/none",
            "ROCM_PATH": "/none",
            **variables,
        }
        script = str(PACKAGING / "install.sh")
        bash = shutil.which("bash", path=os.environ["PATH"])
        assert bash is not None
        return subprocess.run(
            [bash, script, *arguments], env=environ | variables, capture_output=True, text=True, timeout=60
        )

    def plan(self, *arguments: str, **variables: str) -> str:
        """What a dry run says, which must be possible."""
        ran = self.install("--dry-run", *arguments, **variables)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout
