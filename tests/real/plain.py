"""Plain llama.cpp: one sequence, flash attention on, no server and no cache. What localrun is compared with.

Only llama.cpp's own calls; nothing of `localrun.engine` is used but the module that loads the library. A prompt is
computed in batches of 512 rows, every generated token as a batch of one row, and greedy is an argmax. Where a
model has a sliding window every cell is kept (llama.cpp's default), and only the mask hides what is out of sight.

llama.cpp's logits depend a little on how many rows a batch has, because other kernels add in another order. `Shape`
says how the prompt is cut, so that the size of that effect can be measured by llama.cpp alone.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localrun.engine.native.library import log_callback, native

Logits = NDArray[np.float32]
_TYPES = {"f16": native.GGML_TYPE_F16, "q8_0": native.GGML_TYPE_Q8_0}


class Shape(NamedTuple):
    """How a prompt is cut into batches: `n_rows` rows each, and whether its last token is a batch of its own. Tokens of
    an answer that are given, not chosen, come in batches of `n_answer_rows`."""

    n_rows: int
    last_alone: bool
    n_answer_rows: int = 1


class Plain:
    """A model and one context. Close it: native memory is not freed otherwise."""

    def __init__(self, path: Path, *, n_ctx: int, n_threads: int, kv_type: str = "f16", n_ubatch: int = 1024) -> None:
        native.llama_log_set(log_callback, None)
        native.llama_backend_init()
        self._model = native.llama_model_load_from_file(str(path).encode(), native.llama_model_default_params())
        assert self._model, f"llama.cpp cannot load {path}"
        params = native.llama_context_default_params()
        params.n_ctx, params.n_seq_max = n_ctx, 1
        params.n_batch = params.n_ubatch = n_ubatch
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = native.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k = params.type_v = _TYPES[kv_type]
        self._context = native.llama_init_from_model(self._model, params)
        assert self._context, "llama.cpp cannot make a context"
        self._memory = native.llama_get_memory(self._context)
        vocab = native.llama_model_get_vocab(self._model)
        self._vocab, self.n_vocab = vocab, int(native.llama_vocab_n_tokens(vocab))
        self.eog = [token for token in range(self.n_vocab) if native.llama_vocab_is_eog(vocab, token)]
        self._n_past = 0

    def tokenize(self, text: str) -> list[int]:
        """With the model's own BOS if it wants one, and control tokens by their names."""
        raw = text.encode()
        room = (native.llama_token * (len(raw) + 8))()
        count = native.llama_tokenize(self._vocab, raw, len(raw), room, len(room), True, True)
        assert count >= 0
        return list(room[:count])

    def greedy(self, prompt: list[int], n_tokens: int, shape: Shape) -> list[int]:
        """The tokens that follow a prompt. The end of a text is never chosen, so that there are always so many."""
        answer = [int(self._after(prompt, shape).argmax())]
        while len(answer) < n_tokens:
            self._decode(answer[-1:], [0])
            answer.append(int(self._open_ended(0).argmax()))
        return answer

    def logits_along(self, prompt: list[int], answer: list[int], shape: Shape) -> list[Logits]:
        """What each token of `answer` is chosen from when all before it are given. Ends are -inf."""
        found = [self._after(prompt, shape)]
        given = answer[:-1]
        for start in range(0, len(given), shape.n_answer_rows):
            part = given[start : start + shape.n_answer_rows]
            self._decode(part, list(range(len(part))))
            found += [self._open_ended(row) for row in range(len(part))]
        return found

    def replay(self, tokens: list[int], n_kept: int, n_rows: list[int]) -> list[Logits]:
        """The last row of every batch when `tokens` are computed in batches of `n_rows`, in this order.

        The first `n_kept` of them are not computed again: they are in memory from the call before. Ends are not hidden.
        """
        assert n_kept <= self._n_past, "these tokens are not in memory"
        native.llama_memory_seq_rm(self._memory, 0, n_kept, -1)
        self._n_past = n_kept
        found = []
        for n in n_rows:
            self._decode(tokens[self._n_past : self._n_past + n], [n - 1])
            found.append(self._row(n - 1))
        return found

    def logprobs_in_full_batches(self, tokens: list[int]) -> NDArray[np.float64]:
        """The same of every token but the first, all computed in batches of 512 rows."""
        self._clear()
        found: list[float] = []
        for start in range(0, len(tokens) - 1, 512):
            part = tokens[start : min(start + 512, len(tokens) - 1)]
            self._decode(part, list(range(len(part))))
            found += [logprob(self._row(at), tokens[start + at + 1]) for at in range(len(part))]
        return np.array(found)

    def close(self) -> None:
        native.llama_free(self._context)
        native.llama_model_free(self._model)

    def _after(self, prompt: list[int], shape: Shape) -> Logits:
        """What the first token of an answer is chosen from."""
        self._clear()
        end = len(prompt) - 1 if shape.last_alone else len(prompt)
        pieces = [prompt[start : min(start + shape.n_rows, end)] for start in range(0, end, shape.n_rows)]
        pieces += [prompt[end:]] if prompt[end:] else []
        for piece in pieces:
            self._decode(piece, [len(piece) - 1])
        return self._open_ended(len(pieces[-1]) - 1)

    def _open_ended(self, row: int) -> Logits:
        return self.without_ends(self._row(row))

    def without_ends(self, logits: Logits) -> Logits:
        """The same row, in which the end of a text is never chosen."""
        logits[self.eog] = -np.inf
        return logits

    def _clear(self) -> None:
        native.llama_memory_clear(self._memory, True)
        self._n_past = 0

    def _decode(self, tokens: list[int], wanted: list[int]) -> None:
        batch = native.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for row, token in enumerate(tokens):
                batch.token[row], batch.pos[row] = token, self._n_past + row
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
                batch.logits[row] = 0
            for row in wanted:
                batch.logits[row] = 1
            code = native.llama_decode(self._context, batch)
            assert code == 0, f"llama_decode returned {code}"
        finally:
            native.llama_batch_free(batch)
        self._n_past += len(tokens)

    def _row(self, row: int) -> Logits:
        pointer = native.llama_get_logits_ith(self._context, row)
        memory = (ctypes.c_float * self.n_vocab).from_address(ctypes.addressof(pointer.contents))
        return np.frombuffer(memory, np.float32).copy()


def logprob(logits: Logits, token: int) -> float:
    """The natural logarithm of a token's probability."""
    shifted = logits.astype(np.float64) - logits.max()
    return float(shifted[token] - np.log(np.exp(shifted).sum()))
