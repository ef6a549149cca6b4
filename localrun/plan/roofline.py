"""What a machine would take that nobody measured: the roofline of its memory and of its arithmetic, with a band; and
what this one would take with other settings, or another quantization.

A step of n rows reads all weights (of experts, those that n rows are expected to choose) and each row's keys and
values, and multiplies every active weight with every row. It takes the sum of the two, at the part of a data sheet's
figures that llama.cpp reaches on such a device (`Efficiency`), and a launch: not the longer one, for its kernels hardly
do both at once, as the published figures in docs/planning.md show. The parts are given with their range: it is the
band, and the band is never below `LEAST_BAND`.

Several GPUs, as `rtx-4090x2`, add up their memory. Split by layers, as llama.cpp does it by itself, one computes after
the other, and a step is no quicker. Split by tensors each has its part of every matrix, and twice in a layer they
exchange what came out: a ring of g sends 2 (g - 1) / g of it over the link, and there is a wait each time.

Only for GPUs and machines with one memory for all: on a CPU neither figure of a data sheet says much, and it is
calibrated. Of this machine with other settings, or with the model in another quantization, a calibration is asked.
Steps of few streams read weights: what a measured step takes is scaled by the bytes that it would read in the other
quantization. Prompts are computed, and stay as they are. Kernels differ, so it is an estimate with the band of a
roofline.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from localrun.bench.roofline import step_bytes, tensors_read
from localrun.config import Settings
from localrun.engine.backend import MemoryKind
from localrun.errors import BadRequest, CannotFit, meant
from localrun.hardware.memory import machine_memory
from localrun.models.fit import AUTO, FitRequest, Gpu, Machine, choose, in_gb
from localrun.models.gguf.header import Header, TensorInfo
from localrun.models.gguf.tables import BY_NAME, FILE_TYPES, QUANT_ALIASES
from localrun.models.memory import memory_kind, model_memory
from localrun.models.storage.model import Model
from localrun.models.storage.store import Store
from localrun.plan.backend import Layout
from localrun.plan.calibration import Calibration, kept, path_of, setup_of
from localrun.plan.costs import Costs, PromptCosts, StreamCosts
from localrun.plan.replica import Setup

LEAST_BAND = 0.35
# Memory of the host, which holds nothing here but what is kept of prompts.
_HOST_BYTES = 1 << 40
# Between a device and its host.
_COPY_BYTES_PER_S = 8e9
_SPARE_SEQUENCES = 64
# What goes from one GPU to the next are 32-bit floats.
_ACTIVATION_BYTES = 4
# Until they have met: over PCI Express as published figures of two cards show it, and over links made for it.
_MEETING_S, _FAST_MEETING_S = 3e-5, 1e-5
_FAST_LINK_GB_PER_S = 100
MOST_GPUS = 16
LAYER, TENSOR = "layer", "tensor"
_SEVERAL = re.compile(r"(?P<name>.+)x(?P<n>[0-9]{1,3})")
_STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_ROWS = (1, 8, 16, 32, 64, 128, 256, 512)


class Efficiency(NamedTuple):
    """Parts of the data sheet's bandwidth and arithmetic, as (lowest, usual, highest). A step is launched in
    `launch_s`."""

    bandwidth: tuple[float, float, float]
    arithmetic: tuple[float, float, float]
    launch_s: float


# What published figures of llama.cpp's backends show, with wide ranges.
EFFICIENCIES = {
    "cuda": Efficiency((0.6, 0.75, 0.85), (0.25, 0.35, 0.5), 3e-4),
    "rocm": Efficiency((0.5, 0.62, 0.75), (0.12, 0.2, 0.3), 6e-4),
    "metal": Efficiency((0.5, 0.7, 0.85), (0.5, 0.65, 0.8), 5e-4),
}


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of machines.toml. `tflops` are of 16-bit floats, dense, or of what `arithmetic` names; `watts` of the whole
    device, `link_gb_per_s` one way to another one, 0 where there is none. Each figure's source is named. Of several
    `n_gpus`, all figures are those of one."""

    title: str
    memory_gb: float
    gb_per_s: float
    tflops: float
    watts: float
    backend: str
    source: str
    arithmetic: str = "f16"
    tflops_source: str = ""
    link_gb_per_s: float = 0
    note: str = ""
    n_gpus: int = 1
    split: str = LAYER

    @property
    def n_at_once(self) -> int:
        """How many compute at the same time."""
        return self.n_gpus if self.split == TENSOR else 1

    def exchange_s(self, n_layers: int, n_embd: int, n_rows: int) -> float:
        """What a step of so many rows takes besides, because there are several."""
        if self.n_gpus == 1:
            return 0.0
        row_s = n_rows * n_embd * _ACTIVATION_BYTES / (self.link_gb_per_s * 1e9)
        meeting_s = _FAST_MEETING_S if self.link_gb_per_s >= _FAST_LINK_GB_PER_S else _MEETING_S
        if self.split == LAYER:
            return (self.n_gpus - 1) * (row_s + meeting_s)
        return 2 * n_layers * (2 * (self.n_gpus - 1) / self.n_gpus * row_s + meeting_s)


def machines() -> dict[str, Device]:
    """The known ones, by key."""
    text = resources.files("localrun.plan").joinpath("machines.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, Device])


def device(name: str, split: str = LAYER) -> Device:
    """One, or several as `rtx-4090x2`. Raises BadRequest, for an unknown one with the nearest name."""
    known = machines()
    several = None if name in known else _SEVERAL.fullmatch(name)
    one, n_gpus = (several["name"], int(several["n"])) if several else (name, 1)
    if one not in known:
        way_out = meant(one, known) or "`localrun plan machines` lists them"
        raise BadRequest(f"there is no machine '{one}'; {way_out}", field="machine")
    found = known[one]
    if not 1 <= n_gpus <= MOST_GPUS:
        raise BadRequest(f"'{name}': from 1 to {MOST_GPUS} of them can be planned together", field="machine")
    if n_gpus > 1 and not found.link_gb_per_s:
        raise BadRequest(f"'{name}': a {found.title} has no link to another one", field="machine")
    if n_gpus == 1 and split == TENSOR:
        raise BadRequest(f"'{name}' is one GPU, and nothing is split; several are {name}x2 and so on", field="split")
    return msgspec.structs.replace(found, n_gpus=n_gpus, split=split)


class Estimate(NamedTuple):
    """A machine as it probably is, and where everything takes so many times as long, or as short."""

    setup: Setup
    slower: float
    faster: float


def estimate_of(header: Header, name: str, settings: Settings, split: str = LAYER) -> Estimate:
    """Raises BadRequest for an unknown machine, and CannotFit for a model that is not in its memory as a whole."""
    found = device(name, split)
    wish = FitRequest(
        n_slots=settings.slots, n_kv_cells=settings.kv_cells, kv_type=settings.kv_type, n_ubatch=settings.batch_tokens
    )
    # What is sold as GB of memory are GiB; a Mac does not give all of its own to the GPU.
    each_bytes = int(found.memory_gb * (1e9 if found.backend == "metal" else 1 << 30))
    gpus = tuple(Gpu(f"{name} {number}", each_bytes) for number in range(found.n_gpus))
    fit = choose(header, Machine(_HOST_BYTES, gpus), wish)
    if not fit.fits or fit.n_gpu_layers <= header.n_layers:
        needed = in_gb(fit.estimate.weights_bytes)
        has = f"{found.n_gpus} times {found.memory_gb:g} GB" if found.n_gpus > 1 else f"{found.memory_gb:g} GB"
        raise CannotFit(f"{header.name} has {needed} of weights, too many for {name} with {has}")
    memory = model_memory(header, n_kv_cells=fit.n_kv_cells)
    read = step_bytes(header, n_streams=1)
    layout = Layout(
        slots=fit.n_slots,
        n_cells=fit.n_kv_cells,
        n_ctx_train=header.n_ctx_train,
        n_batch=max(settings.batch_tokens, fit.n_slots + 32),
        n_spare_seqs=_SPARE_SEQUENCES if memory.is_shareable else 0,
        memory_kind=MemoryKind.ATTENTION if memory.is_shareable else MemoryKind(memory_kind(header)),
        cuts_states=memory.is_shareable,
        is_split=False,
        mixes_rows=True,
        n_gpu_layers=fit.n_gpu_layers,
        kv_type=fit.kv_type,
        state_token_bytes=max(1, int(read.kv_bytes_per_token)),
        state_bytes=4 * memory.state_elements * sum(layer.has_state for layer in memory.layers),
    )
    costs = costs_of(header, found, layout.slots)
    return Estimate(Setup.of(layout, costs, settings), *band(EFFICIENCIES[found.backend]))


def band(efficiency: Efficiency) -> tuple[float, float]:
    """How many times as long everything may take, and how many times as short, at least by `LEAST_BAND`."""
    ranges = (efficiency.bandwidth, efficiency.arithmetic)
    slower = max(usual / low for low, usual, _ in ranges)
    faster = max(high / usual for _, usual, high in ranges)
    return max(slower, 1 / (1 - LEAST_BAND)), 1 / max(faster, 1 + LEAST_BAND)


def active_weights(header: Header) -> float:
    """With how many weights each row is multiplied."""
    return sum(share * tensor.n_elements for tensor, share in tensors_read(header, 1) if len(tensor.shape) > 1)


def step_s(header: Header, found: Device, n_rows: int) -> float:
    """Seconds of a step of so many rows without anything before them, as they probably are."""
    read_s = step_bytes(header, n_streams=n_rows).weights_bytes / _bytes_per_s(found)
    computed_s = 2 * active_weights(header) * n_rows / _flops_per_s(found)
    exchange_s = found.exchange_s(header.n_layers, header.n_embd, n_rows)
    return read_s + computed_s + exchange_s + EFFICIENCIES[found.backend].launch_s


def _bytes_per_s(found: Device) -> float:
    return found.n_at_once * EFFICIENCIES[found.backend].bandwidth[1] * found.gb_per_s * 1e9


def _flops_per_s(found: Device) -> float:
    return found.n_at_once * EFFICIENCIES[found.backend].arithmetic[1] * found.tflops * 1e12


def costs_of(header: Header, found: Device, n_slots: int) -> Costs:
    """What a device probably takes; the host and the daemon as on a usual machine."""
    counts = tuple(n for n in _STREAMS if n <= n_slots) or (1,)
    token_bytes = step_bytes(header, n_streams=1).kv_bytes_per_token
    token_s = token_bytes / _bytes_per_s(found)
    flops_per_s = _flops_per_s(found)
    attended = 4 * header.n_layers * header.n_heads * header.head_dim_k
    exchanged_s = [found.exchange_s(header.n_layers, header.n_embd, n_rows) for n_rows in (0, 1)]
    row_s = 2 * active_weights(header) / flops_per_s + exchanged_s[1] - exchanged_s[0]
    line = PromptCosts(step_s(header, found, _ROWS[-1]) - _ROWS[-1] * row_s, row_s, attended / flops_per_s)
    copied_s = token_bytes / _COPY_BYTES_PER_S
    # Few rows read fewer experts.
    factors = {n: step_s(header, found, n) / (line.fixed_s + n * row_s) for n in _ROWS}
    prompts = msgspec.structs.replace(line, factors=factors)
    return Costs(
        streams=StreamCosts(counts, tuple(step_s(header, found, n) for n in counts), (token_s,) * len(counts)),
        background=prompts,
        beside=prompts,
        copy_s=1e-4,
        copy_token_s=copied_s,
        save_token_s=copied_s,
        restore_token_s=copied_s,
        host_s=2e-4,
        host_row_s=1e-5,
        delta_s=1e-4,
        request_s=2e-3,
        sigma=0.05,
    )


# The machine that was calibrated.
THIS = "this"

Calibrate = Callable[[Model, Settings], Calibration]


def estimate(model: Model, settings: Settings, values: Mapping[str, str], calibration_of: Calibrate) -> Estimate:
    """By the names of --vary. Raises BadRequest and CannotFit for what cannot be."""
    said = {name.replace("-", "_"): values[name] for name in ("latency", "kv-type", "speculation") if name in values}
    settings = msgspec.structs.replace(settings, **said)
    if values.get("machine", THIS) == THIS:
        return _here(model, settings, values, calibration_of)
    header = requantized(model.header, values["quantization"]) if "quantization" in values else model.header
    counts = {name.replace("-", "_"): int(values[name]) for name in ("slots", "kv-cells") if name in values}
    settings = msgspec.structs.replace(settings, **counts)
    found = estimate_of(header, values["machine"], settings, values.get("split", LAYER))
    if "kv_cells" in counts:
        _check_cells(counts["kv_cells"], found.setup.layout)
    return found


def _here(model: Model, settings: Settings, values: Mapping[str, str], calibration_of: Calibrate) -> Estimate:
    """From a calibration: of this file, of one in the other quantization if that was calibrated, or else scaled."""
    if "split" in values:
        raise BadRequest("this machine is measured as it is; --split is of several GPUs, as rtx-4090x2", field="split")
    wanted = quantization(values["quantization"]) if "quantization" in values else model.header.quantization
    if wanted != model.header.quantization:
        model = _calibrated(model, wanted, settings) or model
    calibration = calibration_of(model, settings)
    layout, most = calibration.layout, 2 * calibration.layout.slots
    if "slots" in values:
        if int(values["slots"]) > most:
            raise BadRequest(f"{layout.slots} slots were calibrated, and a forecast reaches to {most} of them")
        layout = layout.with_slots(int(values["slots"]))
    n_cells = int(values.get("kv-cells", 0))
    if n_cells:
        _check_cells(n_cells, layout)
    layout = layout.with_cells(n_cells or layout.n_cells)
    setup = setup_of(calibration, settings)._replace(layout=layout)
    if wanted == model.header.quantization:
        if n_cells:
            _check_memory(model.header, wanted, settings, layout, n_cells)
        return Estimate(setup, 1.0, 1.0)
    header = requantized(model.header, wanted)
    _check_memory(header, wanted, settings, layout, n_cells)
    setup = setup._replace(costs=rescaled(setup.costs, model.header, header))
    return Estimate(setup, 1 / (1 - LEAST_BAND), 1 / (1 + LEAST_BAND))


def _calibrated(model: Model, wanted: str, settings: Settings) -> Model | None:
    """A file of the same model in the other quantization, if it was calibrated."""
    alike = (each for each in Store.of(settings).list() if each.header.quantization == wanted)
    return next(
        (each for each in alike if _shape(each) == _shape(model) and kept(path_of(each, settings)) is not None), None
    )


def _shape(model: Model) -> tuple[Any, ...]:
    header = model.header
    return header.architecture, header.n_layers, header.n_embd, header.n_vocab, header.n_params


def _check_cells(n_cells: int, layout: Layout) -> None:
    if n_cells < layout.least_cells:
        raise BadRequest(
            f"{n_cells} KV cells are too few: {layout.slots} slots have at least {layout.least_cells}", field="kv_cells"
        )


def _check_memory(header: Header, wanted: str, settings: Settings, layout: Layout, n_cells: int) -> None:
    """Raises CannotFit for what this machine has no memory for; `n_cells` 0 are as many as the settings say."""
    wish = FitRequest(
        n_slots=layout.slots if n_cells else settings.slots,
        n_kv_cells=n_cells or settings.kv_cells,
        kv_type=layout.kv_type if n_cells else AUTO,
        n_ubatch=settings.batch_tokens,
    )
    available = machine_memory().available_bytes
    fit = choose(header, Machine(available), wish)
    if not layout.n_gpu_layers and not fit.fits:
        cells = f" and {in_gb(fit.estimate.kv_bytes)} of {n_cells} KV cells" if n_cells else ""
        needed, free = in_gb(header.weights_bytes), in_gb(available)
        raise CannotFit(f"{header.name} in {wanted} has {needed} of weights{cells}, and {free} are free")


# --- the model in another quantization ---
#
# Types are chosen as llama.cpp's quantizer does it without an importance matrix: the output matrix gets 6 bits, in the
# mixes called M so do value and down projections of the layers that are worth it, and a row that is no whole number of
# blocks falls back to a type with smaller ones. What is kept in 32 bits stays so.


class _Mix(NamedTuple):
    """Types of usual matrices, of those that are worth more in some layers, and of the output."""

    usual: str
    better: str
    output: str


MIXES = {
    "Q4_0": _Mix("Q4_0", "Q4_0", "Q6_K"),
    "Q4_K_M": _Mix("Q4_K", "Q6_K", "Q6_K"),
    "Q5_K_M": _Mix("Q5_K", "Q6_K", "Q6_K"),
    "Q6_K": _Mix("Q6_K", "Q6_K", "Q6_K"),
    "Q8_0": _Mix("Q8_0", "Q8_0", "Q8_0"),
    "F16": _Mix("F16", "F16", "F16"),
}
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "Q4_0": "F16", "Q8_0": "F16"}
_WORTH_MORE = ("attn_v.weight", "attn_qkv.weight", "ffn_down.weight", "ffn_down_exps.weight")


def quantization(text: str) -> str:
    """Its name in `MIXES`. Raises BadRequest."""
    name = QUANT_ALIASES.get(text.upper(), text.upper())
    if name not in MIXES:
        way_out = meant(name, MIXES) or f"it is one of {', '.join(MIXES)}"
        raise BadRequest(f"sizes in '{text}' are not known; {way_out}", field="quantization")
    return name


def requantized(header: Header, name: str) -> Header:
    """The same model in one of `MIXES`, with the sizes that its tensors would have. Raises BadRequest."""
    name = quantization(name)
    mix, is_tied = MIXES[name], all(tensor.name != "output.weight" for tensor in header.tensors)
    tensors = tuple(_tensor(tensor, mix, header.n_layers, is_tied=is_tied) for tensor in header.tensors)
    more = sum(tensor.size_bytes for tensor in tensors) - sum(tensor.size_bytes for tensor in header.tensors)
    file_type = next(number for number, said in FILE_TYPES.items() if said == name)
    metadata = {**header.metadata, "general.file_type": file_type}
    return dataclasses.replace(header, tensors=tensors, size_bytes=header.size_bytes + more, metadata=metadata)


def _tensor(tensor: TensorInfo, mix: _Mix, n_layers: int, *, is_tied: bool) -> TensorInfo:
    if len(tensor.shape) < 2 or tensor.type_name == "F32":
        return tensor
    wanted = mix.usual
    if tensor.name == "output.weight" or (is_tied and tensor.name == "token_embd.weight"):
        wanted = mix.output
    elif tensor.name.endswith(_WORTH_MORE) and _is_worth_more(int(tensor.name.split(".")[1]), n_layers):
        wanted = mix.better
    found = BY_NAME[wanted]
    while tensor.shape[0] % found.block_elements:
        found = BY_NAME[_FALLBACKS[found.name]]
    size = tensor.n_elements // found.block_elements * found.block_bytes
    return tensor._replace(type_name=found.name, size_bytes=size)


def _is_worth_more(layer: int, n_layers: int) -> bool:
    """The first and the last eighth, and every third between them."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def rescaled(costs: Costs, header: Header, other: Header) -> Costs:
    """What was measured with one of two quantizations, for the other."""
    streams = costs.streams
    factors = [
        step_bytes(other, n_streams=n).weights_bytes / step_bytes(header, n_streams=n).weights_bytes
        for n in streams.streams
    ]
    bases = tuple(factor * base_s for factor, base_s in zip(factors, streams.base_s, strict=True))
    return msgspec.structs.replace(costs, streams=StreamCosts(streams.streams, bases, streams.per_token_s))
