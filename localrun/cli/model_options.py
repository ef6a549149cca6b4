"""The options of a request that the user may set by name, as `--option NAME=VALUE` and `/set parameter NAME VALUE`.

Does not: check ranges; the daemon does, and names the option.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from localrun.errors import BadRequest

KINDS: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "typical_p": float,
    "repeat_penalty": float,
    "repeat_last_n": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "mirostat": int,
    "mirostat_tau": float,
    "mirostat_eta": float,
    "seed": int,
    "num_predict": int,
    "num_ctx": int,
    "num_keep": int,
    "stop": list,
}


def set_option(options: dict[str, Any], name: str, text: str) -> None:
    """Put the value that `text` spells into `options`; another `stop` is added to those before.

    Raises BadRequest naming the known options, or the type that the option has.
    """
    kind = KINDS.get(name)
    if kind is None:
        raise BadRequest(f"there is no option {name!r}; the options are {', '.join(KINDS)}")
    if kind is list:
        options[name] = [*options.get(name, []), text]
        return
    try:
        options[name] = kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise BadRequest(f"{name} is {text!r}, which is not {wanted}") from None


def parse_options(assignments: Iterable[str]) -> dict[str, Any]:
    """Options from texts like `temperature=0.5`. Raises BadRequest."""
    options: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise BadRequest(f"{assignment!r} is no option; write NAME=VALUE")
        set_option(options, name.strip(), text)
    return options
