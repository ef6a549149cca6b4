"""Who may import whom. A wall that only a document knows about is gone within a month."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"localrun": ROOT / "localrun", "localrun.models": ROOT / "models", "localrun.tui": ROOT / "tui"}

# Nothing of ours, whoever imports them.
LEAVES = (
    *("localrun.config", "localrun.errors", "localrun.kv_folders", "localrun.processes", "localrun.snapshot"),
    *("localrun.stored", "localrun.visible", "localrun.wire", "localrun.worker_limits"),
)
CONFIG, ERRORS, KV_FOLDERS, PROCESSES, SNAPSHOT, STORED, VISIBLE, WIRE, WORKER_LIMITS = LEAVES
# Processors, the build of llama.cpp, and what was found out about both.
HARDWARE = "localrun.hardware"
CPU_FEATURES = "localrun.hardware.cpu_features"
# Headers of sound files, for the daemon and its clients.
SOUND_HEADERS = "localrun.sound_headers"
NATIVE_BUILD = "localrun.native_build"
FRAMING = "localrun.framing"
ATTACHMENTS = "localrun.attachments"
CLIENT = "localrun.client"
# What the daemon and its clients must agree on to let each other in.
ACCESS = "localrun.access"
CLUSTER = "localrun.cluster"
OLLAMA_ENVIRONMENT = "localrun.ollama_environment"
# Which model to begin with; the terminal interface and the command line agree on it.
LAST_MODEL = "localrun.last_model"
TOOLS = "localrun.tools"

# A package may import itself and these; a name stands for everything below it.
ALLOWED = {
    "localrun.engine": (*(CONFIG, ERRORS, FRAMING, HARDWARE, KV_FOLDERS, PROCESSES, STORED, WIRE, WORKER_LIMITS),),
    "localrun.server": (
        *(CONFIG, ERRORS, FRAMING, HARDWARE, KV_FOLDERS, LAST_MODEL, SNAPSHOT, STORED),
        *(SOUND_HEADERS, VISIBLE, WIRE, ACCESS, OLLAMA_ENVIRONMENT, PROCESSES, WORKER_LIMITS),
        "localrun.models",
    ),
    ACCESS: (CONFIG, ERRORS, STORED, WIRE),
    CLUSTER: (
        *(ACCESS, CONFIG, ERRORS, FRAMING, HARDWARE, OLLAMA_ENVIRONMENT, PROCESSES, SNAPSHOT, STORED, WIRE),
        *("localrun.models", "localrun.server.engines", "localrun.server.jobs"),
    ),
    "localrun.models": (CONFIG, ERRORS, STORED),
    TOOLS: (ATTACHMENTS, ERRORS, STORED, VISIBLE),
    "localrun.tui": (
        ATTACHMENTS,
        CLIENT,
        CONFIG,
        ERRORS,
        LAST_MODEL,
        PROCESSES,
        SNAPSHOT,
        SOUND_HEADERS,
        STORED,
        TOOLS,
        VISIBLE,
    ),
    "localrun.cli": (
        *(ACCESS, ATTACHMENTS, CLIENT, CONFIG, ERRORS, HARDWARE, KV_FOLDERS, LAST_MODEL, OLLAMA_ENVIRONMENT),
        *(PROCESSES, SNAPSHOT, TOOLS, VISIBLE, WIRE),
    ),
    "localrun.bench": (ACCESS, CLIENT, CONFIG, ERRORS, HARDWARE, PROCESSES, SNAPSHOT, WIRE, "localrun.models"),
    # The engine as it is, in a process of its own: a command's.
    "localrun.plan": (
        *(CONFIG, ERRORS, HARDWARE, PROCESSES, SNAPSHOT, STORED, WIRE),
        *("localrun.bench", "localrun.cluster.affinity", "localrun.engine", "localrun.models"),
    ),
    "localrun.service": (CONFIG, ERRORS, OLLAMA_ENVIRONMENT, STORED, PROCESSES, VISIBLE),
    OLLAMA_ENVIRONMENT: (CONFIG,),
    "localrun.doctor": (
        *(CONFIG, ERRORS, HARDWARE, KV_FOLDERS, NATIVE_BUILD, PROCESSES),
        "localrun.models",
    ),
    "localrun.framing": (WIRE,),
    HARDWARE: (STORED,),
    # Before anything is installed: what it imports needs the standard library alone, too.
    NATIVE_BUILD: (CPU_FEATURES,),
    ATTACHMENTS: (ERRORS, SOUND_HEADERS),
    SOUND_HEADERS: (),
    CLIENT: (ACCESS, *LEAVES),
    LAST_MODEL: (CONFIG, ERRORS, STORED),
    "localrun.__main__": ("localrun.cli",),
}
# Only inside functions: a command that does not need them must not wait for them.
ALLOWED_LAZILY = {
    "localrun.cli": (
        CLUSTER,
        "localrun.doctor",
        "localrun.models.catalog",
        "localrun.models.storage",
        "localrun.server.app",
        "localrun.service",
        "localrun.tui.app",
        "localrun.tui.daemon",
        "localrun.bench",
        "localrun.plan",
    ),
    "localrun.engine": ("localrun.models.gguf",),
    "localrun.tui": ("localrun.cli.daemon",),
}

# The engine's rooms, whom they may import beside themselves, and which of their modules are not pure.
ENGINE_ROOMS = {
    "schedule": ("backend", "cache", "request", "sample.text"),
    "cache": ("backend",),
    "sample": ("backend", "request"),
    "speculate": ("backend", "cache.cells", "request", "schedule"),
    "native": ("backend", "request", "sample", "schedule", "speculate", "embedding.inputs"),
    "embedding": ("backend", "encoding", "request", "sample.text", "schedule.policy"),
}
NOT_PURE = {
    *("adapters", "answers", "engine", "process", "pipes", "tools"),
    *("embedding.engine", "native.adapters"),
    *("sample.grammars", "sample.grammar_library", "sample.grammar_worker"),
    *("cache.disk", "cache.disk_files", "speculate.draft_model"),
    *(
        f"native.{name}"
        for name in (
            *("context", "drafters", "embedder", "library", "llama", "media", "model", "pages", "rows", "sampler"),
            *("threads", "worker"),
        )
    ),
}
IMPURE = {
    "asyncio",
    "concurrent",
    "ctypes",
    "multiprocessing",
    "queue",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
}


@dataclass(frozen=True)
class Import:
    """`importer` imports `name`, perhaps inside a function."""

    importer: str
    name: str
    is_lazy: bool


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def module_name(package: str, folder: Path, path: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join([package, *(part for part in parts if part != "__init__")])


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        found.update({module_name(package, folder, path): path for path in sorted(folder.rglob("*.py"))})
    return found


def is_run_later(node: ast.AST) -> bool:
    """A function, or what only type checkers read."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def imports_of(module: str, path: Path) -> Iterator[Import]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    later = [node for node in ast.walk(tree) if is_run_later(node)]
    lazy = {id(inner) for node in later for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]) if base else ".".join(above)
            # `from package import module` imports the module; `from module import name` the module alone.
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(module, name, id(node) in lazy)


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for module, path in modules().items() for found in imports_of(module, path))


def of_ours(package: str) -> Iterator[Import]:
    """Imports of our own modules by a package, except of itself and of `localrun`, which holds the version."""
    for found in imports():
        is_ours = is_within(found.name, "localrun") and found.name != "localrun"
        if is_within(found.importer, package) and is_ours and not is_within(found.name, package):
            yield found


def test_no_modules_import_each_other_in_a_ring():
    """Neither in functions nor for the type checker alone."""
    below: dict[str, set[str]] = {}
    for found in imports():
        if found.name in modules() and found.name != "localrun":
            below.setdefault(found.importer, set()).add(found.name)
    TopologicalSorter(below).prepare()  # raises CycleError, which names the ring


# Folders import those on lower floors alone, also in functions and for the type checker. A folder that holds others is
# on none: its own modules are both what those stand on and what puts them together.
FLOORS = (
    "access bench.workloads engine.cache engine.sample hardware models.builtin models.gguf server.structured",
    "engine.schedule models.storage native_build service tools",
    "engine.embedding engine.speculate models.download server.engines tui.widgets",
    "doctor engine.native server.jobs tui.screens",
    "cluster.on_ray engine.tools server.http",
    "plan",
    "cli.bench server.metering server.native server.templates server.web",
    "server.parsing",
    "server.prompting",
    "server.anthropic server.media server.ollama server.openai.responses",
    "server.batches server.llama_server",
    "server.openapi",
)


def test_folders_stand_on_floors():
    floors = {f"localrun.{folder}": floor for floor, names in enumerate(FLOORS) for folder in names.split()}
    folder_of = {
        module: module if path.name == "__init__.py" else module.rpartition(".")[0]
        for module, path in modules().items()
    }
    folders = set(folder_of.values())
    holding = {folder for folder in folders if any(is_within(other, folder) for other in folders - {folder})}
    assert folders - holding == set(floors)
    arrows = {(folder_of[found.importer], folder_of[found.name]) for found in imports() if found.name in folder_of}
    inside = [arrow for arrow in arrows if arrow[0] != arrow[1] and not holding & set(arrow)]
    assert [arrow for arrow in inside if floors[arrow[0]] <= floors[arrow[1]]] == []


def test_every_module_is_looked_at():
    assert len(modules()) > 60
    assert {"localrun.engine.engine", "localrun.models.storage.store", "localrun.tui.app", "localrun.wire"} <= set(
        modules()
    )
    assert Import("localrun.engine.engine", "localrun.engine.schedule.scheduler", False) in imports()
    assert Import("localrun.engine.native.library", "llama_cpp.llama_cpp", False) in imports()


def test_every_package_has_its_rule():
    tops = {".".join(module.split(".")[:2]) for module in modules()} - {"localrun"}
    assert tops == set(ALLOWED) | set(LEAVES)


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_imports_nothing_of_ours(leaf: str):
    assert list(of_ours(leaf)) == []


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_what_it_may(package: str):
    lazily = ALLOWED_LAZILY.get(package, ())
    wrong = [
        found
        for found in of_ours(package)
        if not any(is_within(found.name, allowed) for allowed in ALLOWED[package])
        and not (found.is_lazy and any(is_within(found.name, allowed) for allowed in lazily))
    ]
    assert wrong == []


def test_only_one_module_imports_llama_cpp():
    assert {found.importer for found in imports() if is_within(found.name, "llama_cpp")} == {
        "localrun.engine.native.library"
    }


def test_only_commands_know_of_clusters_and_few_modules_of_ray():
    outside = [
        found
        for found in imports()
        if is_within(found.name, CLUSTER)
        and not is_within(found.importer, CLUSTER)
        # The choice of a replica is simulated as it is.
        and (found.importer, found.name) != ("localrun.plan.fleet", f"{CLUSTER}.affinity")
    ]
    assert {found.importer.split(".")[1] for found in outside} == {"cli"}
    assert all(found.is_lazy for found in outside)
    assert {found.importer for found in imports() if is_within(found.name, "ray")} == {
        f"{CLUSTER}.on_ray.bridge",
        f"{CLUSTER}.on_ray.nodes",
        f"{CLUSTER}.on_ray.serve_app",
    }
    assert "ray" not in loaded_after("import localrun.cluster.door, localrun.cluster.on_ray.nodes, localrun.server.app")


def test_only_the_modules_for_grammars_import_llguidance():
    loading = {found.importer for found in imports() if is_within(found.name, "llguidance") and not found.is_lazy}
    assert loading == {f"localrun.engine.sample.{name}" for name in ("grammar_library", "grammar_worker", "lexemes")}
    assert "llguidance" not in loaded_after("import localrun.engine.process, localrun.server.app")


def test_only_one_module_imports_mcp_and_only_when_a_server_is_started():
    users = [found for found in imports() if is_within(found.name, "mcp")]
    assert {found.importer for found in users} == {"localrun.tools.servers"}
    assert all(found.is_lazy for found in users)
    loaded = loaded_after("import localrun.tui.app, localrun.cli.run")
    assert not loaded & {"mcp", "mcp_types", "pydantic", "jsonschema", "starlette", "cryptography"}


def test_only_the_entry_points_open_the_real_backend():
    users = {found.importer for found in imports() if found.name == "localrun.engine.native.llama"}
    entries = ("process", "tools.tasks")
    assert users == {f"localrun.engine.{name}" for name in entries}


def test_pure_engine_modules_have_no_clock_no_thread_and_no_native_code():
    impure = {f"localrun.engine.{name}" for name in NOT_PURE}
    pure = {
        name
        for name in modules()
        if is_within(name, "localrun.engine") and not any(is_within(name, other) for other in impure)
    }
    assert {f"localrun.engine.{name}" for name in ("request", "report", "schedule.scheduler", "cache.cache")} <= pure
    wrong = [found for found in imports() if found.importer in pure and found.name.split(".")[0] in IMPURE]
    assert wrong == []
    assert [found for found in imports() if found.importer in pure and found.name in impure and not found.is_lazy] == []


@pytest.mark.parametrize("room", ENGINE_ROOMS)
def test_a_room_of_the_engine_imports_what_it_may(room: str):
    inside = f"localrun.engine.{room}"
    allowed = [inside, *(f"localrun.engine.{name}" for name in ENGINE_ROOMS[room])]
    wrong = [
        found
        for found in imports()
        if is_within(found.importer, inside)
        and is_within(found.name, "localrun.engine")
        and not any(is_within(found.name, name) for name in allowed)
    ]
    assert wrong == []


def test_the_hot_loop_gets_its_clock_from_outside():
    loop = [found for found in imports() if found.importer == "localrun.engine.engine"]
    assert [found for found in loop if found.name.split(".")[0] in IMPURE] == []


def loaded_after(program: str) -> set[str]:
    """Top-level packages that a program has imported when it ends."""
    program = f"import sys\n{program}\nprint('LOADED', *{{name.split('.')[0] for name in sys.modules}})"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(output.stdout.rpartition("LOADED")[2].split())


def test_help_is_not_kept_waiting_by_heavy_imports():
    loaded = loaded_after("from localrun.cli.root import run\nrun(['--help'])")
    assert "localrun" in loaded
    assert not loaded & {"numpy", "gguf", "textual", "starlette", "uvicorn", "httpx2", "llama_cpp", "jinja2"}


def test_the_list_of_gpus_which_each_load_of_a_model_asks_for_waits_for_no_other_imports():
    assert not loaded_after("import localrun.engine.tools.tasks") & {"numpy", "gguf", "psutil", "msgspec", "asyncio"}


def test_the_loop_the_fakes_and_the_planner_run_without_native_libraries():
    loaded = loaded_after("import tests.fakes.process, localrun.engine.engine, localrun.plan.report")
    assert "localrun" in loaded
    assert "llama_cpp" not in loaded
