"""How much of the disk all models' saved state may take together, and who goes when it is too much.

Called by the background thread of one engine; other engines work on the same folders at the same time, so what is known
is a survey plus one's own writes since, and a new survey comes before anything is deleted. Least recently used goes
first, whosever it is. The file system keeps `RESERVE_BYTES` free for others, whatever the limit says.

Invariant: nothing is deleted while the limits hold.
Does not: follow what other processes write between two surveys; they may overshoot by `SURVEY_EVERY_BYTES` each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from localrun import kv_folders
from localrun.kv_folders import SavedFile

RESERVE_BYTES = 1024**3
SURVEY_EVERY_BYTES = 256 * 1024**2
# Small segments cost by the file: a scan at start reads every header of a model.
MAX_FILES = 20_000
# Room is made for several segments at once, because a survey looks at every file.
_SLACK_PART = 32


class KvDiskBound:
    """See the module. `free_bytes` asks the file system and may raise OSError."""

    def __init__(self, root: Path, limit_bytes: int, free_bytes: Callable[[], int]) -> None:
        self._root = root
        self._limit_bytes = limit_bytes
        self._free_bytes = free_bytes
        self._used_bytes = 0
        self._n_files = 0
        self._unseen_bytes = SURVEY_EVERY_BYTES

    def make_room(self, n_bytes: int) -> tuple[bool, list[SavedFile] | None]:
        """Delete as much as needed for a new file of `n_bytes`. Returns whether it may be written, and, if a survey was
        needed, all files that are left. Raises OSError when the file system does not answer."""
        if n_bytes > self._limit_bytes:
            return False, None
        files: list[SavedFile] | None = None
        if self._unseen_bytes >= SURVEY_EVERY_BYTES or not self._fits(n_bytes):
            files = [file for folder in kv_folders.survey(self._root) for file in folder.files]
            self._used_bytes = sum(file.size_bytes for file in files)
            self._n_files = len(files)
            self._unseen_bytes = 0
            if not self._fits(n_bytes):
                files = self._evict(files, n_bytes)
        return self._fits(n_bytes), files

    def wrote(self, n_bytes: int) -> None:
        """A file of so many bytes was added."""
        self._used_bytes += n_bytes
        self._unseen_bytes += n_bytes
        self._n_files += 1

    def _fits(self, n_bytes: int, slack_bytes: int = 0, slack_files: int = 0) -> bool:
        return (
            self._used_bytes + n_bytes + slack_bytes <= self._limit_bytes
            and self._n_files + 1 + slack_files <= MAX_FILES
            and self._free_bytes() - n_bytes - slack_bytes >= RESERVE_BYTES
        )

    def _evict(self, files: list[SavedFile], n_bytes: int) -> list[SavedFile]:
        """Returns those that are left."""
        left = []
        slack_bytes = min(self._limit_bytes // _SLACK_PART, self._limit_bytes - n_bytes)
        for file in sorted(files, key=lambda file: file.used_at_ns):
            is_enough = self._fits(n_bytes, slack_bytes, MAX_FILES // _SLACK_PART)
            if is_enough or file.writer_pid is not None or not kv_folders.delete(file.path):
                left.append(file)
            else:
                self._used_bytes -= file.size_bytes
                self._n_files -= 1
        return left
