"""Pictures and sound of requests, from the field of a body to the file of pixels or samples that an engine reads.

`read` comes first, before a model is loaded: it decodes base64 (or fetches, where the settings allow it) and looks at
the file's header, so that what is wrong with it is said at once, and so is what the model does not take. `attach`
follows when the model is there, and has the file decoded by the media worker, unless it was decoded for a turn before.

Owner: the daemon's event loop; what takes longer than a millisecond is done in threads. The worker is started by the
first file, and decodes one at a time.

Decoded files lie here, as long as somebody needs them:

    <cache folder>/media/            0700
      <pid>-<8 hex digits>.lock      held by a daemon as long as it runs
      <pid>-<8 hex digits>/          0700, that daemon's
        in, out                      between the daemon and its worker
        <64 hex digits>              pixels or samples, named by what they were decoded from

One that a request uses stays until the request ends. Then it is kept for the next turn of the conversation, which sends
the same picture again, as long as all kept files have at most `KEEP_BYTES`. The folder goes with the daemon; what a
daemon left behind that was killed is removed by the next one's start.

Invariants: no byte of a client reaches a decoder in this process; a file that two requests bring at once is decoded
once; a decoded file exists as long as the job that it was attached to.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import secrets
import shutil
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import filelock
import msgspec

from localrun import framing
from localrun.errors import BadRequest, DiskFull, LocalrunError, Unavailable, by_code, of_disk
from localrun.server.media import headers
from localrun.server.media.sources import Fetcher, bytes_of, url_of
from localrun.server.prompting.ask import Attached
from localrun.server.workers import DiedError, OverranError, WorkerProcess
from localrun.wire import DecodeReply, DecodeRequest, Media, MediaKind

if TYPE_CHECKING:
    from localrun.models.storage.model import Model
    from localrun.server.jobs.job import Job


# Forty million pixels of a progressive JPEG take 2 s of a slow core, ten minutes of sound as long.
TIMEOUT_S = 20.0
# numpy's library would make threads that nobody needs, and their buffers.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class _Read(msgspec.Struct):
    """What an attachment's field turned out to hold. `data` is let go of when it is decoded."""

    data: bytes
    digest: bytes
    header: headers.Header


class MediaDecoder:
    """See the module. `root` is where decoded files are; `fetcher` is None where URLs are not fetched."""

    def __init__(self, root: Path, *, fetcher: Fetcher | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._root = root
        self._fetcher = fetcher
        self._timeout_s = timeout_s
        self.files = DecodedFiles(root)
        self.worker: WorkerProcess[DecodeReply] = WorkerProcess(
            "localrun.server.media.worker",
            framing.decode_from_media_worker,
            name="media",
            timeout_s=timeout_s,
            arguments=[str(self.files.input_path), str(self.files.output_path)],
            environment=_ENVIRONMENT,
        )
        self._turn = asyncio.Lock()
        self._is_stopped = False
        self._decoding: dict[Key, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Removes what a daemon left behind that was killed."""
        await asyncio.to_thread(sweep, self._root)

    async def stop(self) -> None:
        """Ends the worker and removes all files. What is being decoded ends with Unavailable."""
        self._is_stopped = True
        await self.worker.stop()
        async with self._turn:
            await asyncio.to_thread(self.files.close)

    async def read(self, attached: Sequence[Attached]) -> None:
        """Replaces each source that was not read before by what it holds. Raises BadRequest naming the field, TooLarge,
        and what fetching raises."""
        for one in attached:
            if one.content is not None:
                continue
            url = url_of(one.source)
            if url is None:
                data = await asyncio.to_thread(bytes_of, one.source, one.field)
            elif self._fetcher is None:
                raise BadRequest.of(
                    one.field,
                    "addresses are not fetched here; send the file as a data URI "
                    "(data:image/png;base64,...), or start the daemon with --fetch-images on",
                )
            else:
                data = await self._fetcher.fetch(url, one.field)
            one.content = await asyncio.to_thread(_looked_at, data, one)
            one.source = ""

    async def attach(self, job: Job, attached: Sequence[Attached]) -> Mapping[str, Media]:
        """The decoded files, by marker; the job keeps them until its end. Raises BadRequest for what the model does not
        take and for a file that cannot be decoded, DiskFull, and Unavailable when there is no room or no worker."""
        check_taken(job.model, job.ready.media, attached)
        for one in attached:
            if one.marker not in job.media:
                key = _key(job, one)
                job.media[one.marker] = await self._decoded(key, one)
                job.held.callback(self.files.give_back, key)
                one.content.data = b""
        return job.media

    async def _decoded(self, key: Key, one: Attached) -> Media:
        """Taken from the files; to be given back."""
        while (media := self.files.take(key)) is None:
            decoding = self._decoding.get(key)
            if decoding is None:
                # A task of its own: others may wait for it when this client has gone.
                decoding = self._decoding[key] = asyncio.create_task(self._decode(key, one.content))
                decoding.add_done_callback(lambda done: self._forget(key, done))
            try:
                await asyncio.shield(decoding)
            except LocalrunError as error:
                raise _naming(one.field, error) from None
        return media

    def _forget(self, key: Key, done: asyncio.Task[None]) -> None:
        self._decoding.pop(key, None)
        if not done.cancelled():
            done.exception()  # nobody else looks at it when the clients have gone

    async def _decode(self, key: Key, content: _Read) -> None:
        request = DecodeRequest(
            kind=key.kind,
            format=content.header.format,
            size_bytes=len(content.data),
            cpu_s=math.ceil(self._timeout_s) + 1,
            max_side=key.max_side,
            audio_rate_hz=key.audio_rate_hz,
        )
        async with self._turn:
            if self._is_stopped:
                raise Unavailable("the daemon is shutting down")
            try:
                await self._make(key, content.data, request)
            except DiskFull:
                if not self.files.drop_unused():
                    raise
                await self._make(key, content.data, request)

    async def _make(self, key: Key, data: bytes, request: DecodeRequest) -> None:
        try:
            if await asyncio.to_thread(self.files.open):
                await self.worker.end()
            await asyncio.to_thread(self.files.input_path.write_bytes, data)
            reply = await self._ask(request)
            size_bytes = reply.width * reply.height * 3 or reply.n_samples * 4
            self.files.make_room(size_bytes)
            path = await asyncio.to_thread(self.files.adopt, key)
        except OSError as error:
            raise of_disk(error) or error from None
        finally:
            await asyncio.to_thread(self.files.empty)
        media = Media(key.kind, str(path), reply.digest, reply.width, reply.height, reply.n_samples)
        self.files.add(key, media, size_bytes)

    async def _ask(self, request: DecodeRequest) -> DecodeReply:
        try:
            reply = await self.worker.ask(framing.encode(request))
        except OverranError:
            raise BadRequest(
                f"decoding this {request.format} file takes longer than {self._timeout_s:g} s; send a smaller one"
            ) from None
        except DiedError:
            raise BadRequest(
                f"this {request.format} file ended the process that decodes it; send it in another format"
            ) from None
        if reply.error_code is not None:
            raise by_code(reply.error_code, reply.error_message)
        return reply


def _looked_at(data: bytes, one: Attached) -> _Read:
    header = headers.look(data, one.field, one.kind)
    return _Read(data, hashlib.sha256(data).digest(), header)


def kinds_of(model: Model) -> tuple[MediaKind, ...]:
    """What the model takes, by its projector's header."""
    return tuple(_ENCODERS[name] for name in model.media)


_ENCODERS = {"vision": MediaKind.IMAGE, "audio": MediaKind.AUDIO}
_WORDS = {MediaKind.IMAGE: "images", MediaKind.AUDIO: "sound"}


def check_taken(model: Model, kinds: Sequence[MediaKind], attached: Sequence[Attached]) -> None:
    """Raises BadRequest for the first that is none of the `kinds` that the model takes."""
    one = next((one for one in attached if one.content.header.kind not in kinds), None)
    if one is None:
        return
    word = _WORDS[one.content.header.kind]
    if kinds:
        raise BadRequest.of(one.field, f"'{model.name}' takes {_WORDS[kinds[0]]}, but no {word}; leave it out")
    why = "; send text, or pull a repository with a projector (an mmproj file) beside the model"
    if model.no_projector:
        why = f": {model.no_projector}"
    elif model.projector is not None:
        why = f": it was loaded without its projector {model.projector.name}; the daemon's log says why"
    raise BadRequest.of(one.field, f"'{model.name}' does not support {word}{why}")


def _key(job: Job, one: Attached) -> Key:
    content = one.content
    if content.header.kind is MediaKind.AUDIO:
        return Key(content.digest, MediaKind.AUDIO, audio_rate_hz=job.ready.audio_rate_hz)
    is_larger = one.max_side < max(content.header.width, content.header.height)
    return Key(content.digest, MediaKind.IMAGE, max_side=one.max_side if is_larger else 0)


def _naming(field: str, error: LocalrunError) -> LocalrunError:
    """The error of a file, as that of the field that it came by: several fields may wait for one file."""
    if error.status >= 500:
        return error
    named = by_code(error.code, f"{field}: {error.message}")
    named.field = field
    return named


# --- the decoded files ---

KEEP_BYTES = 256 * 1024 * 1024
MAX_BYTES = 4 * 1024 * 1024 * 1024


class Key(NamedTuple):
    """What a file was decoded from (the SHA-256 of its bytes) and how."""

    digest: bytes
    kind: MediaKind
    audio_rate_hz: int = 0
    max_side: int = 0

    @property
    def file_name(self) -> str:
        return f"{self.digest.hex()}-{self.audio_rate_hz or self.max_side}"


class _Kept:
    def __init__(self, media: Media, size_bytes: int) -> None:
        self.media = media
        self.size_bytes = size_bytes
        self.n_users = 0


class DecodedFiles:
    """Who needs which files, and how long they stay. `root` is the folder of all daemons.

    Owned by the event loop; `open`, `adopt`, `empty` and `close` work on the disk, and may be called from a thread, one
    at a time.
    """

    def __init__(self, root: Path, *, keep_bytes: int = KEEP_BYTES, max_bytes: int = MAX_BYTES) -> None:
        self._root = root
        self.folder = root / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._lock = filelock.FileLock(root / f"{self.folder.name}.lock", thread_local=False)
        self._keep_bytes = keep_bytes
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self.size_bytes = 0

    @property
    def input_path(self) -> Path:
        return self.folder / "in"

    @property
    def output_path(self) -> Path:
        return self.folder / "out"

    def open(self) -> bool:
        """Makes the folder, again if somebody has emptied the cache folder. Whether it did: a worker that runs has
        files open then that are no longer these. Raises OSError."""
        if self.input_path.is_file() and self.output_path.is_file():
            return False
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root.chmod(0o700)
        self._lock.release(force=True)  # its file may be gone as well
        self._lock.acquire(timeout=0)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.input_path.touch(0o600)
        self.output_path.touch(0o600)
        return True

    def close(self) -> None:
        """Removes everything."""
        self._kept.clear()
        self.size_bytes = 0
        _remove(self.folder, self._lock)

    def take(self, key: Key) -> Media | None:
        """The file, which stays until it is given back; None if it is not here, or somebody has removed it."""
        kept = self._kept.get(key)
        if kept is None or not Path(kept.media.path).is_file():
            return None
        kept.n_users += 1
        self._kept.move_to_end(key)
        return kept.media

    def give_back(self, key: Key) -> None:
        """One who took it needs it no more."""
        kept = self._kept.get(key)
        if kept is not None:  # the daemon has not ended
            kept.n_users -= 1
            self._shrink(self._keep_bytes)

    def make_room(self, size_bytes: int) -> None:
        """Raises Unavailable when those in use and one of this size are too much."""
        in_use_bytes = sum(kept.size_bytes for kept in self._kept.values() if kept.n_users)
        self._shrink(self._max_bytes - in_use_bytes - size_bytes)
        if self.size_bytes + size_bytes > self._max_bytes:
            raise Unavailable(
                f"the pictures and recordings of the requests under way take {self.size_bytes / 1e9:.1f} GB on disk, "
                f"and this one would go beyond the limit of {self._max_bytes / 1e9:.1f} GB; try again when they have "
                f"ended"
            )

    def drop_unused(self) -> bool:
        """Removes what is only kept for later turns. Whether there was any."""
        before_bytes = self.size_bytes
        self._shrink(0)
        return self.size_bytes < before_bytes

    def adopt(self, key: Key) -> Path:
        """The worker's output as a file of its own. Raises OSError."""
        path = self.folder / key.file_name
        try:
            shutil.copyfile(self.output_path, path)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path

    def empty(self) -> None:
        """The worker is done with its files, one way or the other: they take no room any more."""
        for scratch in (self.input_path, self.output_path):
            with contextlib.suppress(OSError):
                os.truncate(scratch, 0)

    def add(self, key: Key, media: Media, size_bytes: int) -> None:
        """Keeps a file that was adopted."""
        if key not in self._kept:  # else it takes the place of one that somebody has removed
            self._kept[key] = _Kept(media, size_bytes)
            self.size_bytes += size_bytes

    def _shrink(self, limit_bytes: int) -> None:
        """Removes what nobody uses, the oldest first, until what is left of that is within the limit."""
        unused = [key for key, kept in self._kept.items() if not kept.n_users]
        left_bytes = sum(self._kept[key].size_bytes for key in unused)
        for key in unused:
            if left_bytes <= limit_bytes:
                return
            kept = self._kept.pop(key)
            left_bytes -= kept.size_bytes
            self.size_bytes -= kept.size_bytes
            with contextlib.suppress(OSError):
                Path(kept.media.path).unlink()


def sweep(root: Path) -> None:
    """Removes what daemons left behind that are gone."""
    for path in root.glob("*.lock") if root.is_dir() else ():
        lock = filelock.FileLock(path, thread_local=False)
        with contextlib.suppress(OSError, filelock.Timeout):
            lock.acquire(timeout=0)
            _remove(path.with_suffix(""), lock)


def _remove(folder: Path, lock: filelock.FileLock) -> None:
    if not lock.is_locked:
        return
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
    with contextlib.suppress(OSError):
        Path(lock.lock_file).unlink()
