"""How a model that generates is opened: GPU layers, KV cells, their type, slots; or why it cannot be.

Pure. The rule is `models.fit`. What the settings name is taken as it is or refused: a person who chose a number
shall not find another one. Slots are an exception where memory is so short that fewer are all there is.

Does not: read the machine's memory, or decide who is evicted (room.py).
"""

from __future__ import annotations

from localrun.config import Settings
from localrun.errors import CannotFit
from localrun.models.fit import USABLE_RAM, Fit, Machine, Wish, choose, in_gb
from localrun.models.header import Header
from localrun.server.engines.placement import Placement


def wish_of(settings: Settings, *, adapter_bytes: int = 0) -> Wish:
    """What the settings leave open, and what they do not, for a model with so much in adapters."""
    return Wish(
        n_slots=settings.slots,
        n_kv_cells=settings.kv_cells,
        kv_type=settings.kv_type,
        n_gpu_layers=settings.gpu_layers,
        n_ubatch=settings.batch_tokens,
        adapter_bytes=adapter_bytes,
    )


def place_text(name: str, header: Header, settings: Settings, machine: Machine, *, adapter_bytes: int = 0) -> Placement:
    """The placement of a model on a machine.

    Without known GPUs the number of layers there is left to the engine. Raises CannotFit with both sides of the
    comparison, and what would help.
    """
    wish = wish_of(settings, adapter_bytes=adapter_bytes)
    fit = choose(header, machine, wish)
    if not fit.fits:
        raise CannotFit(refusal(name, fit, machine, _fitting_cells(header, machine, wish)))
    return Placement(
        n_kv_cells=fit.n_kv_cells,
        kv_bytes=fit.estimate.kv_bytes,
        needed_bytes=fit.devices[0].total_bytes,
        kv_type=fit.kv_type,
        n_slots=fit.n_slots,
        n_gpu_layers=fit.n_gpu_layers if machine.gpus else wish.n_gpu_layers,
    )


def refusal(name: str, fit: Fit, machine: Machine, fitting_cells: int) -> str:
    """Why `fit` is none, as a sentence. `fitting_cells` would fit; 0 if nothing does."""
    ways = ["close other programs", "stop other models (localrun stop)"]
    if fitting_cells:
        ways.insert(0, f"use fewer KV cells (--kv-cells {fitting_cells} would fit)")
    else:
        ways.append("take a smaller model or a stronger quantization")
    needed = fit.estimate
    rest_bytes = needed.staging_bytes + needed.process_bytes + needed.adapter_bytes
    on_gpus = "".join(f", and {in_gb(gpu.free_bytes)} on {gpu.name}" for gpu in machine.gpus)
    return (
        f"model '{name}' needs {in_gb(needed.total_bytes)} of memory (weights {in_gb(needed.weights_bytes)}, KV cache "
        f"of {fit.n_kv_cells} cells {in_gb(needed.kv_bytes)}, compute {in_gb(needed.compute_bytes)}, the process and "
        f"long prompts in the background {in_gb(rest_bytes)}) but {in_gb(machine.ram_bytes)} is available, of which "
        f"{USABLE_RAM:.0%} may be used{on_gpus}; {', '.join(ways[:-1])}, or {ways[-1]}"
    )


def _fitting_cells(header: Header, machine: Machine, wish: Wish) -> int:
    """Cells that would fit instead of those asked for; 0 when none would, or none were asked for."""
    if not wish.n_kv_cells:
        return 0
    fit = choose(header, machine, wish._replace(n_kv_cells=0))
    return fit.n_kv_cells if fit.fits and fit.n_kv_cells < wish.n_kv_cells else 0
