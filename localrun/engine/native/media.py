"""libmtmd as a `backend.Projector`: from pictures and sound to rows for the model.

A *chunk* is known before anybody looks at a pixel: how many rows and positions it has depends on the size of the media
alone, and libmtmd says it of a placeholder of that size. Rows are made later, from a file of the daemon's with decoded
pixels or samples. libmtmd's own decoders are never used: they read files that strangers made, and start programs.

Texts are tokenized by the model's vocabulary, as in prompts without media, and what the model wants around a picture is
what libmtmd adds to it. So no text is ever taken for a place of media, and prompts begin with the same tokens whatever
comes later.

Threads: any may `tokenize`. The *encoder* is a thread of its own (`GraphThread`), and computes one chunk at a time.

Invariant: native code sees no size and no number that was not checked here, because it aborts the process.
Does not: decode files, cache rows (the engine), or compute the model.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import DecodeFailed, MediaChunk
from localrun.engine.native.library import last_problem, log_callback, mtmd, native
from localrun.engine.native.threads import ComputeLock
from localrun.engine.native.worker import GraphThread
from localrun.errors import BadModelFile, BadRequest, NotSupported
from localrun.wire import Media, MediaKind, Segment

# The daemon's limits are lower. These are what native code was tried with.
MOST_SIDE, MOST_PIXELS = 16_384, 64 << 20
# Fewer than one window of a spectrum abort the process. The most are more than an hour of speech.
LEAST_SAMPLES, MOST_SAMPLES = 400, 1 << 26
# Pictures whose chunks are the largest: what a projector makes of them is limited by their area, sides or shape.
_LARGEST = ((4096, 4096), (16_384, 4096), (4096, 16_384), (1024, 1024), (64, 64))
_SOME_SAMPLES = 16_000
# What rows depend on besides the file and the library.
_PARAMETERS = b"localrun rows 1, no limits of tokens"
_N_SIZES_KEPT = 256


class _ChunkRows(NamedTuple):
    """A chunk of media of some size. Its rows stand at `places[0]` (t, y, x, z) if it begins at position 0; each part
    moves by `places[1]`, 0 or 1, for every position that it begins later."""

    n_tokens: int
    n_pos: int
    is_causal: bool
    places: tuple[NDArray[np.int32], NDArray[np.int32]]


_Part = _ChunkRows | tuple[int, ...]


class LlamaProjector:
    """See the module. `model` is the loaded text model, `tokenize` its vocabulary's, and `helping` is entered by
    threads that compute beside the steps.

    Raises BadModelFile for a file that libmtmd refuses or that is not this model's, NotSupported for a kind of
    projector that localrun cannot use, and EngineFailed without libmtmd.
    """

    def __init__(
        self,
        path: str,
        model: Any,
        tokenize: Callable[..., list[int]],
        *,
        n_threads: int,
        uses_gpu: bool,
        turns: ComputeLock,
        helping: AbstractContextManager[None],
    ) -> None:
        self._mtmd = mtmd()
        self._tokenize_text, self._helping = tokenize, helping
        self._n_vocab = int(native.llama_vocab_n_tokens(native.llama_model_get_vocab(model)))
        self._n_embd = int(native.llama_model_n_embd_inp(model))
        self._path = path
        self._prepared: tuple[Media, Any] | None = None
        # It stops at once where it is told to, and says that it is done.
        self._thread = GraphThread("encoder", turns, stop=lambda: False, beside=True)
        self._native: Any = None
        self._parts_of = lru_cache(_N_SIZES_KEPT)(self._read_parts)
        try:
            self._open(model, n_threads, uses_gpu)
            self.fingerprint = _fingerprint(path)
        except Exception:
            self.close()
            raise

    def _open(self, model: Any, n_threads: int, uses_gpu: bool) -> None:
        self._mtmd.mtmd_helper_log_set(log_callback, None)
        params = self._mtmd.mtmd_context_params_default()
        params.use_gpu, params.n_threads, params.print_timings = uses_gpu, n_threads, False
        params.cb_eval = self._thread.callback
        self._native = self._mtmd.mtmd_init_from_file(self._path.encode(), model, params)
        if not self._native:
            raise BadModelFile(f"{self._path} cannot be used with this model: {last_problem()}")
        supports = {
            MediaKind.IMAGE: self._mtmd.mtmd_support_vision(self._native),
            MediaKind.AUDIO: self._mtmd.mtmd_support_audio(self._native),
        }
        self.kinds = tuple(kind for kind, is_supported in supports.items() if is_supported)
        self.audio_rate_hz = max(0, int(self._mtmd.mtmd_get_audio_sample_rate(self._native)))
        self._uses_parts = bool(self._mtmd.mtmd_decode_use_mrope(self._native))
        chunks: list[_Part] = []
        if MediaKind.IMAGE in self.kinds:
            self._check_alike()
            for width, height in _LARGEST:
                chunks += self._parts_of(MediaKind.IMAGE, width, height, 0)
        if MediaKind.AUDIO in self.kinds:
            chunks += self._parts_of(MediaKind.AUDIO, 0, 0, _SOME_SAMPLES)
        self.max_chunk_tokens = max(
            (part.n_tokens for part in chunks if isinstance(part, _ChunkRows) and not part.is_causal), default=0
        )

    def tokenize(self, segments: Sequence[Segment]) -> list[list[int] | MediaChunk]:
        found: list[list[int] | MediaChunk] = []
        for segment in segments:
            if segment.media is None:
                parts: Sequence[list[int] | MediaChunk] = [
                    self._tokenize_text(segment.text, parse_special=segment.trusted)
                ]
            else:
                parts = self._chunks_of(segment.media)
            for part in parts:
                if isinstance(part, list) and found and isinstance(found[-1], list):
                    found[-1] += part
                else:
                    found.append([*part] if isinstance(part, list) else part)
        return [part for part in found if part]

    def begin(self, chunk: MediaChunk) -> LlamaEncoding:
        if self._thread.is_busy:
            if not (self._thread.is_stopped and self._thread.is_over()):
                raise ValueError("another chunk is being encoded")
            self._thread.halt()  # nobody asked for what became of it
        if chunk not in self._chunks_of(chunk.media):
            raise ValueError(f"no chunk of {chunk.n_tokens} rows is number {chunk.ordinal} of its media")
        size_bytes = Path(chunk.media.path).stat().st_size
        if size_bytes != _size_bytes(chunk.media):
            raise ValueError(f"decoded media of {size_bytes} bytes instead of {_size_bytes(chunk.media)}")
        encoding = LlamaEncoding(self._thread)
        self._thread.do(lambda: encoding.take(self._encode(chunk)))
        return encoding

    def places(self, chunk: MediaChunk, begin: int) -> NDArray[np.int32]:
        """The parts (t, y, x, z) of each row's position, if the chunk begins at this one. In any thread."""
        first, step = self._rows_of(chunk).places
        found: NDArray[np.int32] = first + step * begin
        return found

    def close(self) -> None:
        """Free it. Nobody tokenizes any more."""
        self._thread.close()
        self._forget()
        if self._native:
            self._mtmd.mtmd_free(self._native)
            self._native = None

    # --- what media are made of, by their size ------------------------------------------------------------------

    def _chunks_of(self, media: Media) -> list[list[int] | MediaChunk]:
        _check_size(media, self.kinds)
        found: list[list[int] | MediaChunk] = []
        n_chunks = 0
        for part in self._parts_of(media.kind, media.width, media.height, media.n_samples):
            if isinstance(part, _ChunkRows):
                found.append(MediaChunk(part.n_tokens, part.n_pos, part.is_causal, media, n_chunks))
                n_chunks += 1
            else:
                found.append(list(part))
        return found

    def _rows_of(self, chunk: MediaChunk) -> _ChunkRows:
        media = chunk.media
        parts = self._parts_of(media.kind, media.width, media.height, media.n_samples)
        return [part for part in parts if isinstance(part, _ChunkRows)][chunk.ordinal]

    def _read_parts(self, kind: MediaKind, width: int, height: int, n_samples: int) -> tuple[_Part, ...]:
        with self._bitmap(kind, width, height, n_samples) as bitmap, self._chunked([bitmap]) as chunks:
            return tuple(self._part(chunk) for chunk in chunks)

    def _part(self, chunk: Any) -> _Part:
        kind = self._mtmd.mtmd_input_chunk_get_type(chunk)
        n_tokens = int(self._mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        if kind == self._mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            count = ctypes.c_size_t()
            tokens = self._mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
            ids = tuple(tokens[: count.value])
            # libmtmd looks tokens up by their texts, and says -1 of those that are missing.
            if not all(0 <= token < self._n_vocab for token in ids):
                raise BadModelFile(f"this model has no tokens for what {self._path} puts around pictures or sound")
            return ids
        n_pos = int(self._mtmd.mtmd_input_chunk_get_n_pos(chunk))
        if not 0 < n_pos <= n_tokens:
            raise BadModelFile(f"{self._path} makes {n_tokens} rows at {n_pos} positions")
        is_causal = not self._mtmd.mtmd_decode_use_non_causal(self._native, chunk)
        is_image = kind == self._mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE
        first, second = (self._read_places(chunk, n_tokens, begin, is_image=is_image) for begin in (0, 1))
        return _ChunkRows(n_tokens, n_pos, is_causal, (first, second - first))

    def _read_places(self, chunk: Any, n_tokens: int, begin: int, *, is_image: bool) -> NDArray[np.int32]:
        if not is_image or not self._uses_parts:
            return np.tile(np.arange(begin, begin + n_tokens, dtype=np.int32), (4, 1))
        places = (self._mtmd.mtmd_decoder_pos * n_tokens)()
        tokens = self._mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        self._mtmd.mtmd_helper_image_get_decoder_pos(tokens, begin, places)
        t, x, y, z = np.frombuffer(places, np.int32).reshape(n_tokens, 4).T
        return np.stack([t, y, x, z])

    def _check_alike(self) -> None:
        """Raises NotSupported if the rows of a picture depend on what comes before it: saved ones would be wrong."""
        width, height = _LARGEST[-1]
        text = self._mtmd.mtmd_input_text(text=b"a", text_len=1, add_special=False, parse_special=False)
        with (
            self._bitmap(MediaKind.IMAGE, width, height, 0) as bitmap,
            self._chunked([bitmap]) as alone,
            self._chunked([text, bitmap, bitmap]) as behind,
        ):
            wanted, found = (
                [part for part in map(self._part, chunks) if isinstance(part, _ChunkRows)] for chunks in (alone, behind)
            )
            for one, other in zip(wanted * 2, found, strict=True):
                if one[:3] != other[:3] or not np.array_equal(one.places, other.places):
                    raise NotSupported(
                        f"{self._path}: projectors whose rows depend on the text before are not supported"
                    )

    @contextmanager
    def _bitmap(
        self, kind: MediaKind, width: int, height: int, n_samples: int, data: NDArray[Any] | None = None
    ) -> Iterator[Any]:
        """Media for libmtmd, which copies them; a placeholder without data. A BadRequest inside gets their size."""
        if kind is MediaKind.IMAGE:
            pixels = None if data is None else data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            bitmap = self._mtmd.mtmd_bitmap_init(width, height, pixels)
        else:
            samples = None if data is None else data.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            bitmap = self._mtmd.mtmd_bitmap_init_from_audio(n_samples, samples)
        try:
            yield bitmap
        except BadRequest as error:
            what = f"recording of {n_samples} samples" if n_samples else f"picture of {width} x {height} pixels"
            raise BadRequest(f"a {what}: {error.message}") from None
        finally:
            self._mtmd.mtmd_bitmap_free(bitmap)

    @contextmanager
    def _chunked(self, parts: list[Any]) -> Iterator[list[Any]]:
        """The chunks of texts and bitmaps."""
        handle = self._chunk(parts)
        try:
            yield self._listed(handle)
        finally:
            self._mtmd.mtmd_input_chunks_free(handle)

    def _chunk(self, parts: list[Any]) -> Any:
        """A native list of chunks, to be freed. Raises BadRequest."""
        kind = self._mtmd.mtmd_input_part
        made = [
            kind(text=ctypes.pointer(part)) if isinstance(part, ctypes.Structure) else kind(bitmap=part)
            for part in parts
        ]
        pointers = (ctypes.POINTER(kind) * len(made))(*map(ctypes.pointer, made))
        handle = self._mtmd.mtmd_input_chunks_init()
        code = self._mtmd.mtmd_tokenize_from_parts(self._native, handle, pointers, len(made), False)
        if code != 0:
            self._mtmd.mtmd_input_chunks_free(handle)
            raise BadRequest(f"the model's projector cannot take this: {last_problem()}")
        return handle

    def _listed(self, handle: Any) -> list[Any]:
        count = self._mtmd.mtmd_input_chunks_size(handle)
        return [self._mtmd.mtmd_input_chunks_get(handle, index) for index in range(count)]

    # --- encoding: the encoder's thread -------------------------------------------------------------------------

    def _encode(self, chunk: MediaChunk) -> NDArray[np.float32]:
        with self._helping:
            chunks = self._prepare(chunk.media)
        with self._thread.computing():
            code = -1 if self._thread.is_stopped else self._mtmd.mtmd_encode_chunk(self._native, chunks[chunk.ordinal])
            rows = np.empty((chunk.n_tokens, self._n_embd), np.float32)
            if code == 0 and not self._thread.is_stopped:
                ctypes.memmove(rows.ctypes.data, self._mtmd.mtmd_get_output_embd(self._native), rows.nbytes)
        if chunk.ordinal == len(chunks) - 1 or self._thread.is_stopped:
            self._forget()
        if self._thread.is_stopped:
            raise DecodeFailed("the encoding was cancelled", is_fatal=True)
        # In cells that several sequences share, a row that is not a number would become everybody's.
        if code != 0:
            raise DecodeFailed(f"the projector failed (code {code}): {last_problem()}", is_fatal=False)
        if not np.isfinite(rows).all():
            raise DecodeFailed("the projector computes NaN or infinite numbers from it", is_fatal=False)
        return rows

    def _prepare(self, media: Media) -> list[Any]:
        """The chunks of media with their contents: scaled pictures, spectra. They are kept for the next one's turn."""
        if self._prepared is None or self._prepared[0] != media:
            self._forget()
            with self._bitmap(*_size(media), _contents(media)) as bitmap:
                self._prepared = media, self._chunk([bitmap])
        is_text = self._mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT
        chunks = [
            chunk for chunk in self._listed(self._prepared[1]) if self._mtmd.mtmd_input_chunk_get_type(chunk) != is_text
        ]
        n_rows = [int(self._mtmd.mtmd_input_chunk_get_n_tokens(chunk)) for chunk in chunks]
        if n_rows != [part.n_tokens for part in self._chunks_of(media) if isinstance(part, MediaChunk)]:
            raise DecodeFailed(f"the projector makes chunks of {n_rows} rows, and said otherwise", is_fatal=False)
        return chunks

    def _forget(self) -> None:
        if self._prepared is not None:
            self._mtmd.mtmd_input_chunks_free(self._prepared[1])
            self._prepared = None


class LlamaEncoding:
    """See `backend.Encoding`."""

    def __init__(self, thread: GraphThread) -> None:
        self._thread = thread
        self._rows: NDArray[np.float32] | None = None

    @property
    def is_over(self) -> bool:
        return self._thread.is_over()

    def take(self, rows: NDArray[np.float32]) -> None:
        """The encoder is done."""
        self._rows = rows

    def result(self) -> NDArray[np.float32]:
        self._thread.finish()
        assert self._rows is not None
        return self._rows

    def halt(self) -> None:
        """See `Encoding.halt`. It does not wait: scaling a picture takes a while, and cannot be stopped."""
        self._thread.give_up()


def _size(media: Media) -> tuple[MediaKind, int, int, int]:
    return media.kind, media.width, media.height, media.n_samples


def _size_bytes(media: Media) -> int:
    """Of the file with the decoded media."""
    return media.width * media.height * 3 if media.kind is MediaKind.IMAGE else media.n_samples * 4


def _check_size(media: Media, kinds: Sequence[MediaKind]) -> None:
    """Raises BadRequest for media that native code must not see."""
    if media.kind not in kinds:
        raise BadRequest(f"this model takes no {media.kind}, only {' and '.join(['text', *kinds])}")
    if media.kind is MediaKind.IMAGE:
        if not (0 < media.width <= MOST_SIDE and 0 < media.height <= MOST_SIDE) or media.n_samples:
            raise BadRequest(f"a picture of {media.width} x {media.height} pixels; a side has 1 to {MOST_SIDE}")
        if media.width * media.height > MOST_PIXELS:
            raise BadRequest(f"a picture of {media.width} x {media.height} pixels; the limit is {MOST_PIXELS} in all")
    elif not LEAST_SAMPLES <= media.n_samples <= MOST_SAMPLES or media.width or media.height:
        raise BadRequest(f"a recording of {media.n_samples} samples; there must be {LEAST_SAMPLES} to {MOST_SAMPLES}")


def _contents(media: Media) -> NDArray[Any]:
    """Pixels or samples, mapped. Raises ValueError for samples that are no numbers, and a file that is too short."""
    kind = np.uint8 if media.kind is MediaKind.IMAGE else np.dtype("<f4")
    data = np.memmap(media.path, kind, "r", shape=(_size_bytes(media) // np.dtype(kind).itemsize,))
    if not np.isfinite(data).all():
        raise ValueError("a recording has samples that are not numbers")
    return data


def _fingerprint(path: str) -> bytes:
    """Of the file's bytes and everything else that the rows of the same media depend on."""
    with open(path, "rb") as file:
        contents = hashlib.file_digest(file, "sha256").digest()
    version = importlib.metadata.version("llama-cpp-python")
    return hashlib.sha256(b"\0".join([_PARAMETERS, version.encode(), contents])).digest()
