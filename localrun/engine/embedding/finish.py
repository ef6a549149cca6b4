"""From what the model pooled to what people get: cut to the dimensions they want, and normalised. Pure.

Vectors have length 1 (L2), as those of llama.cpp's server and of Ollama. Cut vectors are normalised again: a model that
was trained for it (Matryoshka) puts what matters first. Scores are left as the model's head gives them.
"""

from __future__ import annotations

import numpy as np

from localrun.engine.embedding.embedder import FloatVector
from localrun.engine.embedding.ticket import Current
from localrun.errors import EngineFailed
from localrun.wire import Pooling, Vector


def finish(current: Current, dimensions: int, pooling: Pooling) -> Vector:
    """The result of an input that is done. Raises EngineFailed when it is not made of numbers."""
    assert current.vector is not None
    values = current.vector
    if not np.isfinite(values).all():
        raise EngineFailed("the model computed numbers that are none (NaN or infinite); its file may be damaged")
    if pooling is not Pooling.RANK:
        values = normalised(values[: dimensions or None])
    return Vector(current.index, values.astype("<f4").tobytes(), len(current.tokens), current.n_cut)


def normalised(values: FloatVector) -> FloatVector:
    """Of length 1; zeros stay zeros."""
    wide = values.astype(np.float64)
    length = float(np.sqrt(wide @ wide))
    result: FloatVector = (wide / length if length else wide).astype(np.float32)
    return result
