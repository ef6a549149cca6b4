"""Small models with small projectors, media for them, and what libmtmd's own helper computes of both."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import MediaChunk, MediaRows
from localrun.engine.native.library import mtmd, native
from localrun.engine.native.llama import LlamaBackend
from localrun.wire import Media, MediaKind, Segment
from tests.projector_file import TILE_TOKENS, with_tokens, write_projector
from tests.support.synthesis.synthesize import synthesize, write_model
from tests.support.synthesis.synthetic_tokenizer import make_vocabulary
from tests.support.synthesis.tensor_plan import SHAPES, plan_tensors

Part = list[int] | MediaChunk


@dataclass(frozen=True)
class Pair:
    """A text model and a projector; `hears` it instead of looking."""

    model: Path
    projector: Path
    hears: bool = False


# The rows of all of these text models are as wide.
WIDTH = 256
# Name: the shape of the text model, and the type of the projector.
PAIRS = {
    "gemma3": ("tiny", "gemma3"),
    "gemma3-window": ("tiny-gemma3", "gemma3"),
    "idefics3": ("tiny", "idefics3"),
    "qwen2vl": ("tiny-qwen2vl", "qwen2vl_merger"),
    "qwen35": ("tiny-qwen35", "qwen2vl_merger"),
    "ultravox": ("tiny", "ultravox"),
}


def make_pair(folder: Path, name: str, **tower: int) -> Pair:
    """`tower` as `projector_file.parts_of` takes it."""
    shape, kind = PAIRS[name]
    model, projector = folder / f"{name}.gguf", folder / f"{name}-mmproj.gguf"
    if kind == "idefics3":
        vocabulary = with_tokens(make_vocabulary(SHAPES[shape].n_vocab), TILE_TOKENS)
        write_model(model, SHAPES[shape], list(plan_tensors(SHAPES[shape], "F16")), "F16", vocabulary, seed=0)
    else:
        synthesize(shape, "F16", model)
    # With these numbers no two tokens are nearly as likely in the tests, and different media give different answers.
    write_projector(projector, kind, WIDTH, seed=3, **tower)
    return Pair(model, projector, hears=kind == "ultravox")


@contextmanager
def opened(pair: Pair, *, split: bool = True, n_batch: int = 512, n_cells: int = 4096) -> Iterator[LlamaBackend]:
    backend = LlamaBackend(
        str(pair.model), n_cells=n_cells, n_seqs=4, n_spare_seqs=4, n_batch=n_batch, n_threads=1, n_gpu_layers=0,
        kv_type="f16", may_split=split, projector_path=str(pair.projector),
    )  # fmt: skip
    try:
        yield backend
    finally:
        backend.close()


def media_file(folder: Path, pair: Pair, seed: int = 1, *, width: int = 70, height: int = 50) -> Media:
    """A random picture or recording."""
    rng = np.random.default_rng(seed)
    if pair.hears:
        tone = np.sin(np.arange(20_000) * seed**2 * 0.05)
        data = (tone * 0.5 + rng.standard_normal(20_000) * 0.01).astype("<f4").tobytes()
        sizes = {"n_samples": 20_000}
    else:
        data = rng.integers(0, 255, width * height * 3, np.uint8).tobytes()
        sizes = {"width": width, "height": height}
    path = folder / f"{seed}-{len(data)}.raw"
    path.write_bytes(data)
    kind = MediaKind.AUDIO if pair.hears else MediaKind.IMAGE
    return Media(kind, str(path), hashlib.sha256(data).digest(), **sizes)


def prompt(*parts: str | Media) -> list[Segment]:
    return [Segment(part) if isinstance(part, str) else Segment("", media=part) for part in parts]


def table_of(parts: Sequence[Part]) -> tuple[tuple[int, MediaChunk], ...]:
    at, found = 0, []
    for part in parts:
        if isinstance(part, MediaChunk):
            found.append((at, part))
            at += part.n_tokens
        else:
            at += len(part)
    return tuple(found)


def n_tokens(parts: Sequence[Part]) -> int:
    return sum(part.n_tokens if isinstance(part, MediaChunk) else len(part) for part in parts)


def encoded(backend: LlamaBackend, chunk: MediaChunk) -> NDArray[np.float32]:
    assert backend.projector is not None
    return backend.projector.begin(chunk).result()


# By the digest of media and the number of a chunk: what is computed again need not be encoded again.
_rows_of: WeakKeyDictionary[LlamaBackend, dict[tuple[bytes, int], NDArray[np.float32]]] = WeakKeyDictionary()


def _encoded_once(backend: LlamaBackend, chunk: MediaChunk) -> NDArray[np.float32]:
    known, key = _rows_of.setdefault(backend, {}), (chunk.media.digest, chunk.ordinal)
    if key not in known:
        known[key] = encoded(backend, chunk)
    return known[key]


def compute(
    backend: LlamaBackend,
    seq: int,
    parts: Sequence[Part],
    *,
    start: int = 0,
    table: tuple[tuple[int, MediaChunk], ...] | None = None,
    piece: int = 0,
) -> NDArray[np.float32]:
    """The logits behind these parts, computed from index `start` on in a sequence. With `piece`
    causal chunks are computed so many rows at a time."""
    backend.turn_to(pool=seq >= backend.n_seqs)
    if table is not None or not start:
        backend.set_chunks(seq, table or table_of(parts))
    at, row = start, 0
    for part in parts:
        is_last = part is parts[-1]
        size, most = n_tokens([part]), backend.batch.capacity
        if isinstance(part, MediaChunk):
            rows, step = _encoded_once(backend, part), min(piece or most, most) if part.is_causal else size
            for first in range(0, size, step):
                row = min(step, size - first)
                backend.decode_media(MediaRows(seq, at, part, rows, first, row))
        else:
            batch = backend.batch
            for first in range(0, size, most):
                row = min(most, size - first)
                batch.token[:row], batch.seq[:row] = part[first : first + row], seq - batch.first_seq
                batch.pos[:row] = range(at + first, at + first + row)
                batch.wants_logits[:row] = 0
                batch.wants_logits[row - 1] = is_last and first + row == size
                backend.decode(row)
        at += size
    logits = np.array(backend.logits(row - 1))
    backend.turn_to(pool=False)
    return logits


def helper_logits(pair: Pair, segments: Sequence[Segment], *, n_batch: int = 512) -> NDArray[np.float32]:
    """What `mtmd_helper_eval_chunks` says of the same prompt, in a context of its own."""
    bindings = mtmd()
    model_params = native.llama_model_default_params()
    model = native.llama_model_load_from_file(str(pair.model).encode(), model_params)
    params = native.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 4096, n_batch, n_batch, 1
    params.n_threads = params.n_threads_batch = 1
    params.swa_full = False
    context = native.llama_init_from_model(model, params)
    media_params = bindings.mtmd_context_params_default()
    media_params.use_gpu, media_params.n_threads, media_params.print_timings = False, 1, False
    projector = bindings.mtmd_init_from_file(str(pair.projector).encode(), model, media_params)
    kept, made = [], []
    for segment in segments:
        if segment.media is None:
            data = segment.text.encode()
            text = bindings.mtmd_input_text(text=data, text_len=len(data), add_special=False, parse_special=True)
            kept.append((data, text))
            made.append(bindings.mtmd_input_part(text=ctypes.pointer(text)))
        elif pair.hears:
            samples = np.fromfile(segment.media.path, np.float32)
            pointer = samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            made.append(bindings.mtmd_input_part(bitmap=bindings.mtmd_bitmap_init_from_audio(samples.size, pointer)))
        else:
            pixels = np.fromfile(segment.media.path, np.uint8)
            pointer = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            bitmap = bindings.mtmd_bitmap_init(segment.media.width, segment.media.height, pointer)
            made.append(bindings.mtmd_input_part(bitmap=bitmap))
    pointers = (ctypes.POINTER(bindings.mtmd_input_part) * len(made))(*map(ctypes.pointer, made))
    chunks = bindings.mtmd_input_chunks_init()
    assert bindings.mtmd_tokenize_from_parts(projector, chunks, pointers, len(made), False) == 0
    n_past = native.llama_pos(0)
    code = bindings.mtmd_helper_eval_chunks(projector, context, chunks, 0, 0, n_batch, True, ctypes.byref(n_past))
    assert code == 0
    n_vocab = native.llama_vocab_n_tokens(native.llama_model_get_vocab(model))
    logits = np.array(np.ctypeslib.as_array(native.llama_get_logits_ith(context, -1), (n_vocab,)))
    bindings.mtmd_input_chunks_free(chunks)
    for part in made:
        if part.bitmap:
            bindings.mtmd_bitmap_free(part.bitmap)
    bindings.mtmd_free(projector)
    native.llama_free(context)
    native.llama_model_free(model)
    return logits
