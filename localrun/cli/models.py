"""The commands about models that are here: list, show, create, cp, rm, push, gc; and a model's card.

Each asks the daemon and prints what it says. Does not: touch files itself.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from localrun.cli.arguments import complete_here, explained, next_step, with_settings
from localrun.cli.daemon import ask, base_url, ensure_daemon, for_daemon
from localrun.cli.text import (
    Column,
    TextStyle,
    ago,
    for_stdout,
    one_line,
    painted,
    say,
    size,
    table,
    tell,
    terminal_columns,
    wrapped,
)
from localrun.client import Client
from localrun.config import Settings
from localrun.errors import DaemonUnreachable, LocalrunError, ModelNotFound
from localrun.visible import visible

MAX_MODELFILE_BYTES = 8 * 1024 * 1024


@click.command("list")
@click.argument("prefix", required=False, default="", shell_complete=complete_here)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, as in the daemon's /api/tags.")
@with_settings
def list_command(prefix: str, as_json: bool, settings: Settings) -> None:
    """List the models that can be run, and the adapters that can be used with them (as MODEL+ADAPTER).

    With PREFIX only those whose names begin with it. SIZE is that of the files; `localrun ps` has the memory that
    loaded models take. Model files that cannot be used are reported on stderr, with the reason.
    """
    store = ask(ensure_daemon(settings), lambda client: client.store())
    rows, adapters = (
        [row for row in found if row["name"].lower().startswith(prefix.lower())]
        for found in (store["models"], store.get("adapters", []))
    )
    if as_json:
        print(json.dumps([*rows, *adapters], indent=2))
        return
    print(table(_MODELS, rows))
    if adapters:
        print("\n" + table(_ADAPTERS, adapters))
    for file in store.get("unusable", ()) if not prefix else ():
        path, problem = file["path"], file["problem"]
        tell("not usable", problem if path in problem else f"{path}: {problem}")


def _loaded(row: dict[str, Any]) -> str:
    """A model that has several names runs once, for all of them, under one."""
    if not row.get("loaded"):
        return ""
    return "yes" if row.get("loaded_as") in (None, "", row["name"]) else f"as {row['loaded_as']}"


def _detail(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: str((row.get("details") or {}).get(name) or "-")


_MODELS: list[Column[dict[str, Any]]] = [
    Column("NAME", lambda row: row["name"]),
    Column("ID", lambda row: str(row.get("digest", "")).removeprefix("sha256:")[:12], goes=2),
    Column("SIZE", lambda row: size(row["size"]) if row["size"] else "-", goes=8),
    Column("QUANT", _detail("quantization_level"), goes=6),
    Column("PARAMETERS", _detail("parameter_size"), goes=4),
    Column("CONTEXT", _detail("context_length"), goes=3),
    Column("MODIFIED", lambda row: ago(datetime.fromisoformat(row["modified_at"])), goes=5),
    Column("SOURCE", lambda row: row.get("source") or "-", goes=1),
    Column("LOADED", _loaded, goes=7),
]
_ADAPTERS: list[Column[dict[str, Any]]] = [
    Column("ADAPTER", lambda row: row["name"]),
    Column("KIND", lambda row: row["kind"], goes=5),
    Column("FOR", lambda row: row["architecture"] or "-", goes=6),
    Column("ID", lambda row: row["digest"].removeprefix("sha256:")[:12] or "-", goes=2),
    Column("SIZE", lambda row: size(row["size"]), goes=7),
    Column("RANK", lambda row: str(row["rank"] or "-"), goes=3),
    Column("MODIFIED", lambda row: ago(datetime.fromisoformat(row["modified_at"])), goes=4),
    Column("SOURCE", lambda row: row["source"] or "-", goes=1),
]


@click.command("show")
@click.argument("model", shell_complete=complete_here)
@click.option("--license", is_flag=True, help="Print only the license, all of it.")
@click.option("--modelfile", is_flag=True, help="Print only a Modelfile that creates the same model.")
@click.option("--parameters", is_flag=True, help="Print only the parameters.")
@click.option("--system", is_flag=True, help="Print only the system message.")
@click.option("--template", is_flag=True, help="Print only the chat template.")
@click.option("--verbose", "-v", is_flag=True, help="Print the metadata of the file and all tensors as well.")
@click.option("--fit", "as_fit", is_flag=True, help="Show how MODEL would be loaded here and how much memory it needs.")
@click.option("--draft", metavar="MODEL", shell_complete=complete_here,
              help="With --fit: calculate with this draft model instead of the model's own.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object, as from the daemon's /api/show.")
@with_settings
def show_command(
    model: str, verbose: bool, as_fit: bool, draft: str | None, as_json: bool, settings: Settings, **only: bool
) -> None:
    """Show information about MODEL, or an adapter, without loading it."""
    parts = [name for name, is_wanted in only.items() if is_wanted]
    if len(parts) > 1 or (parts and (as_fit or as_json or verbose)):
        raise click.UsageError(f"--{parts[0]} cannot be combined with other options")
    if draft and not as_fit:
        raise click.UsageError("--draft needs --fit")
    name = for_daemon(model)
    if as_fit:
        fit = ask(ensure_daemon(settings), lambda client: client.fit(name, for_daemon(draft or "")))
        print(json.dumps(fit, indent=2) if as_json else fit_card(fit))
        return
    shown = ask(ensure_daemon(settings), lambda client: client.show(name, verbose=verbose))
    if as_json:
        print(json.dumps(shown, indent=2))
    elif parts:
        print(for_stdout(shown.get(parts[0]) or "").removesuffix("\n"))
        for note in (shown.get("localrun") or {}).get("notes", ()) if parts == ["template"] else ():
            tell("note", note)
    else:
        is_adapter = "kind" in (shown.get("localrun") or {})
        print(adapter_card(shown) if is_adapter else model_card(shown, fit=_fit(settings, name)))


def _fit(settings: Settings, name: str) -> dict[str, Any]:
    """How it would be loaded here; empty if that cannot be told."""
    try:
        return ask(base_url(settings), lambda client: client.fit(name, ""))
    except LocalrunError:
        return {}


@click.command("cp")
@click.argument("source", shell_complete=complete_here)
@click.argument("destination")
@with_settings
def cp_command(source: str, destination: str, settings: Settings) -> None:
    """Give SOURCE, a model or an adapter, a second name, DESTINATION.

    Both names share the files; either can be removed.
    """
    ask(ensure_daemon(settings), lambda client: client.copy(for_daemon(source), destination))
    say(f"copied '{source}' to '{destination}'")


@click.command("rm")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", shell_complete=complete_here)
@with_settings
def rm_command(models: tuple[str, ...], settings: Settings) -> None:
    """Remove each MODEL: its name, and the files that nothing else uses. A loaded model is unloaded first."""
    problems = asyncio.run(_remove(ensure_daemon(settings), models))
    # The last one decides the exit code: that a model is gone already is the least of them.
    problems.sort(key=lambda problem: not isinstance(problem, ModelNotFound))
    for problem in problems[:-1]:
        shown = explained(problem, settings) if isinstance(problem, ModelNotFound) else problem
        tell("error", shown.message)
    if problems:
        raise problems[-1]


async def _remove(base_url: str, models: tuple[str, ...]) -> list[LocalrunError]:
    """Returns what keeps some of them from being removed."""
    problems = []
    async with Client(base_url) as client:
        for model in models:
            try:
                removed = await client.remove(for_daemon(model))
            except DaemonUnreachable:
                raise
            except LocalrunError as error:
                problems.append(error)
                continue
            n_bytes, kept = removed["freed_bytes"], removed["kept"]
            say(f"deleted the name '{model}'" if kept and not n_bytes else f"deleted '{model}', freed {size(n_bytes)}")
            for file in kept:
                say(wrapped(f"  its file {file['path']} stays: {file['reason']}", indent=4))
            for note in removed["notes"]:
                say(wrapped(f"  {note}", indent=4))
    return problems


@click.command("push")
@click.argument("model")
@with_settings
def push_command(model: str, settings: Settings) -> None:
    """Not supported: localrun uploads nothing. Explains how to share MODEL instead."""
    ask(ensure_daemon(settings), lambda client: client.push(model))


@click.command("gc")
@click.option("--all", "is_all", is_flag=True, help="Also delete recently interrupted pulls and recent uploads.")
@with_settings
def gc_command(is_all: bool, settings: Settings) -> None:
    """Delete files that nothing needs: leftovers of programs that were killed, and files without a model."""
    collected = ask(ensure_daemon(settings), lambda client: client.collect_garbage(is_all=is_all))
    for path in collected["deleted"]:
        say(f"deleted {path}")
    print(f"freed {size(collected['freed_bytes'])}")
    if collected["kept_partial_bytes"]:
        kept = size(collected["kept_partial_bytes"])
        print(f"kept {kept} of interrupted pulls, which `localrun pull` resumes; --all deletes them")
    if collected["kept_blobs"]:
        why = "a damaged manifest may name them (localrun list)" if is_all else "recently uploaded; --all deletes them"
        print(f"kept {collected['kept_blobs']} files that no model uses: {why}")


@click.command("create")
@click.argument("model")
@click.option("-f", "--file", "path", type=click.Path(path_type=Path), help="The Modelfile; - reads stdin.")
@click.option(
    "--from", "base", shell_complete=complete_here, help="Instead of a Modelfile: the model or GGUF file to start from."
)
@click.option("-q", "--quantize", metavar="TYPE",
              help="Quantize the weights to TYPE, such as q4_K_M or q8_0 (from F16, BF16 or F32).")  # fmt: skip
@with_settings
def create_command(model: str, path: Path | None, base: str | None, quantize: str | None, settings: Settings) -> None:
    """Create MODEL from a Modelfile (./Modelfile unless -f or --from is given).

    A GGUF file named by FROM is used in place, not copied. The file of an adapter, or a Modelfile with ADAPTER and
    without FROM, gives an adapter a name.
    """
    if path is not None and base is not None:
        raise click.UsageError("give either --file or --from")
    text, folder = (f"FROM {base}", Path.cwd()) if base is not None else _modelfile(path or Path("Modelfile"))
    # The daemon reads it, and answers with the number of the line that is wrong.
    body = {"model": model, "modelfile": text, "modelfile_folder": str(folder), "quantize": quantize or ""}
    url = ensure_daemon(settings)
    asyncio.run(_create(url, body))
    say(ask(url, lambda client: next_step(client, model)))


def _modelfile(path: Path) -> tuple[str, Path]:
    """The text, and the folder that its paths are relative to. Raises click.UsageError."""
    is_stdin = str(path) == "-"
    try:
        # Python reads stdin as the terminal's locale has it.
        with open(sys.stdin.fileno() if is_stdin else path, "rb", closefd=not is_stdin) as file:
            read = file.read(MAX_MODELFILE_BYTES)
        # Windows' editors and shells write UTF-16, and say so.
        encoding = "utf-16" if read.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"
        return read.decode(encoding), Path.cwd() if is_stdin else path.absolute().parent
    except UnicodeDecodeError as error:
        shown = "stdin" if is_stdin else str(path)
        raise click.UsageError(f"cannot read the Modelfile: {shown} is not UTF-8: {error.reason}") from None
    except OSError as error:
        raise click.UsageError(f"cannot read the Modelfile: {path}: {error.strerror}") from None


async def _create(base_url: str, body: dict[str, Any]) -> None:
    progress = _Progress(is_terminal=sys.stdout.isatty())
    try:
        async with Client(base_url) as client, aclosing(client.create(body)) as lines:
            async for said in lines:
                progress.show(said)
    finally:
        progress.end()


class _Progress:
    """Prints what the daemon says. On a terminal, counts of one task overwrite each other; else they are left out."""

    def __init__(self, *, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._status = ""
        self._is_line_open = False

    def show(self, said: dict[str, Any]) -> None:
        status, total = visible(str(said.get("status", ""))), said.get("total") or 0
        if total and self._is_terminal:
            print(f"\r{status}: {100 * (said.get('completed') or 0) // total} %", end="", flush=True)
            self._is_line_open = True
        elif status != self._status:
            self.end()
            say(status)
        self._status = status

    def end(self) -> None:
        if self._is_line_open:
            print()
        self._is_line_open = False


# --- what `/api/show` and `/localrun/v1/fit` say of a model, as text for a person ---

MAX_LICENSE_LINES = 3
_NAME_CHARACTERS = 20
# For a value beside its name.
_LEAST_ROOM = 24
# A line, or a name and what it has.
_Row = str | tuple[str, object]


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


def _bytes(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda use: size(use[f"{name}_bytes"])


_DEVICES: list[Column[dict[str, Any]]] = [
    Column("DEVICE", lambda use: use["name"]),
    Column("LAYERS", lambda use: str(use["layers"]), goes=5),
    Column("WEIGHTS", _bytes("weights"), goes=4),
    Column("KV CACHE", _bytes("kv"), goes=3),
    Column("COMPUTE", _bytes("compute"), goes=1),
    Column("OTHER", _bytes("other"), goes=2),
    Column("TOTAL", _bytes("total")),
    Column("USABLE", _bytes("usable")),
    Column("FREE", _bytes("free"), goes=6),
]


def fit_card(fit: dict[str, Any]) -> str:
    """How a model would be opened here: the choice, a table of devices, and the reasons."""
    blocks = [_choice(fit), table(_DEVICES, fit["devices"]), "\n".join(_notes(fit))]
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
