"""Which saved state belongs to which model and build: a fingerprint of everything that changes what the bytes mean.

Owner: the engine process, once at start, after the model is loaded. The weights are not read as a whole, that takes as
long as loading: size, modification time, the first MiB (header and vocabulary) and pages spread over the rest tell one
file from another. The native libraries count by size and modification time, for a build may differ under one version.

Does not: open or make the folder that is named after it (`kv_disk_files.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from localrun.engine.cache.kv_disk_format import MAGIC

FINGERPRINT_BYTES = 16
HEAD_BYTES = 1024 * 1024
N_PAGES = 64
PAGE_BYTES = 4096


def fingerprint(model_path: Path, *, build: str, parameters: Mapping[str, str]) -> bytes:
    """16 bytes for a model file, a build of llama.cpp (`library_build`) and the parameters of the context that change
    its state. Raises OSError when the file cannot be read."""
    digest = hashlib.blake2b(MAGIC, digest_size=FINGERPRINT_BYTES, person=b"localrun model")
    with model_path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        _add(digest, f"{status.st_size} {status.st_mtime_ns}".encode())
        _add(digest, file.read(HEAD_BYTES) or b"")
        step_bytes = max(PAGE_BYTES, (status.st_size - HEAD_BYTES) // N_PAGES)
        for offset in range(HEAD_BYTES, status.st_size, step_bytes):
            file.seek(offset)
            _add(digest, file.read(PAGE_BYTES) or b"")
    _add(digest, build.encode())
    for name, value in sorted(parameters.items()):
        _add(digest, name.encode())
        _add(digest, value.encode())
    return digest.digest()


def library_build(package: str, library_folder: Path) -> str:
    """The version of a package and what its native libraries look like, as a line for people. Raises OSError."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(library_folder.iterdir()):
        status = path.stat()
        _add(digest, f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:  # laid out by hand; the files tell it apart all the same
        version = "of unknown version"
    return f"{package} {version} {digest.hexdigest()}"


def _add(digest: hashlib.blake2b, part: bytes) -> None:
    """With its length, so that what ends one part cannot pass for the beginning of the next."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
