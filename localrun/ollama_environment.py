"""Ollama's environment variables, where they mean something here, so that what was set up for Ollama goes on working.

They count least: below `localrun.toml`, `LOCALRUN_*` and flags, which were said to localrun itself. A value that Ollama
would not take, or that is unsafe here, is left out and named in the line that the daemon logs at its start (`told`),
for the variables are another program's. Only an address that cannot be used, or that others can reach where there is
no API key, keeps the daemon from starting: ignoring it would leave people waiting for a port that never opens.

`OLLAMA_MODELS` is no setting: the models in that folder are used in place (`models/storage/other_programs.py`).

Pure but for `load` and `told`. Does not: know what a setting does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from localrun import config
from localrun.config import DEFAULT_PORT, ConfigError, LoadSettings, ModelTable, Settings

# Ollama waits for ever at 0.
_FOR_EVER_S = 10 * 365 * 86_400.0
_UNSPECIFIED = ("0.0.0.0", "::")
_MODELS = "OLLAMA_MODELS"

# Why a variable of Ollama's has no effect.
MEANINGLESS: dict[str, str] = {
    "OLLAMA_AUTH": "there are no accounts of ollama.com",
    "OLLAMA_DEBUG_LOG_REQUESTS": "requests are never logged",
    "OLLAMA_EDITOR": "EDITOR and VISUAL name the editor",
    "OLLAMA_FLASH_ATTENTION": "flash attention is used wherever llama.cpp has it",
    "OLLAMA_GO_TEMPLATE": "templates are the models' own, in Jinja",
    "OLLAMA_GPU_OVERHEAD": "the memory that is left free is measured",
    "OLLAMA_IGPU_ENABLE": "GGML_VK_VISIBLE_DEVICES and its like choose devices",
    "OLLAMA_INTEL_GPU": "GGML_VK_VISIBLE_DEVICES and its like choose devices",
    "OLLAMA_LLM_LIBRARY": "`localrun doctor` says which build of llama.cpp is used",
    "OLLAMA_MAX_TRANSFER_STREAMS": "LOCALRUN_PULL_RATE limits downloads",
    "OLLAMA_MAX_VRAM": "LOCALRUN_GPU_LAYERS limits what goes to the GPU",
    "OLLAMA_MULTIUSER_CACHE": "prefixes are shared, except between API keys",
    "OLLAMA_NEW_ENGINE": "llama.cpp is the only engine",
    "OLLAMA_NOHISTORY": "/set nohistory turns the history off",
    "OLLAMA_NOPRUNE": "downloads are always resumed, and `localrun gc` deletes what no model needs",
    "OLLAMA_NO_CLOUD": "there is no cloud",
    "OLLAMA_REMOTES": "there are no remote models",
    "OLLAMA_RUNNERS_DIR": "LOCALRUN_WHEELS names builds of llama.cpp",
    "OLLAMA_SCHED_SPREAD": "CUDA_VISIBLE_DEVICES and its like choose devices",
    "OLLAMA_TMPDIR": "nothing is unpacked at the start",
    "OLLAMA_VULKAN": "`localrun doctor` says which build of llama.cpp is used",
}


class Address(NamedTuple):
    """What OLLAMA_HOST names, read as Ollama reads it. An empty host is every address."""

    scheme: str
    host: str
    port: int


class Taken(NamedTuple):
    """What the variables say: `fields` of the settings, by variable, and why others are `unused`. `problem` is what is
    wrong with the address, where nobody names another."""

    fields: dict[str, dict[str, Any]]
    unused: dict[str, str]
    problem: ConfigError | None = None

    @property
    def values(self) -> dict[str, Any]:
        """All fields."""
        return {field: value for fields in self.fields.values() for field, value in fields.items()}


def address(text: str) -> Address:
    """`host`, `host:port`, `:port`, `[::1]:port`, with or without a scheme and a path. Without a port it is that of the
    scheme, 11434 without one. Raises ConfigError for a port that is none."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "http", text
    default = {"http": 80, "https": 443}.get(scheme, DEFAULT_PORT) if separator else DEFAULT_PORT
    host, port = config.host_and_port(rest.partition("/")[0], "OLLAMA_HOST", least=0)
    return Address(scheme, host, port) if port is not None else Address(scheme, host or "127.0.0.1", default)


def read(environ: Mapping[str, str], *, serves: bool) -> Taken:
    """What the variables say to a daemon that is about to serve, or to its clients, for whom OLLAMA_HOST is where to
    connect."""
    fields: dict[str, dict[str, Any]] = {}
    unused: dict[str, str] = {}
    problem = None
    said = {name: text for name in environ if name.startswith("OLLAMA_") and (text := environ[name].strip(" \t\"'"))}
    for name, text in sorted(said.items()):
        if name == "OLLAMA_HOST":
            try:
                fields[name] = _of_host(text, serves=serves)
            except ConfigError as error:
                problem, unused[name] = error, f"{text[:40]!r} is no address here"
        elif name == "OLLAMA_ORIGINS":
            good, bad = _origins(text)
            if good:
                fields[name] = {"origins": good}
            if bad:
                unused[name] = bad
        elif name in _READERS:
            try:
                fields[name] = {field: config.checked(field, value, name) for field, value in _READERS[name](text)}
            except ConfigError as error:
                unused[name] = str(error).removeprefix(f"{name}: ")
            except ValueError:
                unused[name] = f"{text[:40]!r} is not what it takes here"
            if not fields.get(name, True):
                del fields[name]
                unused[name] = "0 leaves it to localrun"
        elif name in MEANINGLESS:
            unused[name] = MEANINGLESS[name]
    return Taken(fields, unused, problem)


def load(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    serves: bool = False,
    default_port: int = DEFAULT_PORT,
) -> Settings:
    """`config.load` with these variables below everything else. The port is `default_port` where nobody names one.
    Raises ConfigError, also for an address that cannot be meant unless another one is named."""
    taken = read(environ, serves=serves)
    below = {"port": default_port} | taken.values
    if taken.problem is None:
        return config.load(flags, environ, below=below)
    settings = config.load(flags, environ, below=below | {"host": ""})
    if not settings.host:
        raise taken.problem
    return settings


def told(settings: Settings, environ: Mapping[str, str] = os.environ) -> str:
    """One line on the variables that are set: which made the settings what they are, and why others did not. Empty
    where none is set."""
    taken = read(environ, serves=True)
    used: list[str] = []
    unused = dict(taken.unused)
    for name, fields in taken.fields.items():
        counting = [field for field, value in fields.items() if _says(settings, field, value)]
        if counting:
            used.append(f"{name} ({', '.join(_SHOWN.get(field, field) for field in counting)})")
        else:
            unused[name] = "localrun's own settings say otherwise"
    if folder := environ.get(_MODELS, "").strip(" \t\"'"):
        if os.path.isdir(os.path.join(os.path.expanduser(folder), "manifests")):
            used.append(f"{_MODELS} (models that are used in place)")
        else:
            unused[_MODELS] = f"{folder[:200]!r} has no folder 'manifests', which the models of Ollama lie beside"
    parts = [f"taken from Ollama's variables: {', '.join(used)}"] if used else []
    if unused:
        reasons = ", ".join(f"{name} ({reason})" for name, reason in unused.items())
        parts.append(f"not used: {reasons}")
    return "; ".join(parts)


def named_host(settings: Settings, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the address of these settings is OLLAMA_HOST's."""
    return read(environ, serves=True).fields.get("OLLAMA_HOST", {}).get("host") == settings.host


def _says(settings: Settings, field: str, value: Any) -> bool:
    said = getattr(settings, field)
    return set(value) <= set(said) if field == "models" else bool(said == value)


_SHOWN = {"models": "num_ctx of all models"}


def _of_host(text: str, *, serves: bool) -> dict[str, Any]:
    named = address(text)
    host = named.host or "0.0.0.0"
    if not serves:
        if named.scheme == "https" and config.is_loopback(host):
            raise ConfigError(
                "OLLAMA_HOST names an https address of this machine, where a localrun daemon speaks http; write "
                "http://, or use LOCALRUN_HOST and LOCALRUN_PORT, which count before it"
            )
        if host in _UNSPECIFIED:  # where a server listens, but no client can connect to
            host = "::1" if host == "::" else "127.0.0.1"
    fields = {"host": config.checked("host", host, "OLLAMA_HOST")}
    if serves or named.port != DEFAULT_PORT or f":{DEFAULT_PORT}" in text:  # else a client may find another one
        fields["port"] = config.checked("port", named.port, "OLLAMA_HOST")
    return fields


def _origins(text: str) -> tuple[str, str]:
    """Those that may be listed here, and what is wrong with the others."""
    good, problem = [], ""
    for origin in filter(None, (part.strip() for part in text.split(","))):
        try:
            config.origins_of(origin)
            host = urlsplit(origin).hostname
            if host not in ("localhost", "127.0.0.1"):  # these always may
                good.append(origin)
        except (ConfigError, ValueError) as error:
            problem = str(error).removeprefix("origins: ")
    return ",".join(good), problem


def _count(field: str) -> Callable[[str], list[tuple[str, Any]]]:
    """A number; 0 leaves it open."""

    def read_count(text: str) -> list[tuple[str, Any]]:
        number = int(text)
        return [(field, number)] if number else []

    return read_count


def _keep_alive(text: str) -> list[tuple[str, Any]]:
    seconds = _seconds(text)
    return [("keep_alive_s", seconds if seconds >= 0 else -1.0)]


def _load_timeout(text: str) -> list[tuple[str, Any]]:
    seconds = _seconds(text)
    return [("load_timeout_s", seconds if seconds > 0 else _FOR_EVER_S)]


def _seconds(text: str) -> float:
    seconds = config.duration_s(text)
    if seconds is None:
        raise ValueError(text)
    return seconds


def _context_length(text: str) -> list[tuple[str, Any]]:
    try:
        load_settings = msgspec.convert({"num_ctx": int(text)}, LoadSettings)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    return [("models", (ModelTable("*", load_settings),))] if load_settings.num_ctx else []


def _debug(text: str) -> list[tuple[str, Any]]:
    """On for everything but what Go reads as false."""
    return [] if text.lower() in ("0", "f", "false") else [("log_level", "debug")]


_READERS: dict[str, Callable[[str], list[tuple[str, Any]]]] = {
    "OLLAMA_CONTEXT_LENGTH": _context_length,
    "OLLAMA_DEBUG": _debug,
    "OLLAMA_KEEP_ALIVE": _keep_alive,
    "OLLAMA_KV_CACHE_TYPE": lambda text: [("kv_type", text.lower())],
    "OLLAMA_LOAD_TIMEOUT": _load_timeout,
    "OLLAMA_MAX_LOADED_MODELS": _count("max_models"),
    "OLLAMA_MAX_QUEUE": _count("max_queue"),
    "OLLAMA_NUM_PARALLEL": _count("slots"),
}
# For those who hand an environment on.
NAMES = ("OLLAMA_HOST", "OLLAMA_ORIGINS", *_READERS)
