"""A machine with other settings, another quantization, or another machine: what is simulated, and how sure it is.

Steps of few streams read weights: what a measured step takes is scaled by the bytes that it would read in another
quantization. Prompts are computed, and stay as they are. Kernels differ, so it is an estimate with the band of a
roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import psutil

from localrun.bench.roofline import step_bytes
from localrun.config import Settings
from localrun.errors import BadRequest, CannotFit
from localrun.models.fit import AUTO, FitRequest, Machine, choose, in_gb
from localrun.models.gguf.header import Header
from localrun.models.gguf.requantized import quantization, requantized
from localrun.models.storage.model import Model
from localrun.models.storage.store import Store
from localrun.plan.backend import Layout
from localrun.plan.calibration import Calibration, kept, path_of, setup_of
from localrun.plan.costs import Costs, StreamCosts
from localrun.plan.roofline import LAYER, LEAST_BAND, Estimate, estimate_of

# The machine that was calibrated.
THIS = "this"

Calibrate = Callable[[Model, Settings], Calibration]


def problem_of(text: str) -> str:
    """Why sizes in this quantization are not known; empty if they are."""
    try:
        quantization(text)
    except BadRequest as error:
        return error.message
    return ""


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
    available = psutil.virtual_memory().available
    fit = choose(header, Machine(available), wish)
    if not layout.n_gpu_layers and not fit.fits:
        cells = f" and {in_gb(fit.estimate.kv_bytes)} of {n_cells} KV cells" if n_cells else ""
        needed, free = in_gb(header.weights_bytes), in_gb(available)
        raise CannotFit(f"{header.name} in {wanted} has {needed} of weights{cells}, and {free} are free")


def rescaled(costs: Costs, header: Header, other: Header) -> Costs:
    """What was measured with one of two quantizations, for the other."""
    streams = costs.streams
    factors = [
        step_bytes(other, n_streams=n).weights_bytes / step_bytes(header, n_streams=n).weights_bytes
        for n in streams.streams
    ]
    bases = tuple(factor * base_s for factor, base_s in zip(factors, streams.base_s, strict=True))
    return msgspec.structs.replace(costs, streams=StreamCosts(streams.streams, bases, streams.per_token_s))
