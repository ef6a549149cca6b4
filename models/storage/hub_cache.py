"""The Hugging Face cache that llama.cpp, transformers and localrun share: where it is, where a repository's files lie
in it, and how one file leaves it.

    <cache>/models--<owner>--<name>/blobs/<etag>                 the content
                                    snapshots/<commit>/<path>    a link to it: symbolic, else hard, else the file itself
                                    refs/<revision>              the commit that a branch or tag pointed to last
    <cache>/.locks/models--<owner>--<name>/<etag>.lock           held while a blob is written

Checks whatever a path is made of: all of it came from another machine. A file leaves by its link first, and its content
when no other link needs it: what other programs fetched of the same repository stays usable.

Does not: fetch.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from localrun import stored
from localrun.errors import DownloadFailed


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
    is_symlink, content = link.is_symlink(), _status(link)
    try:
        link.unlink()
    except FileNotFoundError:
        return 0
    size_bytes = 0
    if content is not None and not any(_is(other, content) for other in (repo / "snapshots").rglob("*")):
        blobs = [blob for blob in (repo / "blobs").glob("*") if _is(blob, content)]
        for blob in blobs:
            blob.unlink(missing_ok=True)
        # A symbolic link without a blob leads out of the repository, to what is not the cache's to delete.
        size_bytes = content.st_size if blobs or not is_symlink else 0
    _remove_empty(repo, link.parent)
    return size_bytes


def _status(path: Path) -> os.stat_result | None:
    """None where a name leads nowhere."""
    try:
        return path.stat()
    except OSError:
        return None


def _is(path: Path, content: os.stat_result) -> bool:
    """Whether a path leads to this content, by whatever name or link."""
    status = _status(path)
    return status is not None and os.path.samestat(status, content)


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


_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_MAX_PATH_CHARS = 1_024
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# This folder is a cache: https://bford.info/cachedir/\n"


class CachedFile(NamedTuple):
    """`path` in the repository; `etag` is "" where the cache has no links and so does not say it."""

    path: str
    size_bytes: int
    etag: str


@dataclass(frozen=True)
class RepoCache:
    """Of one repository. Raises DownloadFailed for a repository, commit, etag or path that makes no safe path."""

    cache_folder: Path
    repo: str

    @property
    def folder_name(self) -> str:
        if not _REPO.fullmatch(self.repo) or ".." in self.repo or "--" in self.repo:
            raise DownloadFailed(f"{self.repo!r} is no repository of the hub")
        return f"models--{self.repo.replace('/', '--')}"

    @property
    def folder(self) -> Path:
        return self.cache_folder / self.folder_name

    def blob(self, etag: str) -> Path:
        return self.folder / "blobs" / _checked_etag(etag)

    def lock(self, etag: str) -> Path:
        return self.cache_folder / ".locks" / self.folder_name / f"{_checked_etag(etag)}.lock"

    def relative(self, commit: str, path: str) -> str:
        """Of a file in a snapshot, to the cache; with forward slashes."""
        return "/".join((self.folder_name, "snapshots", checked_commit(commit), *checked_path(path)))

    def snapshot(self, commit: str, path: str) -> Path:
        return self.cache_folder / self.relative(commit, path)

    def link(self, commit: str, path: str, etag: str) -> Path:
        name = self.snapshot(commit, path)
        blob = self.blob(etag)
        if name.exists() and (not blob.exists() or name.samefile(blob)):
            return name
        with stored.temporary(name.parent) as temporary:
            _point(temporary, blob)
            os.replace(temporary, name)
        return name

    def remember(self, revision: str, commit: str) -> None:
        """Writes down the commit of a branch or tag. A commit needs none."""
        if revision == checked_commit(commit):
            return
        path = self.folder.joinpath("refs", *checked_path(revision))
        with contextlib.suppress(OSError):
            if path.read_text(encoding="ascii") == commit:
                return
        with stored.replacing(path) as file:
            file.write(commit.encode())

    def tag(self) -> None:
        """Marks the cache as one, for backup programs."""
        path = self.cache_folder / "CACHEDIR.TAG"
        if not path.exists():
            self.cache_folder.mkdir(parents=True, exist_ok=True)
            path.write_text(_TAG, encoding="ascii")

    def commit_of(self, revision: str) -> str | None:
        """The commit that a revision meant when something of it was fetched last; None if nothing was. In a cache that
        was copied without its refs, the only commit that there is."""
        if _COMMIT.fullmatch(revision):
            return revision
        try:
            text = self.folder.joinpath("refs", *checked_path(revision)).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            there = [path.name for path in self.folder.glob("snapshots/*") if _COMMIT.fullmatch(path.name)]
            text = there[0] if len(there) == 1 else ""
        return text if _COMMIT.fullmatch(text) else None

    def files(self, commit: str) -> Iterator[CachedFile]:
        root = self.folder / "snapshots" / checked_commit(commit)
        for path in sorted(root.rglob("*")):
            # Not what macOS keeps beside a file on a disk that is not its own.
            if path.is_file() and not path.name.startswith("._"):
                etag = path.resolve().name if path.is_symlink() else ""
                yield CachedFile(path.relative_to(root).as_posix(), path.stat().st_size, etag)


def checked_commit(commit: str) -> str:
    if not _COMMIT.fullmatch(commit):
        raise DownloadFailed(f"the hub named the commit {commit[:80]!r}, which is none")
    return commit


def checked_path(path: str) -> list[str]:
    """The parts of a path in a repository. Raises DownloadFailed for one that could lead out of it or be ambiguous."""
    parts = path.split("/")
    is_bad = any(part in ("", ".", "..") or part.endswith((".", " ")) for part in parts)
    if is_bad or len(path) > _MAX_PATH_CHARS or not path.isprintable() or re.search(r'[\\:*?"<>|]', path):
        raise DownloadFailed(f"the hub named the file {path[:200]!r}; nothing of it was written")
    return parts


def _checked_etag(etag: str) -> str:
    if not _ETAG.fullmatch(etag):
        raise DownloadFailed(f"the hub named the digest {etag[:80]!r}, which is none")
    return etag


def _point(name: Path, blob: Path) -> None:
    """A link where the system allows one; else the file itself under that name, as huggingface_hub has it there."""
    try:
        name.symlink_to(os.path.relpath(blob, name.parent))
        return
    except OSError:
        pass
    try:
        name.hardlink_to(blob)
    except OSError:
        shutil.move(blob, name)
