"""What `/api/show` and `/localrun/v1/fit` say of a model, as text for a person."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from localrun.cli.text import TextStyle, one_line, painted, size, table, terminal_columns, wrapped

MAX_LICENSE_LINES = 3
_NAME_CHARACTERS = 20
# For a value beside its name.
_LEAST_ROOM = 24
_DEVICES = ("DEVICE", "LAYERS", "WEIGHTS", "KV CACHE", "COMPUTE", "OTHER", "TOTAL", "USABLE", "FREE")
_SPARE = ("COMPUTE", "OTHER", "KV CACHE", "WEIGHTS", "LAYERS", "FREE")
# A line, or a name and what it has.
_Row = str | tuple[str, object]
_SIZES = ("weights_bytes", "kv_bytes", "compute_bytes", "other_bytes", "total_bytes", "usable_bytes", "free_bytes")


def model_card(shown: dict[str, Any], *, fit: Mapping[str, Any] | None = None) -> str:
    """Blocks of name and value: model, capabilities, projector, tensors by type, memory by context, parameters, system,
    messages, license. Empty ones are left out. `fit` says how it would be loaded here."""
    details = shown.get("details") or {}
    info = shown.get("model_info") or {}
    architecture = info.get("general.architecture") or details.get("family") or ""
    model = {
        "architecture": architecture,
        "parameters": details.get("parameter_size"),
        "context length": info.get(f"{architecture}.context_length"),
        "embedding length": info.get(f"{architecture}.embedding_length"),
        "quantization": details.get("quantization_level"),
    }
    more = shown.get("localrun") or {}
    model |= {"file": more.get("path"), "source": _source(more), "requires": shown.get("requires")}
    model["draft model"] = more.get("draft")
    projector = more.get("projector") or {}
    blocks = [_block("Tier", _tier(more.get("tier") or {}))]
    blocks.append(_block("Large model" if more.get("tier") else "Model", _named(model)))
    blocks.append(_block("Notes", more.get("notes") or []))
    blocks.append(_block("Capabilities", shown.get("capabilities") or []))
    blocks.append(_block("Projector", _projector(projector, more.get("no_projector") or "")))
    types = more.get("tensor_types") or []
    rows = [(row["type"], f"{row['tensors']} tensors, {size(row['size'])}") for row in types]
    blocks.append(_block("Tensors", rows))
    blocks.append(_block("Memory", _memory(more.get("memory") or [], fit or {})))
    no_adapters = [f"none: {more['no_adapters']}"] if more.get("no_adapters") else []
    blocks.append(_block("Adapters", [*(more.get("adapters") or []), *no_adapters]))
    load = more.get("load") or {}
    blocks.append(_block("Load settings", [(name, one_line(value)) for name, value in load.items()]))
    blocks.append(_block("Parameters", _lines(shown.get("parameters"))))
    blocks.append(_block("System", _lines(shown.get("system"))))
    messages = shown.get("messages") or []
    blocks.append(_block("Messages", [(each["role"], _first_line(each["content"])) for each in messages]))
    blocks.append(_block("License", _license(shown)))
    if (tensors := shown.get("tensors")) is not None:
        blocks.append(_block("Metadata", [(name, _first_line(str(value))) for name, value in info.items()]))
        rows = [(each["name"], f"{each['type']} {'x'.join(map(str, each['shape']))}") for each in tensors]
        blocks.append(_block("All tensors", rows))
    return "\n\n".join(filter(None, blocks))


def _license(shown: dict[str, Any]) -> list[_Row]:
    lines = _lines(shown.get("license"))
    n_left = len(lines) - MAX_LICENSE_LINES
    return [*lines[:MAX_LICENSE_LINES], *([f"... {n_left} more lines; --license prints all"] if n_left > 0 else [])]


def adapter_card(shown: dict[str, Any]) -> str:
    """Blocks of name and value: the adapter and what it is for, its license."""
    more = shown["localrun"]
    adapter = {
        "kind": more["kind"],
        "architecture": more["architecture"],
        "made for": more["base_model"],
        "rank": more["rank"],
        "alpha": f"{more['alpha']:g}" if more["alpha"] else "",
        "layers": more["layers"],
        "tensors": more["tensors"],
        "size": size(more["size"]),
        "file": more["path"],
        "digest": more["digest"],
        "source": _source(more),
        "use": f"localrun run MODEL+{more['name']}",
    }
    blocks = [_block("Adapter", _named(adapter))]
    blocks.append(_block("License", _license(shown)))
    return "\n\n".join(filter(None, blocks))


def model_parameters(shown: dict[str, Any], options: dict[str, Any]) -> str:
    """The model's own parameters and those set in this conversation."""
    own = _block("Model's own", _lines(shown.get("parameters")))
    here = _block("Set here", options.items())
    return "\n\n".join(filter(None, (own, here))) or "no parameters are set"


def _named(values: dict[str, Any]) -> list[_Row]:
    return [(name, value) for name, value in values.items() if value]


def _tier(tier: dict[str, Any]) -> list[_Row]:
    """The two models and the rules, in the order of the settings file."""
    said = {name: one_line(value) for name, value in tier.items() if name != "reasoning_effort"}
    efforts = [f"{effort} {size}" for effort, size in tier.get("reasoning_effort", {}).items()]
    return _named(said | {"reasoning_effort": ", ".join(efforts)})


def _source(more: dict[str, Any]) -> str:
    """Where it comes from; of a file that is used in place the path is said already."""
    source = more.get("source") or {}
    named = source.get("repo") or source.get("file") or ""
    named = "" if named == more.get("path") else named
    revision = str(source.get("revision") or "")[:12]
    kind = source.get("kind", "")
    return " ".join(filter(None, ("" if kind == "foreign" else kind, named, revision)))


def _projector(projector: dict[str, Any], problem: str) -> list[_Row]:
    """What makes rows of images or audio for the model, or why it has none."""
    if not projector:
        return [f"none: {problem}"] if problem else []
    kind = f"{', '.join(projector['types'])} {projector['quantization']}, {size(projector['size'])}"
    return [("takes", ", ".join(projector["takes"])), ("type", kind), ("file", projector["path"])]


def _memory(rows: list[dict[str, Any]], fit: Mapping[str, Any]) -> list[_Row]:
    """What it takes as it would be loaded here, and below what one request that uses a whole context would."""
    shown: list[_Row] = []
    if fit:
        weights_bytes, kv_bytes = (
            sum(device[f"{part}_bytes"] for device in fit["devices"]) for part in ("weights", "kv")
        )
        parts = _parts(fit["total_bytes"], weights_bytes, kv_bytes)
        shown.append(("needed when loaded", f"{parts}; --fit says more"))
    return shown + [
        (f"one request, {row['context']:,} tokens", _parts(row["total"], row["weights"], row["kv_cache"]))
        for row in rows
    ]


def _parts(total_bytes: int, weights_bytes: int, kv_bytes: int) -> str:
    rest_bytes = total_bytes - weights_bytes - kv_bytes
    return (
        f"{size(total_bytes)} (weights {size(weights_bytes)}, KV cache {size(kv_bytes)}, the rest {size(rest_bytes)})"
    )


def _first_line(text: str) -> str:
    line, _, rest = text.partition("\n")
    return line + (" ..." if rest else "")


def _lines(text: object) -> list[str]:
    return [line for line in str(text or "").splitlines() if line.strip()]


def _block(title: str, rows: Iterable[_Row]) -> str:
    rows = list(rows)
    width = max((len(row[0]) + 2 for row in rows if isinstance(row, tuple)), default=0)
    width = max(width, _NAME_CHARACTERS)
    lines = [
        wrapped(f"  {row}", indent=4) if isinstance(row, str) else _pair(row[0], str(row[1]), width) for row in rows
    ]
    return "\n".join((painted(title, TextStyle.HEADING), *lines)) if lines else ""


def _pair(name: str, value: str, width: int) -> str:
    """The value beside its name or, where a terminal has no room for it there, below."""
    room = terminal_columns() - width - 3
    if terminal_columns() and len(value) > room and (room < _LEAST_ROOM or max(map(len, value.split())) > room):
        return f"  {name}\n{wrapped(f'    {value}', indent=4)}"
    return wrapped(f"  {name:<{width}}{value}", indent=width + 2)


def fit_card(fit: dict[str, Any]) -> str:
    """How a model would be opened here: the choice, a table of devices, and the reasons."""
    rows = [(use["name"], str(use["layers"]), *(size(use[key]) for key in _SIZES)) for use in fit["devices"]]
    blocks = [_choice(fit), table(_DEVICES, rows, spare=_SPARE), "\n".join(_notes(fit))]
    return "\n\n".join(filter(None, blocks))


def _choice(fit: dict[str, Any]) -> str:
    verdict = "fits this machine" if fit["fits"] else "does not fit this machine; the least it could be opened with is"
    on_gpu = f", {fit['gpu_layers']} of {fit['layers']} layers on the GPU" if fit["gpu_layers"] else ""
    return wrapped(
        f"{fit['model']} {verdict}\n"
        f"  {fit['slots']} slots, {fit['kv_cells']} KV cells in {fit['kv_type']}, up to {fit['context']} tokens in one "
        f"request{on_gpu}",
        indent=2,
    )


def _notes(fit: dict[str, Any]) -> list[str]:
    background = f", and long prompts in the background, {size(fit['background_bytes'])}"
    notes = [
        *fit["notes"],
        f"other: the process with its vocabulary, {size(fit['process_bytes'])}"
        f"{background if fit['background_bytes'] else ''}",
    ]
    if projector := fit.get("projector"):
        notes.append(
            f"the projector {projector['name']} takes {size(projector['total_bytes'])} of other on "
            f"{projector['device']} (weights {size(projector['weights_bytes'])}, the largest picture or the longest "
            f"audio {size(projector['compute_bytes'])})"
        )
    if draft := fit["draft"]:
        rest_bytes = draft["compute_bytes"] + draft["other_bytes"]
        notes.append(
            f"the draft model {draft['model']} takes {size(draft['total_bytes'])} of other on {draft['device']} "
            f"(weights {size(draft['weights_bytes'])}, KV cache {size(draft['kv_bytes'])}, the rest {size(rest_bytes)})"
        )
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
    return [wrapped(f"- {note}", indent=2) for note in notes]
