"""Parameters that a model can bring: Ollama's option names, and what kind of value each one has.

Pure. Does not: know their limits (the daemon checks those), or apply them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localrun.errors import BadRequest

FLOATS = frozenset(
    ("temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
) | {"mirostat_tau", "mirostat_eta"}
INTEGERS = frozenset(("top_k", "repeat_last_n", "seed", "num_predict", "num_keep", "mirostat")) | {
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "draft_num_predict"),
}
BOOLEANS = frozenset(("use_mmap",))
TEXTS = frozenset(("stop",))
KNOWN = FLOATS | INTEGERS | BOOLEANS | TEXTS
# Names of older releases that no engine reads any more; models that still have them are not refused for it.
RETIRED = frozenset(
    ("tfs_z", "penalize_newline", "low_vram", "f16_kv", "vocab_only", "use_mlock", "numa", "num_gqa", "logits_all")
) | {"embedding_only", "rope_frequency_base", "rope_frequency_scale"}

_TRUTH = {"true": True, "1": True, "t": True, "false": False, "0": False, "f": False}


def value_of(name: str, text: str) -> Any:
    """A parameter's value from its text; of `stop` one text. Raises BadRequest for a name or a value that is none."""
    if name in TEXTS or name in RETIRED:
        return text
    if name not in KNOWN:
        raise BadRequest(f"'{name[:40]}' is no parameter; they are {', '.join(sorted(KNOWN))}", field="parameters")
    try:
        if name in BOOLEANS:
            return _TRUTH[text.lower()]
        number = float(text)
        # Ollama cuts numbers for its integer options, and models rely on it (4096.0).
        return int(number) if name in INTEGERS else number
    except (KeyError, ValueError, OverflowError):
        kind = "true or false" if name in BOOLEANS else "a number"
        raise BadRequest(f"{name} is '{text[:40]}', which is not {kind}", field=f"parameters.{name}") from None


def normalized(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a request or a registry as they are kept: numbers as numbers, `stop` as a list, retired ones left
    out. Raises BadRequest for an unknown name or a value of the wrong kind."""
    kept: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in RETIRED:
            continue
        if name in TEXTS and isinstance(value, str | list):
            kept[name] = [value] if isinstance(value, str) else value
        elif isinstance(value, bool) and name in BOOLEANS:
            kept[name] = value
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            kept[name] = value_of(name, str(value))
        else:
            raise BadRequest(f"{name[:40]} has a value of the wrong kind", field=f"parameters.{name[:40]}")
    return kept
