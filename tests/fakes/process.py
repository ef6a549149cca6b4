"""An engine process of fakes, from any folder: `python tests/fakes/process.py`. See `serve.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from localrun import wire
from localrun.engine import process
from localrun.engine.backend import Backend
from localrun.engine.embedding.inputs import Embedder
from tests.fakes.backend import FakeBackend
from tests.fakes.embedder import FakeEmbedder
from tests.fakes.engine import FakeEngine
from tests.fakes.media import FakeProjector


def _backend(opened: wire.Open) -> tuple[Backend, None]:
    backend = FakeBackend(
        n_cells=opened.n_kv_cells,
        n_seqs=opened.n_slots + process.n_spare_sequences(opened),
        n_batch=process.n_rows(opened),
        projector=FakeProjector() if opened.projector_path else None,
    )
    return backend, None


def _embedder(opened: wire.Open) -> Embedder:
    assert opened.pooling is not None
    return FakeEmbedder(
        pooling=opened.pooling, n_ctx=opened.n_kv_cells, n_rows=opened.n_batch,
        projector=FakeProjector() if opened.projector_path else None,
    )  # fmt: skip


def main() -> int:
    return process.main(
        process.Make(_backend, lambda opened, backend: (None, None), _embedder, lambda: "fake", FakeEngine)
    )


if __name__ == "__main__":
    sys.exit(main())
