"""Segments of prompts: of inputs that clients write in tokens (a list of ids, or of texts and ids one after the other),
of prompts with markers, which get the pictures and the sound in their places, and of those that ask a model to fill in
the middle, by the FIM tokens that its file names.

    <prefix> text before <suffix> text after <middle>

Files name these tokens by id; older ones under other keys, and some not at all, so that the control tokens of the known
families are looked for. Where there is no token for the middle (Mistral), the suffix comes first.

Pure, but for the file that is read for the texts of the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from localrun.errors import BadRequest, BadTemplate
from localrun.models.gguf.header import Header, special_token_text
from localrun.server.prompting.ask import Attached, Message
from localrun.server.templates.marks import texts_in
from localrun.wire import Media, Segment


def is_one(items: Iterable[Any]) -> bool:
    """Whether a list is one input, and not several: token ids, or texts and token ids."""
    kinds = {type(item) for item in items}
    return int in kinds and kinds <= {int, str}


def segments_of(
    content: str | Iterable[str | int], n_vocab: int, *, field: str, trusted: bool = True
) -> tuple[Segment, ...]:
    """A text, or texts with token ids between them. Raises BadRequest for an id outside the vocabulary."""
    if isinstance(content, str):
        return (Segment(content, trusted),)
    segments: list[Segment] = []
    ids: list[int] = []
    for item in content:
        if isinstance(item, int):
            ids.append(item)
            continue
        if ids:
            segments.append(segment_of(ids, n_vocab, field))
            ids = []
        segments.append(Segment(item, trusted))
    return (*segments, segment_of(ids, n_vocab, field)) if ids else tuple(segments)


def segment_of(tokens: list[int], n_vocab: int, field: str) -> Segment:
    """Raises BadRequest for an id outside the vocabulary."""
    check_ids(tokens, n_vocab, field)
    return Segment("", tokens=tuple(tokens))


def check_ids(tokens: Sequence[int], n_vocab: int, field: str) -> None:
    """Raises BadRequest for an id outside the vocabulary."""
    if (largest := max(tokens)) >= n_vocab:
        raise BadRequest.of(field, f"{largest} is not a token of this model, which has {n_vocab}")


def placed(
    segments: Sequence[Segment], attached: Sequence[Attached], decoded: Mapping[str, Media], messages: Sequence[Message]
) -> tuple[Segment, ...]:
    """The prompt of `messages`. Raises BadTemplate where a template left a marker of theirs out, changed it, or has it
    twice."""
    pattern = re.compile("|".join(one.marker for one in attached))
    fields: dict[str, str] = {one.marker: one.field for one in attached}
    result: list[Segment] = []
    places: list[str] = []
    for segment in segments:
        at = 0
        for found in pattern.finditer(segment.text):
            if found.start() > at:
                result.append(Segment(segment.text[at : found.start()], segment.trusted))
            places.append(found[0])
            result.append(Segment("", media=decoded[found[0]], field=fields[found[0]]))
            at = found.end()
        if at == 0:
            result.append(segment)
        elif at < len(segment.text):
            result.append(Segment(segment.text[at:], segment.trusted))
    told = {found for text in texts_in(list(messages)) for found in pattern.findall(text)}
    for one in attached:
        n_places = places.count(one.marker)
        if n_places != 1 and (n_places or one.marker in told):
            how = "has it more than once" if n_places else "leaves it out"
            raise BadTemplate.of(
                one.field,
                f"the chat template {how}; put it into another message, or use a template that keeps the "
                f"text of messages as it is",
            )
    return tuple(result)


def shown(segments: Sequence[Segment]) -> tuple[str, int]:
    """A prompt as a text for people, as Ollama writes it, and how many pictures and recordings it has."""
    texts: list[str] = []
    n_media = 0
    for segment in segments:
        texts.append(segment.text if segment.media is None else f"[img-{n_media}]")
        n_media += segment.media is not None
    return "".join(texts), n_media


# --- to fill in the middle ---

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
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
    ("[PREFIX]", "[SUFFIX]", ""),
)
_REPOSITORIES = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")
_SEPARATORS = ("<|file_sep|>",)


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
    others = [next((text for text in texts if text in controls), "") for texts in (_REPOSITORIES, _SEPARATORS)]
    for prefix, suffix, middle in _FAMILIES:
        if {prefix, suffix, middle} - {""} <= controls:
            return FimTokens(prefix, suffix, middle, *others)
    return None


def _files(tokens: FimTokens, files: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Other files before the one to complete: behind the model's own separator where it has one."""
    if not files:
        return []
    parts = [(tokens.repository, "repository\n")] if tokens.repository else []
    parts += [(tokens.separator, f"{name}\n{text}\n") for name, text in files]
    return [*parts, (tokens.separator, "")] if tokens.separator else parts
