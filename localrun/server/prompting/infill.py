"""Prompts that ask a model to fill in the middle, by the FIM tokens that its file names.

    <prefix> text before <suffix> text after <middle>

Files name the tokens by id; older ones under other keys, and some not at all, so that the control tokens of the known
families are looked for. Where there is no token for the middle (Mistral), the suffix comes first.

Reads the file for the texts of the tokens. Does not: render chat templates; a file to complete is no conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from localrun.errors import BadRequest
from localrun.models.gguf.header import Header, special_token_text
from localrun.wire import Segment

_KEYS = "tokenizer.ggml."
# The key that the converters write now, and those of older files.
_ROLES: dict[str, tuple[str, ...]] = {
    "prefix": ("fim_pre_token_id", "prefix_token_id"),
    "suffix": ("fim_suf_token_id", "suffix_token_id"),
    "middle": ("fim_mid_token_id", "middle_token_id"),
    "repository": ("fim_rep_token_id",),
    "separator": ("fim_sep_token_id",),
}
# (prefix, suffix, middle) of models whose files name none.
_FAMILIES: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]", ""),
)


class FimTokens(NamedTuple):
    """Texts of the tokens; empty for one that the model does not have."""

    prefix: str
    suffix: str
    middle: str
    repository: str = ""
    separator: str = ""


def infill(
    header: Header, prefix: str, suffix: str, *, extra_files: Sequence[tuple[str, str]] = (), field: str = "suffix"
) -> tuple[Segment, ...]:
    """The prompt whose answer stands between `prefix` and `suffix`; `extra_files` are (name, text) of other files.

    Texts are a client's: a control token that they spell stays text. Raises BadRequest naming `field` for a model
    without FIM tokens.
    """
    tokens = fim_tokens(header)
    if tokens is None:
        without = "" if field == "model" else f"leave {field} out, or "
        raise BadRequest.of(field, f"this model cannot fill in the middle; {without}take a model trained for code")
    parts = [*_files(tokens, extra_files)]
    if tokens.middle:
        parts += [(tokens.prefix, prefix), (tokens.suffix, suffix), (tokens.middle, "")]
    else:
        parts += [(tokens.suffix, suffix), (tokens.prefix, prefix)]
    segments = []
    for token, text in parts:
        segments += [Segment(token)] if token else []
        segments += [Segment(text, trusted=False)] if text else []
    return tuple(segments)


def fim_tokens(header: Header) -> FimTokens | None:
    """The tokens of this model; None when it was not trained to fill in."""
    if header not in _known:
        _known[header] = _named(header) or _of_a_family(header)
    return _known[header]


_known: WeakKeyDictionary[Header, FimTokens | None] = WeakKeyDictionary()


def _named(header: Header) -> FimTokens | None:
    texts = {role: _text(header, keys) for role, keys in _ROLES.items()}
    return FimTokens(**texts) if texts["prefix"] and texts["suffix"] else None


def _text(header: Header, keys: Sequence[str]) -> str:
    return next((text for key in keys if (text := special_token_text(header, _KEYS + key))), "")


def _of_a_family(header: Header) -> FimTokens | None:
    controls = frozenset(header.control_tokens())
    for prefix, suffix, middle in _FAMILIES:
        if {prefix, suffix, middle} - {""} <= controls:
            return FimTokens(prefix, suffix, middle)
    return None


def _files(tokens: FimTokens, files: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Other files before the one to complete: behind the model's own separator where it has one."""
    if not files:
        return []
    parts = [(tokens.repository, "repository\n")] if tokens.repository else []
    parts += [(tokens.separator, f"{name}\n{text}\n") for name, text in files]
    return [*parts, (tokens.separator, "")] if tokens.separator else parts
