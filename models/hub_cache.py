"""The Hugging Face cache that llama.cpp, transformers and localrun share: where it is, and how one file leaves it.

    models--<owner>--<repo>/blobs/<etag>                  the content
    models--<owner>--<repo>/snapshots/<commit>/<file>     a link to it: symbolic, else hard, else the file itself
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
from typing import NamedTuple


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
    is_symlink, content = link.is_symlink(), _content(link)
    try:
        link.unlink()
    except FileNotFoundError:
        return 0
    size_bytes = 0
    if content is not None and not any(_content(other) == content for other in (repo / "snapshots").rglob("*")):
        blobs = [blob for blob in (repo / "blobs").glob("*") if _content(blob) == content]
        for blob in blobs:
            blob.unlink(missing_ok=True)
        # A symbolic link without a blob leads out of the repository, to what is not the cache's to delete.
        size_bytes = content.size_bytes if blobs or not is_symlink else 0
    _remove_empty(repo, link.parent)
    return size_bytes


class _Content(NamedTuple):
    """What tells a file from others, by whatever name or link it is reached."""

    device: int
    inode: int
    size_bytes: int


def _content(path: Path) -> _Content | None:
    """None where a name leads nowhere."""
    try:
        status = path.stat()
    except OSError:
        return None
    return _Content(status.st_dev, status.st_ino, status.st_size)


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
