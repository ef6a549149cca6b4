"""What the embedding engine needs from the thing that computes: `llama.LlamaEmbedder`, or `fake.FakeEmbedder`.

An embedder owns one context. A step fills the first rows of `batch`, computes them, and reads one vector for each
sequence that had rows. Where `can_split`, a sequence may go on in the next step; else all of its rows must be in one.

Invariant: what comes out for a sequence does not depend on the others of the step, but for the last bits of a float.
Does not: know requests, normalise, or decide what goes into a step (`engine.py`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import Batch
from localrun.wire import Pooling

FloatVector = NDArray[np.float32]


class PairFormat(NamedTuple):
    """How a reranker wants a query and a document as one text: by a `template` with `{query}` and `{document}`, or as
    tokens `before`, the query, `between`, the document, `after`."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    template: str | None = None


class Embedder(Protocol):
    """See the module. `n_ctx` is the most tokens of one input, `n_rows` what a step should not exceed for the sake of
    others; only one input that must be computed whole may. `affixes` are what the model puts around a text."""

    name: str
    pooling: Pooling
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    n_rows: int
    n_seqs: int
    n_cells: int
    n_threads: int
    n_gpu_layers: int
    model_size_bytes: int
    can_split: bool
    batch: Batch
    control_tokens: tuple[str, ...]
    affixes: tuple[tuple[int, ...], tuple[int, ...]]
    pair_format: PairFormat

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Token ids of a text, without `affixes`."""

    def compute(self, n_rows: int) -> None:
        """Compute the first rows of `batch`. Raises NoRoom or DecodeFailed."""

    def vector(self, seq: int) -> FloatVector:
        """A copy of what pooling made of the rows that `seq` had in the last step."""

    def forget(self, seq: int) -> None:
        """Empty a sequence."""

    def close(self) -> None:
        """Free everything."""
