'''Modelfiles: the text that describes a model to make, in Ollama's format.

    FROM qwen3:0.6b
    PARAMETER temperature 0.2
    SYSTEM """You answer
    in one sentence."""

An instruction is a line; its word may be in any case, `#` begins a comment line. A text in quotes, one or three, may go
over several lines and is taken as it is.

Pure. Does not: look at files, or judge values beyond their kind (creation.py and the daemon do).
'''

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec

from localrun.config import CHOICES, LoadSettings
from localrun.errors import BadRequest, meant
from localrun.models.gguf.reader import Shard, shard_of

MAX_MODELFILE_CHARS = 4 * 1024 * 1024
INSTRUCTIONS = (
    *("FROM", "PROJECTOR", "PARAMETER", "TEMPLATE", "SYSTEM", "MESSAGE", "LICENSE", "ADAPTER", "DRAFT", "REQUIRES"),
)
ROLES = ("system", "user", "assistant")

# What Ollama's own Modelfiles say of how prompts are written and replies are read: here the model's template says it.
LEFT_OUT = ("RENDERER", "PARSER")
_FENCE, _QUOTE = '"""', '"'
_PLAIN = re.compile(r'[^\s"#][^\n"]*')


class Line(NamedTuple):
    """A text of the file, and the number of the line on which its instruction stands, from 1."""

    number: int
    text: str


class Parameter(NamedTuple):
    number: int
    name: str
    text: str


class MessageLine(NamedTuple):
    number: int
    role: str
    text: str


class Modelfile(NamedTuple):
    """What a Modelfile says. `base` is FROM, None in one that only gives an adapter a name; of TEMPLATE, SYSTEM, DRAFT
    and REQUIRES the last one counts. `projector` is PROJECTOR, or a second FROM, as Ollama has it. `left_out` are the
    instructions that have no effect here."""

    base: Line | None
    parameters: tuple[Parameter, ...] = ()
    template: Line | None = None
    system: Line | None = None
    messages: tuple[MessageLine, ...] = ()
    licences: tuple[Line, ...] = ()
    adapters: tuple[Line, ...] = ()
    projector: Line | None = None
    draft: Line | None = None
    requires: Line | None = None
    left_out: tuple[str, ...] = ()


def parse(text: str) -> Modelfile:
    """Raises BadRequest that begins with the number of the line."""
    if len(text) > MAX_MODELFILE_CHARS:
        raise BadRequest(
            f"the Modelfile has {len(text)} characters; the limit is {MAX_MODELFILE_CHARS}", field="modelfile"
        )
    found: dict[str, list[Line]] = {name: [] for name in (*INSTRUCTIONS, *LEFT_OUT)}
    for name, line in _instructions(text):
        found[name].append(line)
    if not found["FROM"] and not found["ADAPTER"]:
        raise BadRequest(
            "the Modelfile has no FROM line, which names the model or the GGUF file to begin with", field="modelfile"
        )
    if not found["FROM"]:
        _check_alone(found)
    found["FROM"].sort(key=lambda line: "mmproj" in line.text.lower())  # Ollama has the two in any order
    base = found["FROM"][0] if found["FROM"] else None
    if base and (first := shard_of(base.text)):  # the others are found by its name
        found["FROM"] = [line for line in found["FROM"] if line is base or not _is_shard_of(first, line.text)]
    projectors = sorted([*found["FROM"][1:], *found["PROJECTOR"]])
    if len(projectors) > 1:
        after = f" (a FROM after that in line {base.number} names the projector)" if base else ""
        fail(
            projectors[1].number,
            f"a second projector; the first is in line {projectors[0].number}, and a model has one{after}",
        )
    return Modelfile(
        base=base,
        parameters=tuple(_parameter(line) for line in found["PARAMETER"]),
        template=_last(found["TEMPLATE"]),
        system=_last(found["SYSTEM"]),
        messages=tuple(_message(line) for line in found["MESSAGE"]),
        licences=tuple(found["LICENSE"]),
        adapters=tuple(found["ADAPTER"]),
        projector=projectors[0] if projectors else None,
        draft=_last(found["DRAFT"]),
        requires=_last(found["REQUIRES"]),
        left_out=tuple(name for name in LEFT_OUT if found[name]),
    )


def _is_shard_of(first: Shard, text: str) -> bool:
    shard = shard_of(text)
    return shard is not None and shard._replace(number=first.number) == first


def _check_alone(found: Mapping[str, Sequence[Line]]) -> None:
    """Of a Modelfile without FROM: it gives an adapter a name."""
    for name, lines in found.items():
        n_fit = 1 if name == "ADAPTER" else len(lines) if name in ("LICENSE", "REQUIRES", *LEFT_OUT) else 0
        if n_fit < len(lines):
            what = "a second ADAPTER" if name == "ADAPTER" else name
            fail(lines[n_fit].number, f"{what}, and there is no FROM; an adapter by itself has nothing but a LICENSE")


def fail(number: int, problem: str) -> NoReturn:
    """Raises the BadRequest for a problem in a line."""
    raise BadRequest(f"line {number} of the Modelfile: {problem}", field="modelfile")


def write(
    *,
    base: str = "",
    projector: str = "",
    adapters: Sequence[str] = (),
    draft: str = "",
    template: str = "",
    parameters: Mapping[str, Any] | None = None,
    system: str = "",
    messages: Sequence[tuple[str, str]] = (),
    licence: str = "",
    requires: str = "",
) -> str:
    """A Modelfile that `parse` reads back, as far as the texts have no three quotes in a row."""
    lines = ["# Modelfile generated by localrun", *([f"FROM {_quoted(base)}"] if base else [])]
    if projector:
        lines.append(f"FROM {_quoted(projector)}")  # which Ollama reads, too
    lines += [f"ADAPTER {_quoted(adapter)}" for adapter in adapters]
    if draft:
        lines.append(f"DRAFT {_quoted(draft)}")
    if template:
        lines.append(f"TEMPLATE {_quoted(template, always=True)}")
    for name, value in (parameters or {}).items():
        for each in value if isinstance(value, list | tuple) else (value,):
            lines.append(f"PARAMETER {name} {_quoted(str(each).lower() if isinstance(each, bool) else str(each))}")
    if system:
        lines.append(f"SYSTEM {_quoted(system, always=True)}")
    lines += [f"MESSAGE {role} {_quoted(text, always=True)}" for role, text in messages]
    if licence:
        lines.append(f"LICENSE {_quoted(licence, always=True)}")
    if requires:
        lines.append(f"REQUIRES {requires}")
    return "\n".join(lines) + "\n"


def _instructions(text: str) -> Iterator[tuple[str, Line]]:
    # Some editors put a byte order mark before the first line, and a carriage return at its end and at all others;
    # in other files a carriage return belongs to its text.
    text = text.removeprefix("\ufeff")
    lines = (text.replace("\r\n", "\n") if text.partition("\n")[0].endswith("\r") else text).split("\n")
    index = 0
    while index < len(lines):
        number, line = index + 1, lines[index].strip()
        index += 1
        if not line or line.startswith("#"):
            continue
        word, rest = _split(line)
        name = word.upper()
        if name not in (*INSTRUCTIONS, *LEFT_OUT):
            way_out = meant(word, INSTRUCTIONS) or f"they are {', '.join(INSTRUCTIONS)}"
            fail(number, f"'{word[:40]}' is no instruction; {way_out}")
        fence = _FENCE if _FENCE in rest else _QUOTE
        before, found, after = rest.partition(fence)
        # What has another quote in the middle of its line is no text in quotes.
        is_text = fence == _FENCE or after.rfind(fence) in (-1, len(after) - 1)
        if is_text := bool(found) and is_text and _may_precede(name, before):
            # The lines as they are, and not stripped: the text in quotes is taken whole.
            after = lines[index - 1].partition(fence)[2]
            last = after
            while not last.rstrip().endswith(fence):
                if fence == _FENCE and fence in last:
                    left = last.rpartition(fence)[2].strip()
                    fail(index, f"'{left[:40]}' stands after the closing quotes; begin a new line")
                if index == len(lines):
                    fail(number, f"{name}: the text in quotes is not closed")
                last = lines[index]
                after += "\n" + last
                index += 1
            # The last ones: the text itself may end in a quote.
            body = after.rstrip()[: -len(fence)]
            rest = f"{before}{_FENCE}{body}"
        if not rest:
            fail(number, f"{name} has no value")
        yield name, Line(number, rest if before.strip() and is_text else _unquoted(rest))


def _may_precede(name: str, before: str) -> bool:
    """Whether what stands before quotes leaves them their meaning: nothing, a role, or a parameter's name."""
    return not before.strip() or (name in ("MESSAGE", "PARAMETER") and len(before.split()) == 1)


def _split(text: str) -> tuple[str, str]:
    """The first word, and what follows it."""
    word, *rest = text.split(None, 1)
    return word, "".join(rest)


def _unquoted(text: str) -> str:
    return text.removeprefix(_FENCE)


def _parameter(line: Line) -> Parameter:
    name, value = _split(line.text)
    if not value:
        fail(line.number, f"PARAMETER {name[:40]} has no value")
    return Parameter(line.number, name.lower(), _unquoted(value))


def _message(line: Line) -> MessageLine:
    role, text = _split(line.text)
    role = role.lower()
    if role not in ROLES:
        fail(line.number, f"MESSAGE: '{role[:40]}' is no role; use {', '.join(ROLES)}")
    if not text:
        fail(line.number, f"MESSAGE {role} has no text")
    return MessageLine(line.number, role, _unquoted(text))


def _last(lines: Sequence[Line]) -> Line | None:
    return lines[-1] if lines else None


def _quoted(text: str, *, always: bool = False) -> str:
    if not always and _PLAIN.fullmatch(text) and text == text.strip():
        return text
    return f"{_FENCE}{text}{_FENCE}"


# --- parameters: Ollama's option names, and what kind of value each one has; the daemon checks their limits ---

_FLOATS = frozenset(
    ("temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
) | {
    *("mirostat_tau", "mirostat_eta", "rope_frequency_base", "rope_frequency_scale"),
    *("dry_multiplier", "dry_base", "top_n_sigma", "xtc_probability", "xtc_threshold"),
    *("dynatemp_range", "dynatemp_exponent"),
}
_INTEGERS = frozenset(("top_k", "repeat_last_n", "seed", "num_predict", "num_keep", "mirostat")) | {
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "draft_num_predict"),
    *("slots", "kv_cells", "yarn_orig_ctx", "dry_allowed_length", "dry_penalty_last_n"),
}
BOOLEAN_PARAMETERS = frozenset(("use_mmap", "speculation"))
WORD_PARAMETERS = {name: CHOICES[name] for name in ("kv_type", "rope_scaling")}
TEXT_PARAMETERS = frozenset(("stop", "dry_sequence_breakers"))
KNOWN_PARAMETERS = _FLOATS | _INTEGERS | BOOLEAN_PARAMETERS | WORD_PARAMETERS.keys() | TEXT_PARAMETERS
# Those that say how the model is loaded, and what the settings call them.
LOAD_PARAMETERS = {"num_gpu": "gpu_layers", "num_thread": "threads"} | {
    name: name
    for name in ("num_ctx", "slots", "kv_cells", "kv_type", "rope_scaling", "rope_frequency_base",
                 "rope_frequency_scale", "yarn_orig_ctx")
}  # fmt: skip
# Names of older releases that no engine reads any more; models that still have them are not refused for it.
RETIRED_PARAMETERS = frozenset(
    ("tfs_z", "penalize_newline", "low_vram", "f16_kv", "vocab_only", "use_mlock", "numa", "num_gqa", "logits_all")
) | {"embedding_only"}

_TRUTH = dict.fromkeys(("true", "1", "t", "on"), True) | dict.fromkeys(("false", "0", "f", "off"), False)


def parameter_value(name: str, text: str) -> Any:
    """A parameter's value from its text; of `stop` one text. Raises BadRequest for a name or a value that is none."""
    if name in TEXT_PARAMETERS or name in RETIRED_PARAMETERS:
        return text
    if name not in KNOWN_PARAMETERS:
        way_out = meant(name, KNOWN_PARAMETERS) or f"they are {', '.join(sorted(KNOWN_PARAMETERS))}"
        raise BadRequest(f"'{name[:40]}' is no parameter; {way_out}", field="parameters")
    if name in WORD_PARAMETERS:
        if text.lower() not in WORD_PARAMETERS[name]:
            choices = ", ".join(WORD_PARAMETERS[name])
            raise BadRequest(f"{name} is '{text[:40]}'; use one of {choices}", field=f"parameters.{name}")
        return text.lower()
    try:
        if name in BOOLEAN_PARAMETERS:
            return _TRUTH[text.lower()]
        number = float(text)
        if not math.isfinite(number):
            raise ValueError
        # Ollama cuts numbers for its integer options, and models rely on it (4096.0).
        return int(number) if name in _INTEGERS else number
    except (KeyError, ValueError, OverflowError):
        kind = "on, off, true or false" if name in BOOLEAN_PARAMETERS else "a number"
        raise BadRequest(f"{name} is '{text[:40]}', which is not {kind}", field=f"parameters.{name}") from None


def normalized_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a request or a registry as they are kept: numbers as numbers, `stop` as a list, retired ones and
    null left out. Raises BadRequest for an unknown name or a value of the wrong kind."""
    kept: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in RETIRED_PARAMETERS or value is None:
            continue
        if name in TEXT_PARAMETERS and isinstance(value, str | list):
            kept[name] = [value] if isinstance(value, str) else value
        elif isinstance(value, bool) and name in BOOLEAN_PARAMETERS:
            kept[name] = value
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            kept[name] = parameter_value(name, str(value))
        else:
            raise BadRequest(f"{name[:40]} has a value of the wrong kind", field=f"parameters.{name[:40]}")
    return kept


def load_settings(parameters: Mapping[str, Any]) -> LoadSettings:
    """What a model's parameters say of how it is loaded. Raises ValueError naming one that is out of range."""
    said = {LOAD_PARAMETERS[name]: value for name, value in parameters.items() if name in LOAD_PARAMETERS}
    try:
        # Registries write numbers in several ways ("40", 40.0).
        return msgspec.convert(said, LoadSettings, strict=False)
    except msgspec.ValidationError as error:
        problem, _, field = str(error).rstrip("`").partition(" - at `$.")
        name = next((name for name, its in LOAD_PARAMETERS.items() if its == field), field)
        raise ValueError(f"{name}: {problem[:1].lower()}{problem[1:]}") from None
