"""How long an input an embedding engine is opened for, and whether it fits the memory at all.

Pure. The rule is that of `placement.py`, for one input instead of a pool of slots: `kv_cells` if it is set, else 2,048
tokens for models that read a text in one piece and 8,192 for others, never more than the model was trained for; halved
until it fits.

Does not: read the machine's memory, or decide who is evicted (room.py).
"""

from __future__ import annotations

from localrun.config import Settings
from localrun.models import memory
from localrun.models.memory import MemoryEstimate
from localrun.models.store import Model
from localrun.server.engines.placement import Placement, place


def place_embeddings(model: Model, settings: Settings, available_bytes: int) -> Placement:
    """The placement by the rule above; `n_kv_cells` is the longest input. Raises CannotFit."""
    header = model.header
    most = memory.most_embedding_tokens(header, settings.kv_cells)

    def estimate(n_cells: int) -> MemoryEstimate:
        return memory.embedding_estimate(
            header, n_tokens=min(n_cells, most), n_rows=settings.batch_tokens, kv_type=settings.plain_kv_type
        )._replace(adapter_bytes=model.adapter_bytes)

    placement = place(
        name=model.name,
        n_ctx_train=most,
        n_slots=1,
        kv_cells=0,
        available_bytes=available_bytes,
        estimate=estimate,
    )
    # Rounded up to whole steps there; a model must not be sent more than it was trained for.
    return placement._replace(n_kv_cells=min(placement.n_kv_cells, most))
