"""`localrun/docs/settings.md`: every setting with its names, default, unit and range, from `config.py`."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from localrun import config, ollama_environment

LOAD_HELP: dict[str, str] = {
    "num_ctx": "tokens that one request has room for at least, prompt and answer; beyond the context that the model "
    "was trained for only with `rope_frequency_scale`",
    "slots": "as the setting",
    "kv_cells": "as the setting, and never fewer than `num_ctx`",
    "kv_type": "as the setting",
    "threads": "as the setting",
    "gpu_layers": "as the setting",
    "batch_tokens": "as the setting",
    "speculation": "as the setting",
    "draft": "the draft model of models that have none of their own: a name, or the path of a GGUF file",
    "adapters": "the adapters of models that have none of their own: names, or paths of GGUF files, each with its "
    "strength after an equals sign if that is not 1",
    "rope_scaling": "how positions beyond the trained context are brought within it: none, linear or yarn",
    "rope_frequency_base": "base of the rotary position embedding; 0 is the model's own",
    "rope_frequency_scale": "context extension (RoPE scaling): 0.25 is four times the trained context, 0 "
    "the model's own",
    "yarn_orig_ctx": "with yarn: the context of the first training; 0 is the model's own",
}

HEAD = """\
# Settings

A setting has one name with three spellings: `kv_cells` in `localrun.toml` in the configuration folder, `--kv-cells` for
`localrun serve`, `LOCALRUN_KV_CELLS` in the environment. (A few variables are shorter; the table has them.) The command
line takes precedence over the environment, the environment over the file, the file over the default. A setting that is
unknown or out of its range is refused by name. The daemon reads them once, when it starts.

| setting | environment | default | unit | range | |
|---|---|---|---|---|---|
"""

TAIL = """
Units follow the names: `_s` is seconds, `_bytes` bytes. In `localrun.toml` numbers are numbers and texts are in quotes:

```toml
slots = 4
latency = "interactive"
disk_cache_bytes = 0
```

## Settings of one model

Tables of `localrun.toml` say how some models are loaded:

```toml
[models."qwen3*"]
num_ctx = 65536
kv_type = "q8_0"

[models."qwen3:0.6b"]
gpu_layers = 0
adapters = ["style", "owner/terse-lora=0.5", "./my-lora.gguf"]
```

The text in quotes is compared with the names that `localrun list` shows, upper and lower case alike; `*` stands for any
text, `?` for one character, `[ab]` for one of these. A name with a dot has to be in quotes. If several tables match,
only the one with the longest text counts, and of two as long the first. What a table does not set is as the model's
Modelfile or the settings above say: [how a model is loaded](models.md#how-a-model-is-loaded).

`adapters` are [adapters](models.md#adapters) by name or path. Relative paths begin in the folder of the settings file.
The daemon does not start with a table that has an unknown setting or a value out of its range. What only shows when a
model is loaded is that model's error.

MODEL_ROWS
## Tiers

A table `[tiers.NAME]` makes NAME a model that chooses between two others: [Tiers](serving.md#tiers).

TIER_ROWS
## Settings that only the environment has

| variable | |
|---|---|
| `LOCALRUN_HOME` | the data, cache, configuration and state folders lie below it ([files.md](files.md)) |
| `LOCALRUN_API_KEY` | the key that localrun's own commands show to daemons ([sharing.md](sharing.md)) |
| `LOCALRUN_WHEELS` | a folder, or the URL of an index, with ready wheels of llama-cpp-python, for installing |
| `LOCALRUN_DEBUG` | `1` shows the whole traceback instead of one line when a command fails |
| `HF_HOME`, `HF_HUB_CACHE` | where the shared cache of hub files lies |
| `HF_ENDPOINT` | another hub than the public one |
| `HF_TOKEN` | the token for gated and private repositories |
| `HF_HUB_OFFLINE` | `1` refuses every download |

## Ollama's variables

The variables with which you have set up Ollama count here, too, where neither the command line, nor a `LOCALRUN_*`
variable, nor `localrun.toml` says anything. When the daemon starts, one line of its log says which of them were taken
and why others were not. Only an address can keep it from starting: one that cannot be read, or one that other machines
can reach while there is no API key.

| variable | |
|---|---|
| `OLLAMA_HOST` | `host` and `port`: `127.0.0.1:8080`, `[::1]`, or with a scheme: `http://localhost` is port 80 |
| `OLLAMA_MODELS` | the models in that folder are listed and used in place; localrun's own are in `models_dir` |
| `OLLAMA_NUM_PARALLEL` | `slots` |
| `OLLAMA_CONTEXT_LENGTH` | `num_ctx` of every model that no table names; at most what the model can take |
| `OLLAMA_KEEP_ALIVE` | `keep_alive_s`: seconds, or a duration such as `1h30m` |
| `OLLAMA_MAX_LOADED_MODELS` | `max_models` |
| `OLLAMA_MAX_QUEUE` | `max_queue` |
| `OLLAMA_LOAD_TIMEOUT` | `load_timeout_s` |
| `OLLAMA_KV_CACHE_TYPE` | `kv_type` |
| `OLLAMA_ORIGINS` | `origins`, without those that would let every web page in |
| `OLLAMA_DEBUG` | `log_level` debug |

`OLLAMA_HOST=0.0.0.0` is what `--host 0.0.0.0` is: the daemon needs an API key to start, and serves other machines over
TLS ([sharing.md](sharing.md)). Commands connect to loopback then. The others mean nothing here:

| variable | why |
|---|---|
OLLAMA_ROWS"""

UNITS = {
    "kv_cells": "tokens",
    "batch_tokens": "tokens",
    "latency": "mode or ms",
    "slots": "requests",
    "max_queue": "requests",
    "max_models": "models",
    "threads": "threads",
    "gpu_layers": "layers",
}


def text() -> str:
    """The page."""
    hints = get_type_hints(config.Settings, include_extras=True)
    defaults = config.Settings()
    rows = [
        f"| `{field}` | `{config.env_name(field)}` | {_default(getattr(defaults, field))} | {_unit(field)} "
        f"| {_range(field, hints[field])} | {config.help_texts()[field].replace('|', chr(92) + '|')} |\n"
        for field in config.FIELDS
    ]
    tail = TAIL.replace("MODEL_ROWS", _model_table()).replace("TIER_ROWS", _tier_table())
    return HEAD + "".join(rows) + tail.replace("OLLAMA_ROWS", _ollama_rows())


def _model_table() -> str:
    hints = get_type_hints(config.LoadSettings, include_extras=True)
    rows = [
        f"| `{field}` | {_range(field, get_args(hints[field])[0])} | {LOAD_HELP[field]} |\n"
        for field in config.LoadSettings.__struct_fields__
    ]
    return "| setting | range | |\n|---|---|---|\n" + "".join(rows)


def _ollama_rows() -> str:
    return "".join(f"| `{name}` | {reason} |\n" for name, reason in ollama_environment.MEANINGLESS.items())


def _tier_table() -> str:
    rows = [f"| `{field}` | {text} |\n" for field, text in config.TIER_HELP.items()]
    return "| setting | |\n|---|---|\n" + "".join(rows)


def _default(value: Any) -> str:
    if value == "":
        return "empty"
    return f"`{value}`"


def _unit(field: str) -> str:
    for suffix, unit in (("_bytes_per_s", "bytes/s"), ("_bytes", "bytes"), ("_s", "seconds")):
        if field.endswith(suffix):
            return unit
    return UNITS.get(field, "")


def _range(field: str, hint: Any) -> str:
    if field in config.CHOICES:
        return ", ".join(config.CHOICES[field])
    if field == "latency":
        return "interactive, balanced, throughput, or up to 60000"
    if get_origin(hint) is not Annotated:
        return ""
    limits = [one for one in get_args(hint)[1:] if isinstance(one, msgspec.Meta)]
    bounds = {"from": "ge", "above": "gt", "to": "le", "below": "lt"}
    said = [f"{word} {value}" for one in limits for word, name in bounds.items()
            if (value := getattr(one, name)) is not None and value < config.UNLIMITED]  # fmt: skip
    return " ".join(said)
