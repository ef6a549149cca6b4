"""Quantizes model files in a child process, one at a time.

Owner: one per Runtime, on the daemon's event loop. The child (`localrun.engine.tools.tasks`) writes to a
temporary file in the blobs' folder; only when it has ended well is the result hashed and named. A caller that stops
listening ends the child, and nothing is left behind.

Does not: choose a quantization, or name models.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import NamedTuple

import msgspec

from localrun import stored
from localrun.errors import BadModelFile, EngineFailed
from localrun.models.gguf import reader
from localrun.models.storage import blobs
from localrun.models.storage.manifest import Place, Role, StoredFile
from localrun.models.storage.store import Store
from localrun.processes import HIDDEN, end_child, end_in_words

_MAX_STDERR_BYTES = 64 * 1024


class Progress(NamedTuple):
    """Tensors that are done, of how many. `result` comes last, with all of them done."""

    n_done: int
    n_total: int
    result: StoredFile | None = None


class _Said(msgspec.Struct):
    """A line of the child."""

    done: int = 0
    total: int = 0
    error: str = ""


class Quantizer:
    """`n_threads` 0 is one for each processor that may be used."""

    def __init__(self, store: Store, *, n_threads: int) -> None:
        self._store = store
        self._n_threads = n_threads
        self._turn = asyncio.Lock()

    async def quantize(self, source: Path, file_type: int, *, expected_bytes: int) -> AsyncGenerator[Progress, None]:
        """Makes a blob of `source` in the quantization `file_type` (a number of `llama_ftype`).

        Raises DiskFull when `expected_bytes` are not free, BadModelFile when llama.cpp refuses the file.
        """
        async with self._turn:
            with stored.temporary(self._store.blobs.folder) as target:
                blobs.check_room(target.parent, expected_bytes)
                n_total = 0
                async with contextlib.aclosing(self._run(source, target, file_type)) as steps:
                    async for said in steps:
                        n_total = said.total
                        yield Progress(said.done, said.total)
                yield Progress(n_total, n_total, await asyncio.to_thread(self._keep, target))

    async def _run(self, source: Path, target: Path, file_type: int) -> AsyncGenerator[_Said, None]:
        """The child's life. Raises BadModelFile or EngineFailed when it does not end well."""
        argv = [sys.executable, "-P", "-m", "localrun.engine.tools.tasks", "quantize"]
        child = await asyncio.create_subprocess_exec(
            *(*argv, str(source), str(target), str(file_type), str(self._n_threads)),
            stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, **HIDDEN,
        )  # fmt: skip
        assert child.stdout is not None
        assert child.stderr is not None
        # Read to its end, or the child would stop at a full pipe; of what it says the end is enough.
        stderr = asyncio.create_task(_tail(child.stderr))
        try:
            problem = ""
            async for line in child.stdout:
                said = msgspec.json.decode(line, type=_Said)
                problem = said.error or problem
                if not said.error:
                    yield said
            returncode = await child.wait()
            if problem:
                raise BadModelFile(f"llama.cpp cannot quantize {source.name}: {problem}")
            if returncode != 0:
                raise EngineFailed(f"the quantizer {end_in_words(returncode)}: {(await stderr)[-300:] or 'no message'}")
        finally:
            await end_child(child)  # the temporary file is deleted next; some systems need the child to be gone
            stderr.cancel()

    def _keep(self, target: Path) -> StoredFile:
        """In a thread: checks the result, hashes it, and names it by its content."""
        size_bytes = reader.read_header(target).size_bytes
        digest = blobs.adopt(self._store.blobs, target)
        return StoredFile(role=Role.MODEL, place=Place.BLOB, size_bytes=size_bytes, digest=digest)


async def _tail(stream: asyncio.StreamReader) -> str:
    text = b""
    while chunk := await stream.read(4096):
        text = (text + chunk)[-_MAX_STDERR_BYTES:]
    return text.decode("utf-8", errors="replace").strip()
