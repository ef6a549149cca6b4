"""An environment for each real client, made once from its pinned requirements and kept in a cache folder.

A changed requirement file, or another Python, makes another environment; `LOCALRUN_CLIENT_ENVS` is the folder, by
default one in the user's cache. Does not: remove old ones.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import filelock
import platformdirs

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements"
PACKAGES = HERE / "packages"
INSTALL_TIMEOUT_S = 900
# The names that a program has, and what else it needs.
BROWSERS = {
    "chromium": (("chromium", "chromium-browser", "google-chrome"), "chromedriver"),
    "firefox": (("firefox-esr", "firefox"),),
    "webkit": (
        ("/usr/lib*/*/webkit2gtk-4.*/MiniBrowser", "/usr/lib*/webkit2gtk-4.*/MiniBrowser"),
        "WebKitWebDriver",
        "Xvfb",
    ),
}


def root() -> Path:
    """The folder of all environments."""
    chosen = os.environ.get("LOCALRUN_CLIENT_ENVS")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("localrun-client-environments"))


def python_of(name: str) -> Path:
    """The interpreter with what `requirements/<name>.txt` pins. Raises RuntimeError with what pip said."""
    requirements = REQUIREMENTS / f"{name}.txt"
    folder = _folder(name, requirements.read_bytes() + sys.version.encode())
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    with _making(folder) as is_made:
        if not is_made:
            _run(folder, [sys.executable, "-m", "venv", str(folder)])
            quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
            _run(folder, [str(python), *quiet, "-r", str(requirements)])
            (folder / ".complete").touch()
    return python


def node_folder_of(name: str) -> Path:
    """A folder whose `node_modules` are those of `packages/<name>`. Raises RuntimeError with what npm said.

    Programs that come as a file for each kind of machine have no lock: registries lack some of those files.
    """
    files = sorted((PACKAGES / name).glob("package*.json"))
    folder = _folder(f"node-{name}", b"".join(file.read_bytes() for file in files))
    with _making(folder) as is_made:
        if not is_made:
            for file in files:
                shutil.copyfile(file, folder / file.name)
            # No package's own scripts: none of these needs one.
            command = "ci" if len(files) > 1 else "install"
            _run(folder, [_npm(), command, "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"])
            (folder / ".complete").touch()
    return folder


def browser(name: str) -> str | None:
    """The path of a browser that the chat page is tested in, if the system's packages have put it and its driver there.

    Those are chromium and chromium-driver; firefox-esr, whose driver comes with the requirements; webkit2gtk-driver and
    xvfb, without which WebKitGTK shows nothing.
    """
    programs, *others = BROWSERS[name]
    if any(shutil.which(other) is None for other in others):
        return None
    found = (shutil.which(program) or next(iter(sorted(glob.glob(program))), None) for program in programs)
    return next((path for path in found if path is not None), None)


def has_node() -> bool:
    """Whether this machine can run the clients for Node."""
    return shutil.which("node") is not None and shutil.which("npm") is not None


def _npm() -> str:
    return shutil.which("npm") or "npm"


def _folder(name: str, content: bytes) -> Path:
    return root() / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"


class _making:  # noqa: N801 - a context manager, used as a function
    """One process at a time works on an environment; gives whether it is complete, and an empty folder if not."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(f"{folder}.lock", timeout=INSTALL_TIMEOUT_S)

    def __enter__(self) -> bool:
        self._lock.acquire()
        is_made = (self._folder / ".complete").is_file()
        if not is_made:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
        return is_made

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _run(folder: Path, command: list[str]) -> None:
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
