"""The adapters of a model in llama.cpp: LoRAs and control vectors, loaded once, in effect in any of its contexts.

A file's header is checked against the model's before llama.cpp reads it (`models/gguf/adapter_header.py`), because much
of what does not fit is an assertion there, which ends the process. A LoRA's tensors are llama.cpp's; control vectors
are read here, and a context has the sum of those in its set.

llama.cpp walks over the model's LoRAs when it lays out a graph anew, without a lock, in the thread that computes.
`Gate` keeps that apart from LoRAs that come and go in another one.

Owner: `load` and `free` belong to one thread at a time, `apply` to the context's.
Does not: choose when to load or to free (`engine/adapters.py`), or know which set a context has (`context.py`).
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import AdapterSet
from localrun.engine.native.library import last_problem, native
from localrun.errors import BadModelFile, EngineFailed
from localrun.wire import Adapter

if TYPE_CHECKING:
    from localrun.models.gguf.header import Header


class Gate:
    """Any number of threads may be `laying_out` graphs, or one may be `changing` what they walk over."""

    def __init__(self) -> None:
        self._freed = Condition()
        self._n_inside = 0
        self._is_changing = False

    @contextmanager
    def laying_out(self) -> Iterator[None]:
        """For a call that may lay out a graph anew."""
        with self._freed:
            self._freed.wait_for(lambda: not self._is_changing)
            self._n_inside += 1
        try:
            yield
        finally:
            with self._freed:
                self._n_inside -= 1
                self._freed.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """For a call that adds an adapter to the model, or takes one away."""
        with self._freed:
            self._freed.wait_for(lambda: not self._n_inside)
            self._is_changing = True
        try:
            yield
        finally:
            with self._freed:
                self._is_changing = False
                self._freed.notify_all()


class LlamaAdapters:
    """See the module. Native memory of what is still loaded goes with the `model`, whose file is at `path`."""

    def __init__(self, model: Any, path: str) -> None:
        self.gate = Gate()
        self._model = model
        self._path = path
        self._header: Header | None = None
        self._loras: dict[bytes, Any] = {}
        self._vectors: dict[bytes, NDArray[np.float32]] = {}

    def load(self, adapter: Adapter) -> None:
        # Late: most engines never need them.
        from localrun.models.gguf.adapter_header import check_finite, misfit
        from localrun.models.gguf.header import FileKind
        from localrun.models.gguf.reader import read_header

        if adapter.digest in self._loras or adapter.digest in self._vectors:
            return
        if self._header is None:
            self._header = read_header(Path(self._path))
        header = read_header(Path(adapter.path), kind=FileKind.ADAPTER)
        if problem := misfit(header, self._header):
            raise BadModelFile(f"the adapter {header.path} {problem}")
        _check_content(adapter)
        check_finite(header)
        if header.kind == FileKind.CONTROL_VECTOR:
            self._vectors[adapter.digest] = self._read_vector(header)
        else:
            self._loras[adapter.digest] = self._load_lora(header.path)

    def free(self, digest: bytes) -> None:
        """Free one. No context has it in its set any more."""
        self._vectors.pop(digest, None)
        handle = self._loras.pop(digest, None)
        if handle is not None:
            with self.gate.changing():
                native.llama_adapter_lora_free(handle)

    def check(self, adapters: AdapterSet) -> None:
        """Raises ValueError unless all of them are loaded."""
        for adapter in adapters.adapters:
            if adapter.digest not in self._loras and adapter.digest not in self._vectors:
                raise ValueError(f"the adapter {adapter.path} is not loaded")

    def apply(self, context: Any, adapters: AdapterSet, before: AdapterSet) -> None:
        """Put a checked set into effect in a native context, in the place of the one before. Raises EngineFailed."""
        chosen = [(self._loras[one.digest], one.scale) for one in adapters.adapters if one.digest in self._loras]
        kind = native.llama_adapter_lora_p_ctypes
        handles = (kind * len(chosen))(*(ctypes.cast(handle, kind) for handle, _ in chosen))
        scales = (ctypes.c_float * len(chosen))(*(scale for _, scale in chosen))
        if native.llama_set_adapters_lora(context, handles, len(chosen), scales) != 0:
            raise EngineFailed(f"llama.cpp cannot apply the adapters: {last_problem()}")
        vector = self._sum_of_vectors(adapters)
        if vector is None and not any(one.digest in self._vectors for one in before.adapters):
            return
        native.llama_synchronize(context)  # its tensors are written to directly
        data = None if vector is None else vector.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        n_layers, n_embd = (0, 0) if vector is None else vector.shape
        if native.llama_set_adapter_cvec(context, data, n_layers * n_embd, n_embd, 1, n_layers) != 0:
            raise EngineFailed(f"llama.cpp cannot apply the control vector: {last_problem()}")

    def _sum_of_vectors(self, adapters: AdapterSet) -> NDArray[np.float32] | None:
        """A row for each layer from the second one on. All of them, or llama.cpp would leave some as they were."""
        parts = [np.float32(one.scale) * self._vectors[one.digest] for one in adapters.adapters
                 if one.digest in self._vectors]  # fmt: skip
        return np.ascontiguousarray(sum(parts), np.float32) if parts else None

    def _load_lora(self, path: Path) -> Any:
        with self.gate.changing():
            handle = native.llama_adapter_lora_init(self._model, str(path).encode())
        if not handle:
            raise BadModelFile(f"llama.cpp cannot load the adapter {path}: {last_problem()}")
        return handle

    def _read_vector(self, header: Header) -> NDArray[np.float32]:
        n_layers, n_embd = (int(ask(self._model)) for ask in (native.llama_model_n_layer, native.llama_model_n_embd))
        vector = np.zeros((n_layers - 1, n_embd), np.float32)
        for tensor in header.tensors:
            layer = int(tensor.name.rpartition(".")[2])
            vector[layer - 1] = np.fromfile(header.path, "<f4", n_embd, offset=tensor.offset)
        return vector


def _check_content(adapter: Adapter) -> None:
    """Raises BadModelFile for a file that was written to since its digest was taken, for what is computed with it is
    kept under that. Reads it from the disk as well, so that steps do not wait for this at the gate."""
    with open(adapter.path, "rb") as file:
        if hashlib.file_digest(file, "sha256").digest() != adapter.digest:
            raise BadModelFile(f"the adapter {adapter.path} was replaced while a request waited for it; ask again")
