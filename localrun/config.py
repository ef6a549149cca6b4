"""Settings: defaults < what is `below` < TOML file < `LOCALRUN_*` environment < flags.

One frozen struct, built once at start by whoever owns the process (daemon, CLI, TUI) and passed on. Every limit has its
unit in its name. The field list here is the only list: the TOML keys, the environment names and the documentation are
derived from it (`slots` -> `slots = 8` -> `LOCALRUN_SLOTS=8` -> `--slots 8`).

Tables of the file (`[models."qwen3*"]`) say how some models are loaded; so do Modelfiles and requests, by the same
struct, `LoadSettings`. Other tables (`[tiers.smart]`) make a name stand for a choice between two models.

Does not: create folders, or read anything but the one TOML file.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import re
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
import platformdirs

DEFAULT_PORT = 11434
AUTO_KV_TYPE = "auto"
KV_TYPES = (AUTO_KV_TYPE, "f16", "q8_0", "q4_0")
ROPE_SCALINGS = ("none", "linear", "yarn")
# Adapters of one request, and the strength of each.
MAX_ADAPTERS = 8
MAX_SCALE = 100.0
SCALE = re.compile(r"-?([0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9})")

# More fits in no message between processes; 30 years are for ever.
UNLIMITED = 2**63 - 1
_MAX_FILE_CHARACTERS = 1 << 20
Positive = Annotated[int, msgspec.Meta(ge=1, le=UNLIMITED)]
NonNegative = Annotated[int, msgspec.Meta(ge=0, le=UNLIMITED)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Slots = Annotated[int, msgspec.Meta(ge=1, le=256)]
Threads = Annotated[int, msgspec.Meta(ge=0, le=512)]  # llama.cpp makes no more
GpuLayers = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
BatchTokens = Annotated[int, msgspec.Meta(ge=32, le=16384)]
ContextTokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
RopeBase = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
RopeScale = Annotated[float, msgspec.Meta(ge=0, le=1)]

# Names that differ from `LOCALRUN_` + the field in capitals, because scripts and docs rely on the short form.
_ENV_NAMES = {
    "ram_cache_bytes": "LOCALRUN_RAM_CACHE",
    "disk_cache_bytes": "LOCALRUN_DISK_CACHE",
    "models_dir": "LOCALRUN_MODELS",
    "pull_rate_bytes_per_s": "LOCALRUN_PULL_RATE",
    "key_storage_bytes": "LOCALRUN_KEY_STORAGE",
}


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type or out of range. The message names it and where it came from."""


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one model is loaded. None leaves a field to whoever comes next: a request, the model's own parameters, its
    table in the settings file, the settings for all models. Only tables name `adapters`, as texts for `split_scale`; a
    model with adapters of its own has no others."""

    num_ctx: ContextTokens | None = None
    slots: Slots | None = None
    kv_cells: ContextTokens | None = None
    kv_type: str | None = None
    threads: Threads | None = None
    gpu_layers: GpuLayers | None = None
    batch_tokens: BatchTokens | None = None
    speculation: str | None = None
    draft: str | None = None
    adapters: tuple[str, ...] | None = None
    rope_scaling: str | None = None
    rope_frequency_base: RopeBase | None = None
    rope_frequency_scale: RopeScale | None = None
    yarn_orig_ctx: ContextTokens | None = None

    def over(self, other: LoadSettings) -> LoadSettings:
        """These, and where they say nothing, the other ones."""
        if self == NOTHING_ASKED:
            return other
        missing = {name: getattr(other, name) for name in self.__struct_fields__ if getattr(self, name) is None}
        return msgspec.structs.replace(self, **missing)

    @property
    def rope(self) -> tuple[float | None, float | None, str | None, int | None]:
        """What makes answers differ: base, scale and scaling of the rotary embedding, and yarn's context."""
        return self.rope_frequency_base, self.rope_frequency_scale, self.rope_scaling, self.yarn_orig_ctx

    @property
    def said(self) -> dict[str, Any]:
        """The fields that are not left open."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


NOTHING_ASKED = LoadSettings()


class ModelTable(NamedTuple):
    """What the settings file says of models whose names match `pattern`, with `*`, `?` and `[...]` as in file names."""

    pattern: str
    load: LoadSettings
    file: Path = Path("localrun.toml")

    @property
    def source(self) -> str:
        """How errors begin: the file and the table."""
        return f'{self.file}: [models."{self.pattern}"]'


Size = Literal["small", "large"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
LogProbability = Annotated[float, msgspec.Meta(le=0)]
_TIER_CHOICES = dict.fromkeys(("tools", "schema"), " or ".join(get_args(Size))) | {
    "reasoning_effort": f"{', '.join(get_args(Effort))}, each with {' or '.join(get_args(Size))}"
}


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """A name that stands for two models, and the rules by which a request gets one of them. `TIER_HELP` has what the
    fields mean, server/routing.py the order of the rules. `name` and `file` are of the table itself."""

    name: str
    small: str
    large: str
    reasoning_effort: dict[Effort, Size] = {}
    tools: Size | None = None
    schema: Size | None = None
    prompt_tokens_over: Positive | None = None
    unsure_below: LogProbability | None = None
    file: Path = Path("localrun.toml")

    @property
    def models(self) -> tuple[str, str]:
        return self.small, self.large

    @property
    def source(self) -> str:
        """How errors begin: the file and the table."""
        return f'{self.file}: [tiers."{self.name}"]'

    @property
    def rules(self) -> dict[str, Any]:
        """The models and the rules that are set, as in the file."""
        return {name: value for name in TIER_HELP if (value := getattr(self, name)) not in (None, {})}


TIER_HELP: dict[str, str] = {
    "small": "the model for short and easy requests",
    "large": "the model for all others",
    "reasoning_effort": "which model answers at an effort that the client asks for, such as "
    '`{ low = "small", high = "large" }`',
    "tools": "which model answers requests with tools: small or large",
    "schema": "which model answers requests whose answer has to be JSON, or to match a schema or a grammar: small or "
    "large",
    "prompt_tokens_over": "the large model answers prompts of more tokens, as the small one counts them",
    "unsure_below": "the large model answers when the mean log-probability of the first tokens of the small one's "
    "answer is lower; -0.7 is a probability of a half",
}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. `settings.toml` documents every field that has a flag and a variable; `models` and `tiers` have
    neither."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = DEFAULT_PORT
    slots: Slots = 8
    kv_cells: ContextTokens = 0
    kv_type: str = AUTO_KV_TYPE
    threads: Threads = 0
    gpu_layers: GpuLayers = -1
    cpu_fallback: str = "off"
    batch_tokens: BatchTokens = 512
    latency: str = "balanced"
    max_queue: Positive = 256
    max_models: NonNegative = 3
    default_model: str = ""
    keep_alive_s: float = 300.0
    load_timeout_s: PositiveSeconds = 600.0
    resume: str = "on"
    speculation: str = "on"
    projectors: str = "on"
    ram_cache_bytes: NonNegative = 512 * 1024 * 1024
    disk_cache_bytes: NonNegative = 4 * 1024 * 1024 * 1024
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1024, le=UNLIMITED)] = 32 * 1024 * 1024
    receive_deadline_s: PositiveSeconds = 60.0
    template_timeout_s: PositiveSeconds = 2.0
    template_output_bytes: Positive = 16 * 1024 * 1024
    fetch_images: str = "off"
    strict_schemas: str = "off"
    origins: str = ""
    loopback_needs_key: str = "on"
    key_storage_bytes: NonNegative = 10 * 1024 * 1024 * 1024
    host_names: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    announce: str = "off"
    log_level: str = "info"
    request_log: str = "off"
    models_dir: str = ""
    pull_rate_bytes_per_s: NonNegative = 0
    model_dirs: str = ""
    models: tuple[ModelTable, ...] = ()
    tiers: tuple[Tier, ...] = ()

    def tier(self, name: str) -> Tier | None:
        """The tier that a request's model names, with or without Ollama's `:latest`."""
        return next((tier for tier in self.tiers if _same_name(tier.name, name)), None)

    def table_of(self, name: str) -> ModelTable | None:
        """The file's table for a model: the one with the longest matching pattern counts, of two as long the first, and
        no other."""
        spelt = [name.lower(), name.lower().removeprefix("registry.ollama.ai/"), f"hf.co/{name.lower()}"]
        spelt += [f"{each}:latest" for each in spelt if ":" not in name.rpartition("/")[2]]  # as lists have them
        matching = [table for table in self.models if any(fnmatchcase(each, table.pattern.lower()) for each in spelt)]
        return max(matching, key=lambda table: len(table.pattern)) if matching else None

    def of_model(self, name: str) -> LoadSettings:
        """What that table says."""
        table = self.table_of(name)
        return NOTHING_ASKED if table is None else table.load

    def with_load(self, load: LoadSettings) -> Settings:
        """These settings for a model that is loaded so."""
        said = {name: value for name, value in load.said.items() if name in self.__struct_fields__}
        return msgspec.structs.replace(self, **said) if said else self

    @property
    def plain_kv_type(self) -> str:
        """The type of a KV cache that is not chosen by the memory there is."""
        return "f16" if self.kv_type == AUTO_KV_TYPE else self.kv_type

    @property
    def target_itl_s(self) -> float:
        """The longest inter-token time, in seconds, that a step may cost running streams. 0 means no limit."""
        return latency_target_s(self.latency)


def in_short(name: str) -> str:
    """A model's name without what it need not say: the hub's host, and Ollama's usual tag."""
    return (name.removeprefix("hf.co/") if name.count("/") > 1 else name).removesuffix(":latest")


def _same_name(one: str, other: str) -> bool:
    return in_short(one.lower()) == in_short(other.lower())


@cache
def help_texts() -> dict[str, str]:
    """What each of `FIELDS` means."""
    return tomllib.loads(Path(__file__).with_name("settings.toml").read_text(encoding="utf-8"))


# The settings that have a flag and a variable.
FIELDS = tuple(name for name in Settings.__struct_fields__ if name not in ("models", "tiers"))

_LATENCY_TARGETS_S = {"interactive": 0.045, "balanced": 0.14, "throughput": 0.8}


def latency_target_s(latency: str) -> float:
    """Seconds for a latency mode or a number of milliseconds. Raises ConfigError for anything else."""
    if latency in _LATENCY_TARGETS_S:
        return _LATENCY_TARGETS_S[latency]
    try:
        milliseconds = float(latency)
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds <= 60_000:
        modes = ", ".join(_LATENCY_TARGETS_S)
        raise ConfigError(f"{latency!r} is not a latency; use {modes}, or a number of milliseconds up to 60000")
    return milliseconds / 1000


def split_scale(text: str) -> tuple[str, float]:
    """An adapter of a table and its strength: `style`, `style=0.5`, `/path/to/style.gguf=-1`. Raises ConfigError."""
    name, equals, scale = text.rpartition("=")
    if not equals or text.lower().endswith(".gguf"):
        return text, 1.0
    if not name or not SCALE.fullmatch(scale) or abs(float(scale)) > MAX_SCALE:
        raise ConfigError(
            f"{_shown(text)} has no strength after its equals sign; use a name or a path and a number from "
            f"-{MAX_SCALE:g} to {MAX_SCALE:g}, as in style=0.5"
        )
    return name, float(scale)


class Folders(msgspec.Struct, frozen=True):
    """Where files live. `LOCALRUN_HOME` puts all four under one folder."""

    data: Path
    cache: Path
    config: Path
    state: Path


def folders(environ: Mapping[str, str] = os.environ) -> Folders:
    """The four folders, by `LOCALRUN_HOME` or by the platform's custom. Nothing is created."""
    home = environ.get("LOCALRUN_HOME")
    if home:
        root = Path(home).expanduser().absolute()
        return Folders(root / "data", root / "cache", root / "config", root / "state")
    dirs = platformdirs.PlatformDirs("localrun", appauthor=False)
    return Folders(dirs.user_data_path, dirs.user_cache_path, dirs.user_config_path, dirs.user_state_path)


def models_folder(settings: Settings, environ: Mapping[str, str] = os.environ) -> Path:
    """Where model files are stored."""
    return Path(settings.models_dir).expanduser() if settings.models_dir else folders(environ).data / "models"


def model_dirs(settings: Settings) -> tuple[Path, ...]:
    """Folders that other programs fill with model files."""
    texts = [text for text in settings.model_dirs.split(os.pathsep) if text]
    return tuple(Path(text).expanduser().absolute() for text in texts)


_OTHER_VARIABLES = ("LOCALRUN_HOME", "LOCALRUN_API_KEY", "LOCALRUN_DEBUG", "LOCALRUN_WHEELS")


def env_name(field: str) -> str:
    """The environment variable of a field."""
    return _ENV_NAMES.get(field, f"LOCALRUN_{field.upper()}")


def slips(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that are no setting's, and the one that each seems to mean."""
    known = {*map(env_name, FIELDS), *_OTHER_VARIABLES}
    others = (name for name in environ if name.startswith("LOCALRUN_") and name not in known)
    found = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.85) for name in others}
    return {name: alike[0] for name, alike in found.items() if alike}


def load(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    below: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings from all sources. `flags` are those the user gave; None values are left out. `below` are checked fields
    that count only where no other source says anything.

    Raises ConfigError naming the setting and its source.
    """
    values: dict[str, Any] = dict(below or {})
    from_file = _from_toml(folders(environ).config / "localrun.toml")
    if below and "models" in below and "models" in from_file:
        from_file["models"] = (*from_file["models"], *below["models"])
    values.update(from_file)
    for field in FIELDS:
        text = environ.get(env_name(field))
        # A Kubernetes service that is called localrun sets LOCALRUN_PORT to its own address in every pod.
        if text is not None and text.strip() and not (field == "port" and text.startswith("tcp://")):
            values[field] = checked(field, _parse(field, text.strip(), env_name(field)), env_name(field))
    for field, value in (flags or {}).items():
        if value is not None:
            values[field] = checked(field, value, "--" + field.replace("_", "-"))
    return Settings(**values)


LOG_LEVELS = ("debug", "info", "warning", "error")
_SWITCH = ("on", "off")
CHOICES = {
    "kv_type": KV_TYPES,
    "log_level": LOG_LEVELS,
    "request_log": ("off", "text", "json"),
    "cpu_fallback": _SWITCH,
    "resume": _SWITCH,
    "speculation": _SWITCH,
    "projectors": _SWITCH,
    "fetch_images": _SWITCH,
    "strict_schemas": _SWITCH,
    "loopback_needs_key": _SWITCH,
    "announce": _SWITCH,
    "rope_scaling": ROPE_SCALINGS,
}


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        if os.path.realpath(path) == os.path.realpath(os.devnull):  # a way to have none
            return {}
        if path.exists() and not path.is_file():  # a device may never end, and a pipe waits for a writer
            raise OSError("it is not a regular file")
        with path.open(encoding="utf-8-sig") as file:  # editors on Windows leave a mark at its beginning
            text = file.read(_MAX_FILE_CHARACTERS)
            if file.read(1):
                raise OSError(f"it has more than {_MAX_FILE_CHARACTERS} characters")
        table = tomllib.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:  # no TOML, no UTF-8, or a number of thousands of digits
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: lists or tables lie within each other too deeply") from None
    tables, tiers = table.pop("models", {}), table.pop("tiers", {})
    unknown = sorted(set(table) - set(FIELDS))
    if unknown:
        raise ConfigError(f"{path}: unknown setting {_shown(unknown[0])}; the settings are {', '.join(FIELDS)}")
    values = {field: checked(field, value, str(path)) for field, value in table.items()}
    values |= {"models": _model_tables(tables, path)} if tables else {}
    return values | ({"tiers": _tiers(tiers, path)} if tiers else {})


def _model_tables(tables: Any, path: Path) -> tuple[ModelTable, ...]:
    """Raises ConfigError naming the file, the table and the key."""
    hint = 'write [models."PATTERN"] with one setting a line below it'
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: models is {_shown(tables)}, which is not a table; {hint}")
    found = []
    for pattern, table in tables.items():
        if not pattern or _CONTROL.search(pattern) or len(pattern) > _MAX_PATTERN_CHARS:
            raise ConfigError(
                f"{path}: [models.{_shown(pattern)}] is for no model: its name is empty, has a control character in it "
                f"or more than {_MAX_PATTERN_CHARS} characters; {hint}, where * is for all models"
            )
        source = ModelTable(pattern, NOTHING_ASKED, path).source
        if not isinstance(table, dict):
            raise ConfigError(f"{source} is {_shown(table)}, which is not a table; {hint}")
        unknown = sorted(set(table) - set(LoadSettings.__struct_fields__))
        if unknown and isinstance(table[unknown[0]], dict):
            whole = f"{pattern}.{unknown[0]}"
            whole = "PATTERN" if len(whole) > _MAX_SHOWN or _CONTROL.search(whole) else whole
            raise ConfigError(
                f"{source}: {_shown(unknown[0])} is a table within it; a name with a dot has to be in quotes: "
                f'[models."{whole}"]'
            )
        if unknown:
            known = ", ".join(LoadSettings.__struct_fields__)
            raise ConfigError(f"{source}: unknown setting {_shown(unknown[0])}; a model's settings are {known}")
        said = {field: checked(field, value, source, _LOAD_HINTS) for field, value in table.items()}
        found.append(ModelTable(pattern, LoadSettings(**said), path))
    return tuple(found)


_TIER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?")


def _tiers(tables: Any, path: Path) -> tuple[Tier, ...]:
    """Raises ConfigError naming the file, the table and the key. That the models are here is a request's to see."""
    hint = "write [tiers.NAME] with small, large and its rules below it, one a line"
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: tiers is {_shown(tables)}, which is not a table; {hint}")
    found = list[Tier]()
    for name, table in tables.items():
        source = f"{path}: [tiers.{_shown(name)}]"
        if not _TIER_NAME.fullmatch(name):
            raise ConfigError(f"{source}: this cannot be a model's name; use letters, digits, '.', '_' and '-'")
        if any(_same_name(name, other.name) for other in found):
            raise ConfigError(f"{source}: this name is there twice; requests do not tell upper from lower case")
        source = Tier(name=name, small="", large="", file=path).source
        if not isinstance(table, dict):
            raise ConfigError(f"{source} is {_shown(table)}, which is not a table; {hint}")
        unknown = sorted(set(table) - set(TIER_HELP))
        if unknown:
            known = ", ".join(TIER_HELP)
            raise ConfigError(f"{source}: unknown setting {_shown(unknown[0])}; those of a tier are {known}")
        said = {field: checked(field, value, source, _TIER_HINTS) for field, value in table.items()}
        for size in ("small", "large"):
            if not said.get(size) or _CONTROL.search(said[size]):
                raise ConfigError(f"{source}: {size} has to be the name of a model, as `localrun list` shows it")
        if _same_name(said["small"], said["large"]):
            raise ConfigError(f"{source}: small and large are both {_shown(said['small'])}; name two models")
        found.append(Tier(name=name, file=path, **said))
    for tier in found:
        for size, model in (("small", tier.small), ("large", tier.large)):
            if any(_same_name(model.partition("+")[0], other.name) for other in found):
                raise ConfigError(
                    f"{tier.source}: {size} is {_shown(model)}, which is a tier itself; name a model, or call the tier "
                    f"something else"
                )
    return tuple(found)


_MAX_SHOWN = 200
_MAX_PATTERN_CHARS = 4_096  # no name and no path is longer
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def _check_texts(texts: tuple[str, ...]) -> None:
    """Those of `adapters`. Raises ConfigError."""
    if len(texts) > MAX_ADAPTERS:
        raise ConfigError(f"{len(texts)} adapters; the limit is {MAX_ADAPTERS}")
    names = [split_scale(text)[0] for text in texts]
    for index, name in enumerate(names):
        if not name or _CONTROL.search(name):
            raise ConfigError(f"{_shown(name)} is empty or has a control character in it; use a name or a path")
        if name in names[:index]:
            raise ConfigError(f"{_shown(name)} appears twice; leave one out")


def _shown(value: Any) -> str:
    """As errors quote it: on one line, and short."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or nested without end
        return f"a huge {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


_HINTS = get_type_hints(Settings, include_extras=True)
_LOAD_HINTS = get_type_hints(LoadSettings, include_extras=True)
_TIER_HINTS = get_type_hints(Tier, include_extras=True)


def _parse(field: str, text: str, source: str) -> Any:
    hint = _HINTS[field]
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if plain is str:
        return text
    try:
        return plain(text)
    except ValueError:
        raise ConfigError(f"{source}: {field} is {text!r}, which is not of type {plain.__name__}") from None


_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_DURATION = re.compile(rf"(?P<sign>[+-]?)(?P<parts>(?:{_PART.pattern})+)", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)
MAX_DURATION_CHARACTERS = 64


def duration_s(text: str) -> float | None:
    """Seconds of a duration as Ollama writes them: a number of seconds, or Go's form ("5m", "1h30m", "-1s", "300ms").
    None for anything else."""
    text = text.strip()
    if len(text) > MAX_DURATION_CHARACTERS:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    total_s = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(match["parts"]))
    return -total_s if match["sign"] == "-" else total_s


def origins_of(text: str) -> frozenset[str]:
    """The browser origins of the setting `origins`. Raises ConfigError naming one that is none."""
    origins = frozenset(part.strip().rstrip("/").lower() for part in text.split(",") if part.strip())
    # `scheme://*` loses its slashes to rstrip only when the star is missing; such an entry is caught here.
    for origin in origins:
        scheme, separator, rest = origin.partition("://")
        if not (scheme and separator and rest) or "/" in rest or ("*" in rest and rest != "*"):
            raise ConfigError(
                f"origins: {origin!r} is not an origin; write scheme://host or scheme://host:port, or scheme://* for "
                f"all of a scheme such as chrome-extension"
            )
        if rest == "*" and scheme in ("http", "https"):
            raise ConfigError(f"origins: {origin!r} would let every web page in; name the pages' hosts")
    return origins


_HOST_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*", re.ASCII | re.IGNORECASE)


def _is_host(text: str) -> bool:
    """Whether it can stand in a URL."""
    if ":" not in text:
        return _HOST_NAME.fullmatch(text) is not None
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return "%" not in text


def host_and_port(text: str, source: str, *, least: int = 1) -> tuple[str, int | None]:
    """Of `studio.local`, `studio.local:8443`, `[::1]:8443`, `::1`; None where no port is named. Raises ConfigError."""
    try:
        return str(ipaddress.ip_address(text.strip("[]"))), None
    except ValueError:
        host, colon, port = text.rpartition(":")
    if not colon:
        return text, None
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and least <= int(port) <= 65535):
        raise ConfigError(f"{source}: {_shown(port)} is not a port; use a number from 1 to 65535")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether it is this machine's own, by its name or its address."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked(field: str, value: Any, source: str, hints: Mapping[str, Any] = _HINTS) -> Any:
    """The value of a field. Raises ConfigError naming the field and the source for one that it cannot have."""
    written = value
    try:
        value = msgspec.convert(written, hints[field])
        if field == "latency":
            latency_target_s(value)
        elif field == "adapters":
            _check_texts(value)
        elif field == "draft" and _CONTROL.search(value):
            raise ConfigError("there is a control character in it; leave it out")
    except (msgspec.ValidationError, ConfigError, OverflowError) as error:
        way_out = f"; use {_TIER_CHOICES[field]}" if field in _TIER_CHOICES else ""
        raise ConfigError(f"{source}: {field} is {_shown(written)}: {error}{way_out}") from None
    if field == "host" and not _is_host(value):
        raise ConfigError(
            f"{source}: host is {_shown(value)}; use a host name or an IP address, without scheme and port"
        )
    if field == "host_names":
        for name in filter(None, map(str.strip, value.split(","))):
            if not _is_host(name.rstrip(".")):
                raise ConfigError(
                    f"{source}: host_names has {_shown(name)}; use names such as studio.local, with commas"
                )
    choices = CHOICES.get(field)
    if choices and value not in choices:
        raise ConfigError(f"{source}: {field} is {_shown(value)}; use one of {', '.join(choices)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{source}: {field} is {value}, which is not a finite number")
    return value
