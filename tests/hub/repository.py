"""A repository of the loopback hub: files, and what the hub says about them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    """`lfs` are the paths that lie at the storage, as large files do; the others come from the hub itself."""

    repo: str
    files: dict[str, bytes]
    lfs: frozenset[str] | None = None
    branches: tuple[str, ...] = ("main",)
    gated: bool = False
    private: bool = False
    licence: str = "apache-2.0"
    n_downloads: int = 1000
    tags: list[str] = field(default_factory=lambda: ["gguf"])

    @property
    def commit(self) -> str:
        digest = hashlib.sha1(self.repo.encode())
        for path, content in sorted(self.files.items()):
            digest.update(path.encode() + hashlib.sha256(content).digest())
        return digest.hexdigest()

    def is_lfs(self, path: str) -> bool:
        return path.endswith(".gguf") if self.lfs is None else path in self.lfs

    def etag(self, path: str) -> str:
        content = self.files[path]
        return hashlib.sha256(content).hexdigest() if self.is_lfs(path) else git_sha1(content)

    def knows(self, revision: str) -> bool:
        return revision in self.branches or revision == self.commit

    def info(self) -> dict[str, Any]:
        return {
            "_id": "1",
            "id": self.repo,
            "modelId": self.repo,
            "sha": self.commit,
            "private": self.private,
            "gated": "manual" if self.gated else False,
            "downloads": self.n_downloads,
            "likes": 7,
            "lastModified": "2026-10-01T12:00:00.000Z",
            "createdAt": "2026-09-01T12:00:00.000Z",
            "tags": [*self.tags, f"license:{self.licence}"],
            "cardData": {"license": self.licence},
            "siblings": [{"rfilename": path} for path in sorted(self.files)],
        }

    def tree(self) -> list[dict[str, Any]]:
        """Every file and folder, as the hub lists them recursively."""
        folders = {"/".join(path.split("/")[:depth]) for path in self.files for depth in range(1, path.count("/") + 1)}
        entries: list[dict[str, Any]] = [
            {"type": "directory", "path": folder, "size": 0, "oid": git_sha1(folder.encode())}
            for folder in sorted(folders)
        ]
        for path, content in sorted(self.files.items()):
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_sha1(content)}
            if self.is_lfs(path):
                entry["lfs"] = {"oid": self.etag(path), "size": len(content), "pointerSize": 134}
            entries.append(entry)
        return entries
