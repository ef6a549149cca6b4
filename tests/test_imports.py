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
    *(
        "localrun.config",
        "localrun.cpu_features",
        "localrun.errors",
        "localrun.file_stamp",
        "localrun.kernels",
        "localrun.kv_folders",
        "localrun.library_problems",
    ),
    *(
        "localrun.priority",
        "localrun.private_file",
        "localrun.processes",
        "localrun.snapshot",
        "localrun.thread_choice",
        "localrun.visible",
        "localrun.wire",
        "localrun.worker_limits",
    ),
)
CONFIG, CPU_FEATURES, ERRORS, FILE_STAMP, KERNELS, KV_FOLDERS, LIBRARY_PROBLEMS, *_SOME = LEAVES
PRIORITY, PRIVATE_FILE, PROCESSES, SNAPSHOT, THREAD_CHOICE, VISIBLE, WIRE, WORKER_LIMITS = _SOME
# Headers of sound files, for the daemon and its clients.
SOUND_HEADERS = "localrun.sound_headers"
KERNEL_PROBE = "localrun.kernel_probe"
PROCESSORS = "localrun.processors"
NATIVE_BUILD = "localrun.native_build"
FRAMING = "localrun.framing"
ATTACHMENTS = "localrun.attachments"
CLIENT = "localrun.client"
# What the daemon and its clients must agree on to let each other in.
ACCESS = "localrun.access"
OLLAMA_ENVIRONMENT = "localrun.ollama_environment"
# Which model to begin with; the terminal interface and the command line agree on it.
LAST_MODEL = "localrun.last_model"
TOOLS = "localrun.tools"

# A package may import itself and these; a name stands for everything below it.
ALLOWED = {
    "localrun.engine": (
        *(CONFIG, ERRORS, FILE_STAMP, FRAMING, KV_FOLDERS, LIBRARY_PROBLEMS, PRIORITY, PROCESSES, PROCESSORS),
        *(THREAD_CHOICE, WIRE, WORKER_LIMITS),
    ),
    "localrun.server": (
        *(CONFIG, ERRORS, FILE_STAMP, FRAMING, KERNELS, KV_FOLDERS, LAST_MODEL, LIBRARY_PROBLEMS, SNAPSHOT),
        *(SOUND_HEADERS, THREAD_CHOICE, VISIBLE, WIRE, ACCESS, OLLAMA_ENVIRONMENT, PROCESSES, WORKER_LIMITS),
        "localrun.models",
    ),
    ACCESS: (CONFIG, ERRORS, PRIVATE_FILE, WIRE),
    "localrun.models": (CONFIG, ERRORS, FILE_STAMP),
    TOOLS: (ATTACHMENTS, ERRORS, PRIVATE_FILE),
    "localrun.tui": (
        ATTACHMENTS,
        CLIENT,
        CONFIG,
        ERRORS,
        LAST_MODEL,
        PROCESSES,
        SNAPSHOT,
        SOUND_HEADERS,
        TOOLS,
        VISIBLE,
    ),
    "localrun.cli": (
        *(ACCESS, ATTACHMENTS, CLIENT, CONFIG, ERRORS, KV_FOLDERS, LAST_MODEL, OLLAMA_ENVIRONMENT, PROCESSES),
        *(PROCESSORS, SNAPSHOT, THREAD_CHOICE, TOOLS, VISIBLE, WIRE),
    ),
    "localrun.bench": (
        ACCESS,
        CLIENT,
        CONFIG,
        ERRORS,
        PROCESSORS,
        SNAPSHOT,
        THREAD_CHOICE,
        "localrun.models",
        NATIVE_BUILD,
    ),
    "localrun.service": (CONFIG, ERRORS, OLLAMA_ENVIRONMENT, PRIVATE_FILE, PROCESSES, VISIBLE),
    OLLAMA_ENVIRONMENT: (CONFIG,),
    "localrun.doctor": (
        *(CONFIG, ERRORS, KERNEL_PROBE, KERNELS, KV_FOLDERS, LIBRARY_PROBLEMS, PROCESSES, PROCESSORS, THREAD_CHOICE),
        *("localrun.models", CPU_FEATURES, NATIVE_BUILD),
    ),
    KERNEL_PROBE: (CONFIG, KERNELS, PRIORITY, PROCESSES, "localrun.models"),
    "localrun.framing": (WIRE,),
    PROCESSORS: (CPU_FEATURES,),
    # Before anything is installed: what it imports needs the standard library alone, too.
    NATIVE_BUILD: (CPU_FEATURES,),
    ATTACHMENTS: (ERRORS, SOUND_HEADERS),
    SOUND_HEADERS: (),
    CLIENT: (ACCESS, *LEAVES),
    LAST_MODEL: (CONFIG, ERRORS, PRIVATE_FILE),
    "localrun.__main__": ("localrun.cli",),
}
# Only inside functions: a command that does not need them must not wait for them.
ALLOWED_LAZILY = {
    "localrun.cli": (
        "localrun.doctor",
        "localrun.models.catalog",
        "localrun.models.storage",
        "localrun.models.synthesis.synthesize",
        "localrun.server.app",
        "localrun.service",
        "localrun.tui.app",
        "localrun.tui.recording",
        "localrun.bench",
    ),
    "localrun.engine": ("localrun.models.gguf",),
    "localrun.tui": ("localrun.cli.daemon",),
}

# The engine's rooms, whom they may import beside themselves, and which of their modules are not pure.
ENGINE_ROOMS = {
    "schedule": ("backend", "cache", "request"),
    "cache": ("backend",),
    "sample": ("backend", "request"),
    "speculate": ("backend", "cache.cells", "request", "schedule"),
    "native": ("backend", "request", "sample", "schedule", "speculate", "embedding.inputs"),
    "embedding": (
        "backend",
        "encoding",
        "fake",
        "fake_media",
        "fake_tokens",
        "pipes",
        "request",
        "sample.media",
        "sample.text",
        "schedule.policy",
    ),
}
NOT_PURE = {
    *("adapters", "answers", "encoding", "engine", "process", "pipes", "fake", "fake_engine", "fake_media", "tools"),
    *("embedding.engine", "embedding.fake", "embedding.process", "native.adapters"),
    *(
        "sample.grammars",
        "sample.grammar_library",
        "sample.vocabulary",
        "sample.gbnf",
        "sample.grammar_checker",
        "sample.grammar_worker",
    ),
    "sample.weakening",
    *("cache.disk", "cache.disk_files", "speculate.draft_models"),
    *(
        f"native.{name}"
        for name in (
            "context",
            "draft",
            "embedder",
            "library",
            "llama",
            "media",
            "model",
            "mtp",
            "pages",
            "rows",
            "sampler",
            "worker",
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


def test_only_the_modules_for_grammars_import_llguidance():
    loading = {found.importer for found in imports() if is_within(found.name, "llguidance") and not found.is_lazy}
    assert loading == {
        f"localrun.engine.sample.{name}" for name in ("gbnf", "grammar_library", "lexemes", "vocabulary", "weakening")
    }
    assert "llguidance" not in loaded_after("import localrun.engine.process, localrun.engine.fake, localrun.server.app")


def test_only_one_module_imports_mcp_and_only_when_a_server_is_started():
    users = [found for found in imports() if is_within(found.name, "mcp")]
    assert {found.importer for found in users} == {"localrun.tools.servers"}
    assert all(found.is_lazy for found in users)
    loaded = loaded_after("import localrun.tui.app, localrun.cli.run")
    assert not loaded & {"mcp", "mcp_types", "pydantic", "jsonschema", "starlette", "cryptography"}


def test_only_the_entry_points_open_the_real_backend():
    users = {found.importer for found in imports() if found.name == "localrun.engine.native.llama"}
    entries = ("process", "tools.bare_loop", "tools.thread_rates")
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


def test_the_loop_and_the_fake_run_without_native_libraries():
    loaded = loaded_after("import localrun.engine.process, localrun.engine.fake, localrun.engine.engine")
    assert "localrun" in loaded
    assert "llama_cpp" not in loaded
