"""Vectors of pictures and sound in batches, against what libmtmd's own helper computes of each input alone: that is how
llama-server does it, for models that pool by the last token."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localrun.engine.embedding.engine import EmbeddingEngine
from localrun.engine.native.embedder import LlamaEmbedder
from localrun.engine.native.library import mtmd, native
from localrun.wire import Embed, Media, Mixed, Pooling, Segment
from tests.engine.native.media import PAIRS, Pair, make_pair, media_file, prompt
from tests.engine.stepped import NAP_S
from tests.fakes.embedder import check_sequences

# One minus the cosine: rounding, where rows are computed in other batches.
MOST_DISTANCE = 2e-4
PICTURE, TEXT = "see ", " and say what it is"


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), request.param)


class Helper:
    """A context of one sequence in which `mtmd_helper_eval_chunks` computes an input."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.mtmd = pair, mtmd()
        self.model = native.llama_model_load_from_file(str(pair.model).encode(), native.llama_model_default_params())
        params = native.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 2048, 512, 512, 1
        params.n_threads = params.n_threads_batch = 1
        params.embeddings, params.pooling_type = True, native.LLAMA_POOLING_TYPE_LAST
        self.context = native.llama_init_from_model(self.model, params)
        media_params = self.mtmd.mtmd_context_params_default()
        media_params.use_gpu, media_params.n_threads, media_params.print_timings = False, 1, False
        self.projector = self.mtmd.mtmd_init_from_file(str(pair.projector).encode(), self.model, media_params)

    def vector(self, segments: tuple[Segment, ...]) -> NDArray[np.float32]:
        kept, made = [], []
        for segment in segments:
            if segment.media is None:
                data = segment.text.encode()
                text = self.mtmd.mtmd_input_text(text=data, text_len=len(data), add_special=False, parse_special=True)
                kept.append((data, text))
                made.append(self.mtmd.mtmd_input_part(text=ctypes.pointer(text)))
            else:
                made.append(self.mtmd.mtmd_input_part(bitmap=self._bitmap(segment.media)))
        pointers = (ctypes.POINTER(self.mtmd.mtmd_input_part) * len(made))(*map(ctypes.pointer, made))
        chunks = self.mtmd.mtmd_input_chunks_init()
        assert self.mtmd.mtmd_tokenize_from_parts(self.projector, chunks, pointers, len(made), True) == 0
        native.llama_memory_clear(native.llama_get_memory(self.context), True)
        n_past = native.llama_pos(0)
        evaluate = self.mtmd.mtmd_helper_eval_chunks
        assert evaluate(self.projector, self.context, chunks, 0, 0, 512, True, ctypes.byref(n_past)) == 0
        pointer = native.llama_get_embeddings_seq(self.context, 0)
        n_embd = native.llama_model_n_embd_out(self.model)
        found = np.array((ctypes.c_float * n_embd).from_address(ctypes.addressof(pointer.contents)))
        self.mtmd.mtmd_input_chunks_free(chunks)
        for part in made:
            if part.bitmap:
                self.mtmd.mtmd_bitmap_free(part.bitmap)
        return found

    def _bitmap(self, media: Media) -> object:
        if self.pair.hears:
            samples = np.fromfile(media.path, np.float32)
            pointer = samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            return self.mtmd.mtmd_bitmap_init_from_audio(samples.size, pointer)
        pixels = np.fromfile(media.path, np.uint8)
        return self.mtmd.mtmd_bitmap_init(
            media.width, media.height, pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        )

    def close(self) -> None:
        self.mtmd.mtmd_free(self.projector)
        native.llama_free(self.context)
        native.llama_model_free(self.model)


def embedded(embedder: LlamaEmbedder, *inputs: str | Mixed) -> list[NDArray[np.float32]]:
    rung = threading.Event()
    engine = EmbeddingEngine(embedder, max_queue=4, clock=lambda: 0.0, encoded_bytes=1 << 24, ring=rung.set)
    engine.submit(Embed(id=1, inputs=inputs))
    found = {}
    while not engine.is_idle:
        rung.clear()
        step = engine.step()
        check_sequences(engine)
        for delta in step.deltas if step else ():
            assert delta.error_message is None, delta.error_message
            found |= {vector.index: np.frombuffer(vector.values, "<f4") for vector in delta.vectors or ()}
        if engine.wait_s:
            rung.wait(NAP_S)
    engine.close()
    return [found[index] for index in range(len(inputs))]


def distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("n_rows", [256, 70])
def test_a_batch_gives_what_the_helper_gives_of_each_input(pair: Pair, tmp_path: Path, n_rows: int) -> None:
    a, b = (media_file(tmp_path, pair, seed) for seed in (1, 2))
    lists: list[tuple[str | Media, ...]] = [(PICTURE, a, TEXT), ("only text",), (b, TEXT), (PICTURE, a, "or", b, TEXT)]
    embedder = LlamaEmbedder(
        str(pair.model),
        pooling=Pooling.LAST,
        n_ctx=1800,
        n_rows=n_rows,
        n_threads=1,
        projector_path=str(pair.projector),
    )
    helper = Helper(pair)
    try:
        inputs = [Mixed(tuple(prompt(*parts))) if len(parts) > 1 else str(parts[0]) for parts in lists]
        found = embedded(embedder, *inputs)
        for parts, vector in zip(lists, found, strict=True):
            assert distance(vector, helper.vector(tuple(prompt(*parts)))) < MOST_DISTANCE, parts
        seen, other = (embedded(embedder, Mixed(tuple(prompt(one, TEXT))))[0] for one in (a, b))
        assert distance(seen, other) > 10 * MOST_DISTANCE, "the model does not look"
    finally:
        helper.close()
        embedder.close()
