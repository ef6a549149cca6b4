"""Pictures and sound of requests, from the field of a body to the file of pixels or samples that an engine reads.

`read` comes first, before a model is loaded: it decodes base64 (or fetches, where the settings allow it) and looks at
the file's header, so that what is wrong with it is said at once, and so is what the model does not take. `attach`
follows when the model is there, and has the file decoded by the media worker, unless it was decoded for a turn before.

Owner: the daemon's event loop; what takes longer than a millisecond is done in threads. The worker is started by the
first file, and decodes one at a time.

Invariants: no byte of a client reaches a decoder in this process; a file that two requests bring at once is decoded
once; a decoded file exists as long as the job that it was attached to.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from localrun import framing
from localrun.errors import BadRequest, DiskFull, LocalrunError, Unavailable, by_code, of_disk
from localrun.server.media import headers
from localrun.server.media.fetching import Fetcher
from localrun.server.media.files import DecodedFiles, Key, sweep
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
        check_taken(job.model, job.media_kinds, attached)
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
        return Key(content.digest, MediaKind.AUDIO, audio_rate_hz=job.audio_rate_hz)
    is_larger = one.max_side < max(content.header.width, content.header.height)
    return Key(content.digest, MediaKind.IMAGE, max_side=one.max_side if is_larger else 0)


def _naming(field: str, error: LocalrunError) -> LocalrunError:
    """The error of a file, as that of the field that it came by: several fields may wait for one file."""
    if error.status >= 500:
        return error
    named = by_code(error.code, f"{field}: {error.message}")
    named.field = field
    return named


# From what a client wrote into a field to the bytes of a file. Base64 is strict, but for line endings, which many
# programs put in. A long one is decoded piece by piece, so that the thread that does it never keeps others from
# running. A `data:` prefix is accepted wherever base64 is, and what type it names does not count: the bytes decide.

# A multiple of four; about a millisecond's work.
_PIECE_CHARACTERS = 512 * 1024
_DATA_URI = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]{0,20}):", re.IGNORECASE)
_MOST_QUOTED = 40


def url_of(source: str) -> str | None:
    """The source, if it is an http(s) URL."""
    found = _SCHEME.match(source)
    return source if found is not None and found[1].lower() in ("http", "https") else None


def bytes_of(source: str, field: str) -> bytes:
    """Of base64 or a data URI. Raises BadRequest naming `field`."""
    start = 0
    scheme = _SCHEME.match(source)
    if scheme is not None:
        prefix = _DATA_URI.match(source)
        if scheme[1].lower() != "data":
            raise BadRequest.of(
                field,
                f"{scheme[0][:_MOST_QUOTED]!r} addresses are not read here; send the file as base64 or as a "
                f"data URI (data:image/png;base64,...)",
            )
        if prefix is None:
            raise BadRequest.of(field, "a data URI that is not base64; use data:image/png;base64,...")
        start = prefix.end()
    made, rest, is_over = bytearray(), "", False
    try:
        for at in range(start, len(source), _PIECE_CHARACTERS):
            piece = rest + "".join(source[at : at + _PIECE_CHARACTERS].split())
            whole = len(piece) // 4 * 4
            if is_over and piece:
                raise binascii.Error("data after its end")
            made += binascii.a2b_base64(piece[:whole], strict_mode=True)
            rest, is_over = piece[whole:], piece.endswith("=", 0, whole)
        if rest and is_over:
            raise binascii.Error("data after its end")
        made += binascii.a2b_base64(rest + "=" * (-len(rest) % 4), strict_mode=True)  # some clients leave the end out
    except ValueError as error:  # binascii.Error, or letters beyond ASCII
        raise BadRequest.of(
            field,
            f"not valid base64 ({error}); send the file's bytes as base64, with or without "
            f"'data:image/png;base64,' before",
        ) from None
    return bytes(made)
