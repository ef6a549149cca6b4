"""The process that was opened for embeddings, over its pipes."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from localrun import framing, wire
from tests.fakes import ENGINE


class Engine:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._in, self._out = process.stdin, process.stdout
        self._finals: dict[int, wire.Delta] = {}
        self._vectors: dict[int, list[wire.Vector]] = {}

    def send(self, message: wire.ToEngine) -> None:
        self._in.write(framing.encode(message))
        self._in.flush()

    def read(self) -> Any:
        body = framing.read_body(self._out)
        assert body is not None
        return framing.decode_from_engine(body)

    def final(self, request_id: int) -> tuple[wire.Delta, list[wire.Vector]]:
        """A request's last delta, and all of its vectors."""
        while request_id not in self._finals:
            message = self.read()
            for delta in message.deltas if isinstance(message, wire.Step) else ():
                self._vectors.setdefault(delta.id, []).extend(delta.vectors or ())
                if delta.finish is not None:
                    self._finals[delta.id] = delta
        return self._finals[request_id], self._vectors[request_id]


@contextmanager
def opened(step_ms: int = 0, **changes: Any) -> Iterator[tuple[Engine, wire.Ready]]:
    fields = {
        "model_path": "none", "n_slots": 2, "n_kv_cells": 100, "n_batch": 64, "n_threads": 1, "n_gpu_layers": 0,
        "kv_type": "f16", "target_itl_s": 0.0, "ram_cache_bytes": 0, "max_queue": 8, "pooling": wire.Pooling.MEAN,
    }  # fmt: skip
    environment = {"LOCALRUN_FAKE_STEP_MS": str(step_ms), "PATH": ""}
    with subprocess.Popen(
        ENGINE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        engine = Engine(process)
        too_late = threading.Timer(60, process.kill)
        too_late.start()
        try:
            engine.send(wire.Open(**(fields | changes)))
            ready = engine.read()
            assert isinstance(ready, wire.Ready)
            yield engine, ready
        finally:
            too_late.cancel()
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=30)


def test_inputs_become_vectors_and_the_process_ends_with_its_pipe():
    with opened() as (engine, ready):
        assert (ready.n_ctx, ready.n_embd) == (100, 8)
        engine.send(wire.Embed(id=1, inputs=("one", (1, 2, 3))))
        delta, vectors = engine.final(1)
        assert delta.finish is wire.Finish.STOP
        assert [(vector.index, vector.n_tokens, len(vector.values)) for vector in vectors] == [(0, 5, 32), (1, 3, 32)]
        engine.send(wire.Count(id=2, segments=(wire.Segment("abc"),)))
        assert len(engine.read().tokens) == 5
        engine.send(wire.ClearCache(id=3, ram=True, disk=True))
        assert engine.read() == wire.Cleared(id=3, ram_bytes=0, disk_bytes=0)
    assert engine.process.returncode == 0


def test_a_cancel_overtakes_what_is_not_computed_yet():
    with opened(step_ms=20) as (engine, _):
        engine.send(wire.Embed(id=1, inputs=("x" * 60,) * 1000))
        engine.send(wire.Embed(id=2, inputs=("y",)))
        engine.send(wire.Cancel(1))
        delta, vectors = engine.final(1)
        assert delta.finish is wire.Finish.CANCELLED
        assert len(vectors) < 900
        assert engine.final(2)[0].finish is wire.Finish.STOP


def test_it_generates_nothing():
    with opened() as (engine, _):
        engine.send(wire.Submit(id=1, segments=(wire.Segment("hello"),)))
        assert engine.final(1)[0].error_code == "engine_failed"
