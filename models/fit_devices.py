"""Which layers of a model go to which device, and what each device then holds.

Pure: free bytes come as arguments. The division is that of llama.cpp (`load_tensors` in llama-model.cpp): the last
`n_gpu_layers` of the layers go to the GPUs, the output counting as one more layer behind them, each GPU getting a part
in proportion to its free memory; embeddings stay with the CPU. Never compared with a real GPU's memory.

Does not: read any device, or choose a context (`fit_choice`).
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from localrun.models.header import Header
from localrun.models.memory import MemoryEstimate

# The rest is for other programs, the prefix cache, and estimates that are a little low.
USABLE_RAM: Final = 0.8
USABLE_GPU: Final = 0.9
# A driver's context and kernels, before the first tensor.
GPU_CONTEXT_BYTES: Final = 400 * 1024 * 1024

_LAYER = re.compile(r"blk\.(\d+)\.")


def in_gb(size_bytes: int) -> str:
    """For messages: decimal gigabytes, as models and memory are sold; megabytes where those would be nothing."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 95_000_000 else f"{size_bytes / 1e6:.0f} MB"


class Gpu(NamedTuple):
    """A device with memory of its own, or one that computes in the machine's (`is_shared`)."""

    name: str
    free_bytes: int
    is_shared: bool = False
    total_bytes: int = 0

    @property
    def emptied(self) -> Gpu:
        """The same with nothing on it."""
        return self._replace(free_bytes=max(self.free_bytes, self.total_bytes))

    @property
    def usable_bytes(self) -> int:
        return max(0, int(self.free_bytes * USABLE_GPU) - GPU_CONTEXT_BYTES)


class Machine(NamedTuple):
    """What a model can be put into, at this moment."""

    ram_bytes: int
    gpus: tuple[Gpu, ...] = ()

    @property
    def usable_ram_bytes(self) -> int:
        return int(self.ram_bytes * USABLE_RAM)


class DeviceUse(NamedTuple):
    """What one device holds. `other_bytes`: the process, its vocabulary, long prompts in the background, and
    adapters."""

    name: str
    n_layers: int
    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    other_bytes: int
    free_bytes: int
    usable_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.other_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.usable_bytes


class LayerWeights(NamedTuple):
    """Bytes of each layer's tensors, of the output's, and of those that stay with the CPU."""

    layers: tuple[int, ...]
    output_bytes: int
    embedding_bytes: int


def layer_weights(header: Header) -> LayerWeights:
    """The tensors by layer. Tied embeddings are copied to whatever device has the output."""
    layers = [0] * header.n_layers
    output_bytes = embedding_bytes = 0
    is_tied = True
    for tensor in header.tensors:
        found = _LAYER.match(tensor.name)
        if found and int(found[1]) < header.n_layers:
            layers[int(found[1])] += tensor.size_bytes
        elif tensor.name.startswith("output"):
            output_bytes += tensor.size_bytes
            is_tied = is_tied and tensor.name != "output.weight"
        else:
            embedding_bytes += tensor.size_bytes
    return LayerWeights(tuple(layers), output_bytes + is_tied * embedding_bytes, embedding_bytes)


def divide(
    weights: LayerWeights, layers_kv_bytes: list[int], needed: MemoryEstimate, machine: Machine, n_gpu_layers: int
) -> tuple[DeviceUse, ...]:
    """What each device holds with `n_gpu_layers`: RAM first, then the GPUs.

    `needed` is the estimate of the whole model. Compute buffers are counted on every device that has a layer, and in
    RAM always. So are adapters, although each device gets only its layers' part: they are small.
    """
    n_layers = len(weights.layers)
    n_moved = min(n_gpu_layers, n_layers + 1)
    first_moved = n_layers + 1 - n_moved
    owners = _owners(machine.gpus, n_moved)
    uses = []
    for index, gpu in enumerate(machine.gpus):
        own = [first_moved + at for at, owner in enumerate(owners) if owner == index]
        blocks = [layer for layer in own if layer < n_layers]
        uses.append(
            DeviceUse(
                name=gpu.name,
                n_layers=len(own),
                weights_bytes=sum(weights.layers[layer] for layer in blocks)
                + (weights.output_bytes if n_layers in own else 0),
                kv_bytes=sum(layers_kv_bytes[layer] for layer in blocks),
                compute_bytes=needed.compute_bytes if own else 0,
                other_bytes=needed.adapter_bytes if own else 0,
                free_bytes=gpu.free_bytes,
                usable_bytes=gpu.usable_bytes,
            )
        )
    # The output is one of the tensors of the file unless it is the embeddings again.
    rest_bytes = needed.weights_bytes - sum(weights.layers) - weights.embedding_bytes
    ram = DeviceUse(
        name="RAM",
        n_layers=n_layers + 1 - n_moved,
        weights_bytes=sum(weights.layers[:first_moved]) + weights.embedding_bytes + (0 if n_moved else rest_bytes),
        kv_bytes=sum(layers_kv_bytes[:first_moved]),
        compute_bytes=needed.compute_bytes,
        other_bytes=needed.process_bytes + needed.staging_bytes + needed.adapter_bytes,
        free_bytes=machine.ram_bytes,
        usable_bytes=machine.usable_ram_bytes,
    )
    return (ram, *uses)


def all_fit(devices: tuple[DeviceUse, ...], machine: Machine) -> bool:
    """Whether every device holds its part; GPUs that compute in the machine's memory share it."""
    shared_bytes = sum(use.total_bytes for use, gpu in zip(devices[1:], machine.gpus, strict=True) if gpu.is_shared)
    ram = devices[0]
    return all(use.fits for use in devices) and ram.total_bytes + shared_bytes <= ram.usable_bytes


def _owners(gpus: tuple[Gpu, ...], n_moved: int) -> list[int]:
    """The GPU of each moved layer: cut where the GPUs' shares of the free memory, added up, pass its place."""
    free_bytes = sum(gpu.free_bytes for gpu in gpus)
    if not free_bytes:
        return [0] * n_moved
    ends, passed = [], 0
    for gpu in gpus:
        passed += gpu.free_bytes
        ends.append(passed)
    # The first GPU whose end lies beyond `at / n_moved` of all free memory, in whole numbers.
    return [next(index for index, end in enumerate(ends) if end * n_moved > at * free_bytes) for at in range(n_moved)]
