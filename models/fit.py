"""How a model is best opened on a machine: GPU layers, context, KV cache, slots; and what each device then holds. And
what load settings come to for it, whatever the machine: the longest request, and what cannot be.

Pure: free bytes come as arguments. The rule, with what a person asked for never changed:

1. As many cells as the slots would like: a whole context for each, one pool of at most `DEFAULT_POOL_CELLS`; but never
   fewer than one request needs (`num_ctx`).
2. Where that is too much, half of it, and half again, down to `COMFORTABLE_CELLS` or one trained context.
3. Where that is too much, the same with the KV cache in q8_0, which takes half of f16's memory. q4_0 is for those who
   ask for it: it costs quality that one can see.
   Models with attention sinks, which that costs quality, too, get fewer cells first (step 4).
4. Then fewer cells still, down to `FLOOR_CELLS`, and at last fewer slots. Rather than this, no draft model.

On a CPU the cells are rounded up to whole streams, one for every slot. On a machine with GPUs, that one of steps 1 to 3
is taken which has most layers there, since one layer in RAM costs more speed than anything else here.

Layers are divided as llama.cpp does it (`load_tensors` in llama-model.cpp): the last `n_gpu_layers` of the layers go to
the GPUs, the output counting as one more layer behind them, each GPU getting a part in proportion to its free memory;
embeddings stay with the CPU. Never compared with a real GPU's memory. A draft model and a projector are not divided:
they count on the first GPU with layers of the model, else in RAM; a draft model only where the model is on GPUs as a
whole.

Does not: read the machine, evict other models, or count the prefix cache, which takes what is left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from localrun.config import AUTO_KV_TYPE, LoadSettings
from localrun.errors import BadRequest
from localrun.models.gguf.header import Header
from localrun.models.memory import (
    MemoryEstimate,
    draft_estimate,
    estimate,
    layers_kv_bytes,
    model_memory,
    projector_memory,
)

# The context that a model should have here to be worth its download.
ROUGH_CELLS: Final = 8_192

# Of a KV cache of so many cells in f16, as a share of the weights: what models of 1 to 70 billion have.
_KV_SHARE = 0.25
# Compute buffers, the process, and its vocabulary.
_REST_BYTES = 350 * 1024 * 1024


def rough_bytes(weights_bytes: int) -> int:
    """About what an engine takes for weights of that size and `ROUGH_CELLS` tokens of context, within a third."""
    return weights_bytes + int(weights_bytes * _KV_SHARE) + _REST_BYTES


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

    def beside(self, shared_bytes: int) -> Gpu:
        """The same where others were promised so much of the machine's memory on such devices. The system may count
        only what the asking process holds."""
        if not self.is_shared:
            return self
        return self._replace(free_bytes=max(0, min(self.free_bytes, self.emptied.free_bytes - shared_bytes)))

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
    """What one device holds. `other_bytes`: the process, its vocabulary, long prompts in the background, adapters, the
    projector, and the draft model."""

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


def gpu_share(header: Header, n_gpu_layers: int) -> float:
    """Of the weights of a model, what lies on GPUs with so many layers there. Cells are divided about alike."""
    weights = layer_weights(header)
    n_blocks = min(n_gpu_layers - 1, header.n_layers)
    if n_gpu_layers <= 0 or n_blocks == header.n_layers:
        return float(n_gpu_layers > 0)
    moved_bytes = sum(weights.layers[header.n_layers - n_blocks :]) + weights.output_bytes
    return moved_bytes / (sum(weights.layers) + weights.output_bytes + weights.embedding_bytes)


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
    is_moved = n_moved > n_layers  # the model as a whole
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
                compute_bytes=_compute_bytes(needed, has_output=n_layers in own) if own else 0,
                other_bytes=(needed.adapter_bytes if own else 0)
                + (needed.draft_bytes if is_moved and owners[0] == index else 0)
                + (needed.projector_bytes if owners[:1] == [index] else 0),
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
        compute_bytes=_compute_bytes(needed, has_output=not n_moved) + needed.output_bytes,
        other_bytes=needed.process_bytes
        + needed.staging_bytes
        + needed.adapter_bytes
        + (0 if is_moved else needed.draft_bytes)
        + (0 if owners else needed.projector_bytes),
        free_bytes=machine.ram_bytes,
        usable_bytes=machine.usable_ram_bytes,
    )
    return (ram, *uses)


def _compute_bytes(needed: MemoryEstimate, *, has_output: bool) -> int:
    return needed.compute_bytes if has_output or not needed.layers_compute_bytes else needed.layers_compute_bytes


def all_fit(devices: tuple[DeviceUse, ...], machine: Machine) -> bool:
    """Whether every device holds its part; GPUs that compute in the machine's memory share it."""
    ram = devices[0]
    return all(use.fits for use in devices) and ram.total_bytes + shared_bytes(devices, machine) <= ram.usable_bytes


def shared_bytes(devices: tuple[DeviceUse, ...], machine: Machine) -> int:
    """What GPUs that compute in the machine's own memory take of it."""
    return sum(use.total_bytes for use, gpu in zip(devices[1:], machine.gpus, strict=True) if gpu.is_shared)


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


CELL_STEP: Final = 256  # llama.cpp pads its KV pool to this many cells, and where it is split every stream of it
DEFAULT_POOL_CELLS: Final = 32_768
COMFORTABLE_CELLS: Final = 8_192
FLOOR_CELLS: Final = 2_048
AUTO: Final = "auto"

_AUTO_TYPES = ("f16", "q8_0")
_Q8_BLOCK = 32


class FitRequest(NamedTuple):
    """What a person asked for. `n_kv_cells` 0, `kv_type` auto and `n_gpu_layers` -1 leave it to the machine; `n_slots`
    is the most, `n_ctx` the least that one request must have room for, and `n_roomy_cells` are worth having if they
    fit. `adapter_bytes` are those of the LoRA files that come with the model, `projector` and `draft` are its projector
    and its draft model."""

    n_slots: int
    n_kv_cells: int = 0
    kv_type: str = AUTO
    n_gpu_layers: int = -1
    n_ubatch: int = 512
    adapter_bytes: int = 0
    projector: Header | None = None
    draft: Header | None = None
    n_ctx: int = 0
    n_roomy_cells: int = 0

    def wanted_cells(self, header: Header) -> int:
        """Cells to load with when memory is no concern."""
        cells = wanted_cells(n_ctx_train=header.n_ctx_train, n_slots=self.n_slots, kv_cells=self.n_kv_cells)
        return max(cells, whole_steps(max(self.n_ctx, self.n_roomy_cells)))

    def least_cells(self, header: Header, usual: int) -> int:
        """`usual` cells, or one trained context if that is less; but all that was asked for."""
        least = self.n_kv_cells or min(header.n_ctx_train, usual)
        return min(self.wanted_cells(header), whole_steps(max(self.n_ctx, least)))


class Fit(NamedTuple):
    """A choice. Where `fits` is False nothing does, and this is the smallest that was tried."""

    fits: bool
    n_slots: int
    n_kv_cells: int
    kv_type: str
    n_gpu_layers: int
    n_ctx: int
    estimate: MemoryEstimate
    devices: tuple[DeviceUse, ...]
    notes: tuple[str, ...]


class _Setting(NamedTuple):
    n_slots: int
    n_kv_cells: int
    kv_type: str


def wanted_cells(*, n_ctx_train: int, n_slots: int, kv_cells: int) -> int:
    """Cells to load with when memory is no concern."""
    return whole_steps(kv_cells or min(n_ctx_train * n_slots, DEFAULT_POOL_CELLS))


def choose(header: Header, machine: Machine, wish: FitRequest) -> Fit:
    """The best way to open the model there, by the rule above."""
    opener = _Opener(header, machine, wish)
    fitting = [fit for setting in _comfortable(header, wish) if (fit := opener.best(setting)).fits]
    if fitting:
        return max(fitting, key=lambda fit: fit.n_gpu_layers)  # the first of those with most
    if wish.draft is not None:
        fit = choose(header, machine, wish._replace(draft=None))
        return fit._replace(notes=(*fit.notes, "without the draft model: there is no room for it"))
    *tight, smallest = (opener.best(setting) for setting in _tight(header, wish))
    return next((fit for fit in tight if fit.fits), smallest)


class _Opener:
    """Tries settings on one machine."""

    def __init__(self, header: Header, machine: Machine, wish: FitRequest) -> None:
        self._header = header
        self._machine = machine
        self._wish = wish
        self._weights: LayerWeights = layer_weights(header)
        self._known: dict[tuple[_Setting, bool], tuple[MemoryEstimate, list[int]]] = {}

    def best(self, setting: _Setting) -> Fit:
        """With as many layers on GPUs as these hold, or as were asked for."""
        if not self._machine.gpus:
            return self.fit(setting, 0)
        n_all = self._header.n_layers + 1
        if self._wish.n_gpu_layers >= 0:
            return self.fit(setting, min(self._wish.n_gpu_layers, n_all))
        for n_gpu_layers in range(n_all, 0, -1):
            if (fit := self.fit(setting, n_gpu_layers)).fits:
                return fit
        return self.fit(setting, 0)

    def fit(self, setting: _Setting, n_gpu_layers: int) -> Fit:
        setting = self._in_whole_streams(setting) if n_gpu_layers == 0 else setting
        n_slots, n_cells, kv_type = setting
        needed, by_layer = self._sizes(setting, n_gpu_layers > 0)
        devices = divide(self._weights, by_layer, needed, self._machine, n_gpu_layers)
        fits = all_fit(devices, self._machine)
        n_ctx = min(n_cells, max(self._header.n_ctx_train, self._wish.n_ctx))
        return Fit(
            fits, n_slots, n_cells, kv_type, n_gpu_layers, n_ctx, needed, devices, self._notes(setting, n_gpu_layers)
        )

    def _in_whole_streams(self, setting: _Setting) -> _Setting:
        """On a CPU each slot has a stream of cells of its own, where the model allows it."""
        n_cells = setting.n_kv_cells
        if not model_memory(self._header, n_kv_cells=n_cells).is_shareable:
            return setting
        return setting._replace(n_kv_cells=whole_steps(n_cells, CELL_STEP * setting.n_slots))

    def _sizes(self, setting: _Setting, is_on_gpu: bool) -> tuple[MemoryEstimate, list[int]]:
        known = self._known.get((setting, is_on_gpu))
        if known is None:
            n_slots, n_cells, kv_type = setting
            header, wish = self._header, self._wish
            opened: dict[str, Any] = {
                "n_kv_cells": n_cells,
                "n_slots": n_slots,
                "n_ubatch": wish.n_ubatch,
                "kv_type": kv_type,
            }
            needed = estimate(header, **opened, is_on_gpu=is_on_gpu)._replace(adapter_bytes=wish.adapter_bytes)
            if wish.draft is not None:
                needed = needed._replace(draft=draft_estimate(wish.draft, **opened))
            if wish.projector is not None:
                needed = needed._replace(projector_bytes=projector_memory(wish.projector).total_bytes)
            known = self._known[setting, is_on_gpu] = needed, layers_kv_bytes(header, **opened)
        return known

    def _notes(self, setting: _Setting, n_gpu_layers: int) -> tuple[str, ...]:
        """Why it is not what one would like."""
        wish, header = self._wish, self._header
        notes = []
        wanted = wish.wanted_cells(header)
        if setting.n_kv_cells < wanted:
            notes.append(f"{setting.n_kv_cells} KV cells instead of {wanted}: more do not fit")
        elif not wish.n_kv_cells and setting.n_kv_cells < header.n_ctx_train:
            notes.append(
                f"{setting.n_kv_cells} KV cells of the {header.n_ctx_train} that the model was trained for; --kv-cells "
                f"asks for more"
            )
        if setting.kv_type != "f16" and wish.kv_type == AUTO:
            notes.append(f"KV cache in {setting.kv_type}, so that more cells fit than in f16")
        if setting.n_slots < wish.n_slots:
            notes.append(f"{setting.n_slots} slots instead of {wish.n_slots}: more do not fit")
        n_all = header.n_layers + 1
        if self._machine.gpus and n_gpu_layers < n_all and wish.n_gpu_layers < 0:
            notes.append(f"{n_gpu_layers} of {n_all} layers on the GPU: more do not fit")
        notes += [
            f"{gpu.name} computes in the machine's own memory: both together must fit into what may be used of RAM"
            for gpu in self._machine.gpus
            if gpu.is_shared and n_gpu_layers
        ]
        return tuple(notes)


def _comfortable(header: Header, wish: FitRequest) -> Iterator[_Setting]:
    """Steps 1 to 3 of the rule."""
    wanted, least = wish.wanted_cells(header), wish.least_cells(header, COMFORTABLE_CELLS)
    types = _kv_types(header, wish)
    for kv_type in types[:1] if _suffers_from_q8(header) else types:
        for n_cells in _halvings(wanted, least):
            yield _Setting(wish.n_slots, n_cells, kv_type)


def _tight(header: Header, wish: FitRequest) -> Iterator[_Setting]:
    """Step 4: at least one setting, the last of which is the smallest that there is."""
    types = _kv_types(header, wish)
    small_type = types[-1]
    floor = wish.least_cells(header, FLOOR_CELLS)
    for kv_type in types if _suffers_from_q8(header) else types[-1:]:
        for n_cells in _halvings(wish.least_cells(header, COMFORTABLE_CELLS), floor):
            yield _Setting(wish.n_slots, n_cells, kv_type)
    n_slots = wish.n_slots
    while n_slots > 1:
        n_slots //= 2
        yield _Setting(n_slots, floor, small_type)


def _kv_types(header: Header, wish: FitRequest) -> tuple[str, ...]:
    """Types to try, best first. Rows of a quantized cache are whole blocks for every head."""
    if wish.kv_type != AUTO:
        return (wish.kv_type,)
    return _AUTO_TYPES if is_quantizable(header) else _AUTO_TYPES[:1]


def _suffers_from_q8(header: Header) -> bool:
    """Attention sinks are learned logits beside those of the keys; with rounded keys gpt-oss kept 75 % of its likeliest
    tokens, where other models keep nearly all. Fewer cells are better there."""
    return any(tensor.name.endswith("attn_sinks.weight") for tensor in header.tensors)


def is_quantizable(header: Header) -> bool:
    """Whether the KV cache can have another type than f16."""
    dimensions = (header.head_dim_k, header.head_dim_v)
    return header.n_heads_kv > 0 and all(size > 0 and size % _Q8_BLOCK == 0 for size in dimensions)


def _halvings(most: int, least: int) -> Iterator[int]:
    """`most` and its halves in whole steps, down to `least`, which comes last."""
    while most > least:
        yield most
        most = max(least, whole_steps(most // 2))
    yield least


def whole_steps(cells: int, step: int = CELL_STEP) -> int:
    return max(1, -(-cells // step)) * step


# --- load settings ---

# llama.cpp counts tokens in 32 bits.
MAX_CTX = 2**31 - 1
# Beyond these nothing is left of what the model has learned about positions.
LEAST_BASE, LEAST_SCALE = 1.0, 1 / 1024


def context_limit(header: Header, said: LoadSettings) -> int:
    """Tokens of the longest request that a model can be loaded for: the context that it was trained for, or so much
    more as positions are moved together."""
    scale = said.rope_frequency_scale
    if not scale or said.rope_scaling == "none":
        return header.n_ctx_train
    original = said.yarn_orig_ctx or header.count("rope.scaling.original_context_length")
    original = original or round(header.n_ctx_train * _trained_scale(header))
    return max(header.n_ctx_train, int(min(original / scale, MAX_CTX)))


def settled_load(header: Header, said: LoadSettings) -> LoadSettings:
    """The settings without those that change nothing for this model, so that equal ones are one engine's: a context
    beyond the limit is the limit, and more layers than there are are all."""
    base, scale = said.rope_frequency_base, said.rope_frequency_scale
    layers = said.gpu_layers
    return msgspec.structs.replace(
        said,
        adapters=said.adapters or None,
        num_ctx=min(said.num_ctx, context_limit(header, said)) if said.num_ctx else None,
        gpu_layers=None if layers is None or layers < 0 else min(layers, header.n_layers + 1),
        rope_frequency_base=None if base == _rope_number(header, "rope.freq_base") else base or None,
        rope_frequency_scale=None if scale == _trained_scale(header) else scale or None,
        yarn_orig_ctx=said.yarn_orig_ctx or None,
    )


def check_load(header: Header, said: LoadSettings, name: str) -> None:
    """Raises BadRequest for what this model cannot be loaded with, naming the setting, its limit and the way out."""
    if said.kv_type not in (None, AUTO_KV_TYPE, "f16") and not is_quantizable(header):
        raise BadRequest(
            f"kv_type is {said.kv_type}, which stores blocks of 32 numbers, but the heads of '{name}' have "
            f"{header.head_dim_k} and {header.head_dim_v}; use f16",
            field="kv_type",
        )
    for field, least in (("rope_frequency_base", LEAST_BASE), ("rope_frequency_scale", LEAST_SCALE)):
        value = getattr(said, field)
        if value is not None and 0 < value < least:
            raise BadRequest(f"{field} is {value}; use {least:g} or more, or 0 for the model's own", field=field)


def too_long(header: Header, said: LoadSettings) -> str:
    """What is done about a context beyond the limit; "" for one within it."""
    limit = context_limit(header, said)
    if said.num_ctx is None or said.num_ctx <= limit:
        return ""
    scale = f"{header.n_ctx_train / said.num_ctx:.3g}"
    return (
        f"num_ctx {said.num_ctx} is more than the model's context, and {limit} is used (trained for "
        f"{header.n_ctx_train}; rope_frequency_scale {scale} extends it, which costs quality)"
    )


def _trained_scale(header: Header) -> float:
    """1 is what files without a scale mean."""
    factor = _rope_number(header, "rope.scaling.factor") or _rope_number(header, "rope.scale_linear")
    return 1 / factor if factor else 1.0


def _rope_number(header: Header, key: str) -> float:
    value = header.metadata.get(f"{header.architecture}.{key}")
    return float(value) if isinstance(value, int | float) else 0.0
