"""llama.cpp as a `backend.Backend`: the only import of `llama_cpp` in the project.

Owner: the engine's main thread; `tokenize` alone may run in another. Native code aborts the process on a bad integer,
so every argument is checked here first and becomes a ValueError instead.

One context with one unified KV pool: sharing a prefix is a change of metadata, and prompt rows and decode rows go into
one micro-batch (`n_ubatch` equals `n_batch`, so one decode is one micro-batch and placement follows `kv_cells.py`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# OpenMP threads spin at every barrier of the graph, for milliseconds by default. When anything else wants a core, the
# spinning thread keeps it from the very thread it waits for. Spinning briefly and then sleeping costs nothing on a free
# machine (8 streams, two cores: 679 to 710 tokens/s against 554 to 670) and gave 205 instead of 130 tokens/s beside a
# busy process. Read by the library when it loads, hence before the import.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import llama_cpp.llama_cpp as native

from localrun.engine import devices
from localrun.engine import sampling as stages
from localrun.engine.backend import Batch, DecodeFailed, NoRoom
from localrun.errors import BadModelFile, EngineFailed
from localrun.wire import Sampling, TokenLogprob

log = logging.getLogger("localrun.llama")

GGML_TYPES = {"f16": native.GGML_TYPE_F16, "q8_0": native.GGML_TYPE_Q8_0, "q4_0": native.GGML_TYPE_Q4_0}
# Prefixes of these cannot be shared by position, or there is no text to generate.
_UNSUPPORTED_KINDS = {
    "a recurrent": native.llama_model_is_recurrent,
    "a hybrid": native.llama_model_is_hybrid,
    "a diffusion": native.llama_model_is_diffusion,
    "an encoder": native.llama_model_has_encoder,
}
_GGML_LOG_WARN, _GGML_LOG_ERROR = 3, 4
# llama.cpp takes the pool of all slots for one sequence's context; no sequence here goes beyond what was trained.
_POOL_WARNING = "possible training context overflow"
_PIECE_BYTES = 64
_PART_CHARACTERS = 16384


class LlamaBackend:
    """See the module.

    Raises BadModelFile when llama.cpp refuses the file and EngineFailed when it cannot make a context.
    """

    def __init__(
        self,
        path: str,
        *,
        n_cells: int,
        n_seqs: int,
        n_batch: int,
        n_threads: int,
        n_gpu_layers: int,
        kv_type: str,
    ) -> None:
        native.llama_log_set(_log_callback, None)
        native.llama_backend_init()
        self.n_gpu_layers = n_gpu_layers
        self._model = _load(path, n_gpu_layers)
        self._vocab = native.llama_model_get_vocab(self._model)
        self.n_seqs = n_seqs
        self.n_threads = n_threads
        self._context = self._open_context(n_cells, n_batch, GGML_TYPES[kv_type])
        self._memory = native.llama_get_memory(self._context)
        self.n_cells = int(native.llama_n_ctx(self._context))
        self.n_ctx_train = int(native.llama_model_n_ctx_train(self._model))
        self.n_ctx = min(self.n_cells, self.n_ctx_train)
        self.n_vocab = int(native.llama_vocab_n_tokens(self._vocab))
        self.model_size_bytes = int(native.llama_model_size(self._model))
        self.name = "llama.cpp " + ("GPU" if self.n_gpu_layers else "CPU")
        self.eog_tokens, self.control_tokens = self._special_tokens()
        self._control_text = re.compile("|".join(map(re.escape, filter(None, self.control_tokens))) or "(?!)")
        adds_bos = bool(native.llama_vocab_get_add_bos(self._vocab))
        self.bos_token: int | None = int(native.llama_vocab_bos(self._vocab)) if adds_bos else None
        self.batch = Batch(int(native.llama_n_batch(self._context)))
        self._native_batch, self._batch_memory = _native_batch(self.batch)
        self._pieces: dict[int, bytes] = {}

    # --- vocabulary --------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        if not parse_special:
            return self._tokenize_part(text, parse_special=False)
        return [token for part in self._parts(text) for token in self._tokenize_part(part, parse_special=True)]

    def _parts(self, text: str) -> Iterator[str]:
        """A long text in pieces that end after a control token.

        llama.cpp takes time by the square of the control tokens in one text: seconds for 50,000, hours for a body.
        """
        start = 0
        while len(text) - start > _PART_CHARACTERS:
            found = self._control_text.search(text, start + _PART_CHARACTERS)
            if found is None:
                break
            yield text[start : found.end()]
            start = found.end()
        yield text[start:]

    def _tokenize_part(self, text: str, *, parse_special: bool) -> list[int]:
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        buffer = (native.llama_token * room)()
        count = native.llama_tokenize(self._vocab, data, len(data), buffer, room, False, parse_special)
        if count < 0:
            room = -count
            buffer = (native.llama_token * room)()
            count = native.llama_tokenize(self._vocab, data, len(data), buffer, room, False, parse_special)
        return list(buffer[:count])

    def piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    def _read_piece(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"token {token} is not in the vocabulary of {self.n_vocab}")
        buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        count = native.llama_token_to_piece(self._vocab, token, buffer, _PIECE_BYTES, 0, False)
        if count < 0:
            buffer = ctypes.create_string_buffer(-count)
            count = native.llama_token_to_piece(self._vocab, token, buffer, -count, 0, False)
        return buffer.raw[:count]

    def _special_tokens(self) -> tuple[frozenset[int], tuple[str, ...]]:
        eog, control = [], []
        for token in range(self.n_vocab):
            if native.llama_vocab_is_eog(self._vocab, token):
                eog.append(token)
            if native.llama_vocab_is_control(self._vocab, token):
                control.append(native.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace"))
        return frozenset(eog), tuple(control)

    # --- computing ---------------------------------------------------------------------------------------------

    def decode(self, n_rows: int) -> None:
        batch = self.batch
        if not 0 < n_rows <= batch.capacity:
            raise ValueError(f"{n_rows} rows in a batch of {batch.capacity}")
        _check_range("token", batch.token[:n_rows], self.n_vocab)
        _check_range("sequence", batch.seq[:n_rows], self.n_seqs)
        _check_range("position", batch.pos[:n_rows], self.n_cells)
        if np.count_nonzero(batch.wants_logits[:n_rows]) > self.n_seqs:
            raise ValueError(f"more than {self.n_seqs} rows want logits")
        self._native_batch.n_tokens = n_rows
        code = native.llama_decode(self._context, self._native_batch)
        if code == 0:
            return
        if code == 1:
            raise NoRoom(f"no {n_rows} free cells")
        raise DecodeFailed(f"llama_decode returned {code}", is_fatal=code != -1)

    def sampler(self, sampling: Sampling, *, ignore_eos: bool) -> LlamaSampler:
        banned = np.array(sorted(self.eog_tokens) if ignore_eos else [], np.int64)
        return LlamaSampler(self, stages.chain(sampling, n_ctx=self.n_ctx), banned)

    def logits(self, row: int) -> NDArray[np.float32]:
        """The logits of a row of the last decode, as a view of native memory. Raises ValueError if it has none."""
        pointer = native.llama_get_logits_ith(self._context, row)
        if not pointer:
            raise ValueError(f"row {row} has no logits")
        row_memory = (ctypes.c_float * self.n_vocab).from_address(ctypes.addressof(pointer.contents))
        return np.frombuffer(memoryview(row_memory), np.float32)

    def draw(self, chain: Any, row: int) -> int:
        """The next token by a native chain, which remembers it."""
        return int(native.llama_sampler_sample(chain, self._context, row))

    def logprobs(self, row: int, token: int, n_top: int) -> tuple[float, tuple[TokenLogprob, ...]]:
        logits = self.logits(row).astype(np.float64)
        logits -= logits.max()
        logprobs = logits - np.log(np.exp(logits).sum())
        n_top = min(n_top, self.n_vocab)
        best = np.argpartition(-logprobs, n_top - 1)[:n_top] if n_top else np.empty(0, np.int64)
        best = best[np.argsort(-logprobs[best], kind="stable")]
        top = tuple(TokenLogprob(int(other), self.piece(int(other)), float(logprobs[other])) for other in best)
        return float(logprobs[token]), top

    # --- memory ------------------------------------------------------------------------------------------------

    def seq_share(self, source: int, target: int, start: int, end: int) -> None:
        self._check_seq(source)
        self._check_seq(target)
        if not 0 <= start <= end <= self.n_cells:
            raise ValueError(f"positions [{start}, {end}) are not within [0, {self.n_cells})")
        native.llama_memory_seq_cp(self._memory, source, target, start, end)

    def seq_remove(self, seq: int, start: int, end: int = -1) -> bool:
        self._check_seq(seq)
        if not 0 <= start <= self.n_cells or not -1 <= end <= self.n_cells:
            raise ValueError(f"positions [{start}, {end}) are not within [0, {self.n_cells})")
        return bool(native.llama_memory_seq_rm(self._memory, seq, start, end))

    def state_get(self, seq: int, *, limit_bytes: int) -> bytearray | None:
        self._check_seq(seq)
        size = int(native.llama_state_seq_get_size(self._context, seq))
        if size > limit_bytes:
            return None
        state = bytearray(size)
        buffer = (ctypes.c_uint8 * size).from_buffer(state)
        written = int(native.llama_state_seq_get_data(self._context, buffer, size, seq))
        del buffer
        del state[written:]
        return state

    def state_set(self, seq: int, state: bytearray) -> bool:
        self._check_seq(seq)
        buffer = (ctypes.c_uint8 * len(state)).from_buffer(state)
        is_read = int(native.llama_state_seq_set_data(self._context, buffer, len(state), seq)) == len(state)
        if not is_read:
            native.llama_memory_seq_rm(self._memory, seq, 0, -1)
        return is_read

    def close(self) -> None:
        native.llama_free(self._context)
        native.llama_model_free(self._model)

    # --- opening -----------------------------------------------------------------------------------------------

    def _open_context(self, n_cells: int, n_batch: int, kv_type: int) -> Any:
        params = native.llama_context_default_params()
        params.n_ctx = n_cells
        params.n_batch = params.n_ubatch = n_batch
        params.n_seq_max = self.n_seqs
        # One row per sequence wants logits; the default, every row of a batch, is 300 MB at 150,000 tokens.
        params.n_outputs_max = self.n_seqs
        params.n_threads = params.n_threads_batch = self.n_threads
        params.type_k = params.type_v = kv_type
        params.kv_unified = True
        params.no_perf = True
        context = native.llama_init_from_model(self._model, params)
        if not context:
            native.llama_model_free(self._model)
            raise EngineFailed(f"llama.cpp cannot make a context of {n_cells} KV cells: {_last_problem()}")
        return context

    def _check_seq(self, seq: int) -> None:
        if not 0 <= seq < self.n_seqs:
            raise ValueError(f"sequence {seq} is not below {self.n_seqs}")


class LlamaSampler:
    """A native sampler chain; an argmax in its place where the chain would be nothing else."""

    def __init__(self, backend: LlamaBackend, chain: Sequence[stages.Stage], banned: NDArray[np.int64]) -> None:
        self._backend = backend
        self._banned = banned
        self._window = next((stage.last_n for stage in chain if isinstance(stage, stages.Penalties)), 0)
        self._chain: Any = None
        if list(chain) != [stages.Greedy()]:
            self._chain = native.llama_sampler_chain_init(native.llama_sampler_chain_default_params())
            for stage in chain:
                native.llama_sampler_chain_add(self._chain, _native_stage(stage, backend.n_vocab))

    def accept(self, tokens: list[int]) -> None:
        for token in tokens[-self._window :] if self._window else ():
            native.llama_sampler_accept(self._chain, token)

    def sample(self, row: int) -> int:
        if self._chain is not None and not self._banned.size:
            return self._backend.draw(self._chain, row)
        logits = self._backend.logits(row)
        # The row is changed in place, so that native stages see it too, and put back for whoever reads logprobs.
        saved = logits[self._banned]
        logits[self._banned] = -np.inf
        token = int(logits.argmax()) if self._chain is None else self._backend.draw(self._chain, row)
        logits[self._banned] = saved
        return token

    def close(self) -> None:
        if self._chain is not None:
            native.llama_sampler_free(self._chain)
            self._chain = None


def _native_stage(stage: stages.Stage, n_vocab: int) -> Any:
    match stage:
        case stages.LogitBias(biases):
            array = (native.llama_logit_bias * len(biases))()
            for entry, (token, bias) in zip(array, biases, strict=True):
                entry.token, entry.bias = token, bias
            return native.llama_sampler_init_logit_bias(n_vocab, len(biases), array)
        case stages.Penalties(last_n, repeat, frequency, presence):
            return native.llama_sampler_init_penalties(n_vocab, last_n, repeat, frequency, presence)
        case stages.TopK(k):
            return native.llama_sampler_init_top_k(min(k, n_vocab))
        case stages.Typical(p):
            return native.llama_sampler_init_typical(p, 1)
        case stages.TopP(p):
            return native.llama_sampler_init_top_p(p, 1)
        case stages.MinP(p):
            return native.llama_sampler_init_min_p(p, 1)
        case stages.Temperature(value):
            return native.llama_sampler_init_temp(value)
        case stages.Mirostat(1, seed, tau, eta):
            return native.llama_sampler_init_mirostat(n_vocab, seed, tau, eta, 100)
        case stages.Mirostat(_, seed, tau, eta):
            return native.llama_sampler_init_mirostat_v2(seed, tau, eta)
        case stages.Draw(seed):
            return native.llama_sampler_init_dist(seed)
        case stages.Greedy():
            return native.llama_sampler_init_greedy()


def _native_batch(batch: Batch) -> tuple[Any, tuple[NDArray[Any], ...]]:
    """A `llama_batch` over the arrays of `batch`, so that filling rows is filling numpy arrays.

    Each row's list of sequences is a pointer to its entry of `batch.seq`. The second value owns memory that the first
    points to and must live as long.
    """
    n_seq_id = np.ones(batch.capacity, np.int32)
    addresses = batch.seq.ctypes.data + np.arange(batch.capacity, dtype=np.uint64) * np.uint64(batch.seq.itemsize)
    fields = native.llama_batch()
    fields.token = batch.token.ctypes.data_as(ctypes.POINTER(native.llama_token))
    fields.pos = batch.pos.ctypes.data_as(ctypes.POINTER(native.llama_pos))
    fields.n_seq_id = n_seq_id.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    fields.seq_id = addresses.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(native.llama_seq_id)))
    fields.logits = batch.wants_logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
    return fields, (n_seq_id, addresses)


def _check_range(what: str, values: NDArray[np.int32], limit: int) -> None:
    if values.min() < 0 or values.max() >= limit:
        raise ValueError(f"a {what} of the batch is not within [0, {limit})")


def _load(path: str, n_gpu_layers: int) -> Any:
    """A model handle. The file is mapped into memory, not read. Raises BadModelFile."""
    params = native.llama_model_default_params()
    params.n_gpu_layers = n_gpu_layers
    model = native.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise BadModelFile(f"llama.cpp cannot load {path}: {_last_problem()}")
    for kind, is_kind in _UNSUPPORTED_KINDS.items():
        if is_kind(model):
            native.llama_model_free(model)
            raise BadModelFile(f"{path} is {kind} model, which localrun does not run yet; choose a decoder-only one")
    return model


def gpu_free_bytes() -> int | None:
    """Free memory of all GPUs; None where this build cannot use one."""
    return devices.gpu_free_bytes(native._lib) if native.llama_supports_gpu_offload() else None


_problems: list[str] = []


def _last_problem() -> str:
    return _problems[-1] if _problems else "it gave no reason"


def _take_log_line(level: int, text: bytes, _data: object) -> None:
    """llama.cpp's own log lines: problems go to our log and are kept for the next error message."""
    line = text.decode("utf-8", "replace").strip()
    if level in (_GGML_LOG_WARN, _GGML_LOG_ERROR) and line and _POOL_WARNING not in line:
        _problems[:] = [*_problems[-20:], line]
        log.warning("%s", line)


# Kept in a module variable because native code holds a bare pointer to it.
_log_callback = native.llama_log_callback(_take_log_line)
