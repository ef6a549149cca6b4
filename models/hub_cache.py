"""The Hugging Face cache that llama.cpp, transformers and localrun share: where it is, and how one file leaves it.

    models--<owner>--<repo>/blobs/<etag>                  the content
    models--<owner>--<repo>/snapshots/<commit>/<file>     a link to it (a copy where the system has no links)
    models--<owner>--<repo>/refs/<revision>               a commit's name

A file leaves by its link first, and its content when no other link needs it: what other programs fetched of the same
repository stays usable.

Does not: download.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """By the variables that huggingface_hub reads. Nothing is created."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return _expanded(environ[name])
    if environ.get("HF_HOME"):
        return _expanded(environ["HF_HOME"]) / "hub"
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(cache) / "huggingface" / "hub"


def remove(cache: Path, relative_path: str) -> int:
    """Removes one file of a snapshot, by its path below the cache. Bytes freed; 0 when it is gone already.

    Empty folders go with it, up to the repository's when nothing is left there. Raises OSError.
    """
    link = cache / relative_path
    repo = cache / Path(relative_path).parts[0]
    target = link.resolve()
    try:
        size_bytes = target.stat().st_size if target.is_file() else 0
        link.unlink()
    except FileNotFoundError:
        return 0
    if target != link:
        is_needed = any(other.resolve() == target for other in (repo / "snapshots").rglob("*") if other.is_symlink())
        if is_needed or target.parent != (repo / "blobs").resolve():
            size_bytes = 0
        else:
            target.unlink(missing_ok=True)
    _remove_empty(repo, link.parent)
    return size_bytes


def _remove_empty(repo: Path, snapshot: Path) -> None:
    with contextlib.suppress(OSError):
        while snapshot != repo:
            snapshot.rmdir()
            snapshot = snapshot.parent
    snapshots = repo / "snapshots"
    for ref in (repo / "refs").rglob("*"):
        # A ref to a commit of which nothing is here would make other programs believe that it is.
        if ref.is_file() and not (snapshots / ref.read_text(encoding="utf-8", errors="replace").strip()).is_dir():
            ref.unlink(missing_ok=True)
    for leftover in (repo / "refs", repo / "blobs", snapshots, repo):
        with contextlib.suppress(OSError):
            leftover.rmdir()


def _expanded(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()
