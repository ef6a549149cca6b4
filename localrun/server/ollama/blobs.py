"""Uploaded files: HEAD and POST `/api/blobs/:digest`, which clients send before a `create` that names them.

The body is written as it comes, in pieces that a thread hashes; it has its name when its content has that digest, and
leaves nothing behind when it has not or when the client goes away.

Does not: look at what is in a file (`create` does).
"""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from localrun.errors import DiskFull, NotFound
from localrun.models.blobs import BlobWriter
from localrun.models.manifest import check_digest
from localrun.server.http.exchange import Exchange
from localrun.server.runtime import Runtime

PIECE_BYTES = 1024 * 1024
# Of the disk, to be left for others.
RESERVE_BYTES = 256 * 1024 * 1024


async def blob(runtime: Runtime, exchange: Exchange) -> None:
    """The routes' handler."""
    digest = check_digest(exchange.scope["path_params"]["digest"], field="digest")
    is_here = await asyncio.to_thread(runtime.store.blobs.has, digest)
    if exchange.scope["method"] == "HEAD":
        if not is_here:
            raise NotFound(f"{digest} is not here", field="digest")
        await exchange.answer(b"")
        return
    if is_here:
        # Read all the same: a client whose sending is cut off does not look at the answer.
        async for _ in exchange.pieces():
            pass
        await exchange.answer(b"")
        return
    announced = exchange.header(b"content-length")
    folder = runtime.store.blobs.folder
    await asyncio.to_thread(_check_room, folder, int(announced) if announced.isascii() and announced.isdigit() else 0)
    try:
        with BlobWriter(runtime.store.blobs) as writer:
            async for piece in _large(exchange.pieces()):
                await asyncio.to_thread(_write, writer, piece, folder)
            await asyncio.to_thread(writer.finish, digest)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise DiskFull(f"the disk of {folder} is full; nothing of the file is kept") from None
    await exchange.answer(b"", status=201)


def _write(writer: BlobWriter, piece: bytes, folder: Path) -> None:
    """Not every file announces its length, and others fill the disk meanwhile."""
    _check_room(folder, len(piece))
    writer.write(piece)


def _check_room(folder: Path, n_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free - RESERVE_BYTES
    if n_bytes > free_bytes:
        raise DiskFull(
            f"{n_bytes / 1e9:.3f} GB of the file are to be written, but {max(0, free_bytes) / 1e9:.3f} GB are free in "
            f"{folder}, besides {RESERVE_BYTES / 1e9:.1f} GB that are left to others; free some, or put "
            f"LOCALRUN_MODELS on another disk"
        )


async def _large(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in fewer pieces: a thread hop costs more than copying one."""
    waiting = bytearray()
    async for piece in pieces:
        waiting += piece
        if len(waiting) >= PIECE_BYTES:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)
