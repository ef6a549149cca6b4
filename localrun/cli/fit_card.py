"""What `/localrun/v1/fit` says of a model, as text for a person.

Pure. Does not: fetch it.
"""

from __future__ import annotations

from typing import Any

from localrun.cli.columns import columns, size
from localrun.cli.visible import visible

_SIZES = ("weights_bytes", "kv_bytes", "compute_bytes", "other_bytes", "total_bytes", "usable_bytes", "free_bytes")


def fit_card(fit: dict[str, Any]) -> str:
    """The choice, a table of devices, and the reasons."""
    blocks = [_choice(fit), _devices(fit["devices"]), "\n".join(_notes(fit))]
    return visible("\n\n".join(filter(None, blocks)))


def _choice(fit: dict[str, Any]) -> str:
    verdict = "fits this machine" if fit["fits"] else "does not fit this machine; the least it could be opened with is"
    on_gpu = f", {fit['gpu_layers']} of {fit['layers']} layers on the GPU" if fit["gpu_layers"] else ""
    return (
        f"{fit['model']} {verdict}\n"
        f"  {fit['slots']} slots, {fit['kv_cells']} KV cells in {fit['kv_type']}, up to {fit['context']} tokens in one "
        f"request{on_gpu}"
    )


def _devices(devices: list[dict[str, Any]]) -> str:
    header = ("DEVICE", "LAYERS", "WEIGHTS", "KV CACHE", "COMPUTE", "OTHER", "TOTAL", "USABLE", "FREE")
    rows = [(use["name"], str(use["layers"]), *(size(use[key]) for key in _SIZES)) for use in devices]
    return columns(header, rows)


def _notes(fit: dict[str, Any]) -> list[str]:
    background = f", and long prompts in the background, {size(fit['background_bytes'])}"
    notes = [
        *fit["notes"],
        f"other: the process with its vocabulary, {size(fit['process_bytes'])}"
        f"{background if fit['background_bytes'] else ''}",
    ]
    if fit["idle_bytes"]:
        notes.append(f"{size(fit['idle_bytes'])} that idle models hold count as free: they give way")
    if fit["prefix_cache_bytes"]:
        notes.append(f"the prefix cache takes up to {size(fit['prefix_cache_bytes'])} besides (LOCALRUN_RAM_CACHE)")
    copied_bytes = fit["resident_bytes"] - fit["total_bytes"]
    if copied_bytes > 0 and not fit["gpu_layers"]:
        notes.append(
            f"the system shows {size(copied_bytes)} more: weights that were copied into the processor's order, whose "
            f"file it drops when it needs the memory"
        )
    if fit["problem"]:
        notes.append(fit["problem"])
    return [f"- {note}" for note in notes]
