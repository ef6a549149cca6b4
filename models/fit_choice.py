"""How a model is best opened on a machine: GPU layers, context, type of the KV cache, and slots.

Pure. The rule, with what a person asked for never changed:

1. As many cells as the slots would like: a whole context for each, one pool of at most `DEFAULT_POOL_CELLS`.
2. Where that is too much, half of it, and half again, down to `COMFORTABLE_CELLS` or one trained context.
3. Where that is too much, the same with the KV cache in q8_0, which takes half of f16's memory. q4_0 is for those who
   ask for it: it costs quality that one can see.
4. Then fewer cells still, down to `FLOOR_CELLS`, and at last fewer slots.

On a CPU the cells are rounded up to whole streams, one for every slot.

On a machine with GPUs, that one of steps 1 to 3 is taken which has most layers there, since one layer in RAM costs more
speed than anything else here.

Does not: read the machine, evict other models, or count the prefix cache, which takes what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from localrun.models.fit_devices import DeviceUse, LayerWeights, Machine, all_fit, divide, layer_weights
from localrun.models.header import Header
from localrun.models.layer_memory import model_memory
from localrun.models.memory import MemoryEstimate, estimate, layers_kv_bytes

CELL_STEP: Final = 256  # llama.cpp pads its KV pool to this many cells, and where it is split every stream of it
DEFAULT_POOL_CELLS: Final = 32_768
COMFORTABLE_CELLS: Final = 8_192
FLOOR_CELLS: Final = 2_048
AUTO: Final = "auto"

_AUTO_TYPES = ("f16", "q8_0")
_Q8_BLOCK = 32


class Wish(NamedTuple):
    """What a person asked for. `n_kv_cells` 0, `kv_type` auto and `n_gpu_layers` -1 leave it to the machine; `n_slots`
    is the most. `adapter_bytes` are those of the LoRA files that come with the model."""

    n_slots: int
    n_kv_cells: int = 0
    kv_type: str = AUTO
    n_gpu_layers: int = -1
    n_ubatch: int = 512
    adapter_bytes: int = 0


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
    return _whole_steps(kv_cells or min(n_ctx_train * n_slots, DEFAULT_POOL_CELLS))


def choose(header: Header, machine: Machine, wish: Wish) -> Fit:
    """The best way to open the model there, by the rule above."""
    opener = _Opener(header, machine, wish)
    fitting = [fit for setting in _comfortable(header, wish) if (fit := opener.best(setting)).fits]
    if fitting:
        return max(fitting, key=_n_gpu_layers)  # the first of those with most
    *tight, smallest = (opener.best(setting) for setting in _tight(header, wish))
    return next((fit for fit in tight if fit.fits), smallest)


def _n_gpu_layers(fit: Fit) -> int:
    return fit.n_gpu_layers


class _Opener:
    """Tries settings on one machine."""

    def __init__(self, header: Header, machine: Machine, wish: Wish) -> None:
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
        n_ctx = min(n_cells, self._header.n_ctx_train)
        return Fit(
            fits, n_slots, n_cells, kv_type, n_gpu_layers, n_ctx, needed, devices, self._notes(setting, n_gpu_layers)
        )

    def _in_whole_streams(self, setting: _Setting) -> _Setting:
        """On a CPU each slot has a stream of cells of its own, where the model allows it."""
        n_cells = setting.n_kv_cells
        if not model_memory(self._header, n_kv_cells=n_cells).is_shareable:
            return setting
        return setting._replace(n_kv_cells=_whole_steps(n_cells, CELL_STEP * setting.n_slots))

    def _sizes(self, setting: _Setting, is_on_gpu: bool) -> tuple[MemoryEstimate, list[int]]:
        known = self._known.get((setting, is_on_gpu))
        if known is None:
            n_slots, n_cells, kv_type = setting
            header, n_ubatch = self._header, self._wish.n_ubatch
            known = self._known[setting, is_on_gpu] = (
                estimate(
                    header, n_kv_cells=n_cells, n_slots=n_slots, n_ubatch=n_ubatch, kv_type=kv_type,
                    may_split=not is_on_gpu,
                )._replace(adapter_bytes=self._wish.adapter_bytes),
                layers_kv_bytes(header, n_kv_cells=n_cells, n_slots=n_slots, n_ubatch=n_ubatch, kv_type=kv_type),
            )  # fmt: skip
        return known

    def _notes(self, setting: _Setting, n_gpu_layers: int) -> tuple[str, ...]:
        """Why it is not what one would like."""
        wish, header = self._wish, self._header
        notes = []
        wanted = wanted_cells(n_ctx_train=header.n_ctx_train, n_slots=wish.n_slots, kv_cells=wish.n_kv_cells)
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
        return tuple(notes)


def _comfortable(header: Header, wish: Wish) -> Iterator[_Setting]:
    """Steps 1 to 3 of the rule."""
    wanted = wanted_cells(n_ctx_train=header.n_ctx_train, n_slots=wish.n_slots, kv_cells=wish.n_kv_cells)
    least = wanted if wish.n_kv_cells else min(wanted, _whole_steps(min(header.n_ctx_train, COMFORTABLE_CELLS)))
    for kv_type in _kv_types(header, wish):
        for n_cells in _halvings(wanted, least):
            yield _Setting(wish.n_slots, n_cells, kv_type)


def _tight(header: Header, wish: Wish) -> Iterator[_Setting]:
    """Step 4: at least one setting, the last of which is the smallest that there is."""
    wanted = wanted_cells(n_ctx_train=header.n_ctx_train, n_slots=wish.n_slots, kv_cells=wish.n_kv_cells)
    small_type = _kv_types(header, wish)[-1]
    if not wish.n_kv_cells:
        floor = min(wanted, _whole_steps(min(header.n_ctx_train, FLOOR_CELLS)))
        wanted = min(wanted, _whole_steps(min(header.n_ctx_train, COMFORTABLE_CELLS)))
        for n_cells in _halvings(wanted, floor):
            yield _Setting(wish.n_slots, n_cells, small_type)
        wanted = floor
    else:
        yield _Setting(wish.n_slots, wanted, small_type)
    n_slots = wish.n_slots
    while n_slots > 1:
        n_slots //= 2
        yield _Setting(n_slots, wanted, small_type)


def _kv_types(header: Header, wish: Wish) -> tuple[str, ...]:
    """Types to try, best first. Rows of a quantized cache are whole blocks for every head."""
    if wish.kv_type != AUTO:
        return (wish.kv_type,)
    dimensions = (header.head_dim_k, header.head_dim_v)
    is_quantizable = header.n_heads_kv > 0 and all(size > 0 and size % _Q8_BLOCK == 0 for size in dimensions)
    return _AUTO_TYPES if is_quantizable else _AUTO_TYPES[:1]


def _halvings(most: int, least: int) -> Iterator[int]:
    """`most` and its halves in whole steps, down to `least`, which comes last."""
    while most > least:
        yield most
        most = max(least, _whole_steps(most // 2))
    yield least


def _whole_steps(cells: int, step: int = CELL_STEP) -> int:
    return max(1, -(-cells // step)) * step
