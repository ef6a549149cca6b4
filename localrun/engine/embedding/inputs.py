"""From an input to the tokens that are computed for it: affixes, pairs, and the rules of truncation. Pure.

A text is tokenized as llama.cpp's server does it for embeddings: the text of a control token is that token, for there
is nobody to be misled by it. A query and a document are plain text whatever they say; only the template of the pair may
hold control tokens.

What is cut is the end: of a text, before its affixes; of a pair, the document's. An input with media is never cut.
Texts far beyond any context are cut before they are tokenized, so that one request does not hold up the others.

Does not: decide whether cutting is allowed; the request says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import Batch, MediaChunk, MediaRows, Projector
from localrun.engine.request import check_chunks
from localrun.engine.sample.text import MediaSpan, has_media, joined, parts_of, pieces_of
from localrun.errors import BadRequest, ContextExceeded, LocalrunError, by_code
from localrun.wire import Mixed, Pooling, Segment

FloatVector = NDArray[np.float32]  # [n_embd]
FloatMatrix = NDArray[np.float32]  # of a media chunk: [n_tokens, n_embd_input]


class PairFormat(NamedTuple):
    """How a reranker wants a query and a document as one text: by a `template` with `{query}` and `{document}`, or as
    tokens `before`, the query, `between`, the document, `after`."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    template: str | None = None


class Embedder(Protocol):
    """What the embedding engine needs from the thing that computes: `embedder.LlamaEmbedder`, or a fake in tests.

    An embedder owns one context. A step fills the first rows of `batch`, computes them, and reads one vector for each
    sequence that had rows. Where `can_split`, a sequence may go on in the next step; else all of its rows must be in
    one.

    Invariant: what comes out for a sequence does not depend on the others of the step, but for the last bits of a
    float.
    Does not: know requests, normalise, or decide what goes into a step (`engine.py`).

    `n_ctx` is the most tokens of one input, `n_rows` what a step should not exceed for the sake of
    others; only one input that must be computed whole may, or a chunk whose rows see each other. `affixes` are what
    the model puts around a text. `projector` is None for a model that takes only text, as all do that read in both
    directions.
    """

    name: str
    pooling: Pooling
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    n_rows: int
    n_seqs: int
    n_cells: int
    n_threads: int
    n_gpu_layers: int
    model_size_bytes: int
    can_split: bool
    batch: Batch
    control_tokens: tuple[str, ...]
    affixes: tuple[tuple[int, ...], tuple[int, ...]]
    pair_format: PairFormat

    def tell(self, ring: Callable[[], None]) -> None:
        """From now on `ring`, in any thread, when an encoding is over."""

    @property
    def projector(self) -> Projector | None: ...

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Token ids of a text, without `affixes`."""

    def piece(self, token: int) -> bytes:
        """What a token stands for; empty for a control token."""

    def control_text(self, token: int) -> str:
        """The name of a control token; empty for any other."""

    def compute(self, n_rows: int) -> None:
        """Compute the first rows of `batch`. Raises NoRoom or DecodeFailed."""

    def set_chunks(self, seq: int, chunks: tuple[tuple[int, MediaChunk], ...]) -> None:
        """Where the chunks of an empty sequence will be."""

    def compute_media(self, part: MediaRows) -> None:
        """Compute rows of a chunk, and nothing else. Raises as `compute`."""

    def vector(self, seq: int) -> FloatVector:
        """A copy of what pooling made of the rows that `seq` had in the last call."""

    def forget(self, seq: int) -> None:
        """Empty a sequence, which has no chunks then."""

    def wipe(self) -> None:
        """Empty all sequences and write zeros into their cells. What is no number stays in a cell when its sequence is
        gone, and spoils what others compute, though it is masked for them: kernels multiply it by 0."""

    def close(self) -> None:
        """Free everything."""


# Real tokens have a handful of characters; only runs of spaces have many.
_MOST_CHARACTERS_PER_TOKEN = 256


class InputTokens(NamedTuple):
    """`n_cut` tokens were left out. For a pair, and for a text that is far too long, that is at least so many. Those of
    media, in `chunks`, are none of the vocabulary's."""

    tokens: list[int]
    n_cut: int = 0
    chunks: tuple[MediaSpan, ...] = ()


def tokens_of(
    embedder: Embedder, content: str | tuple[int, ...] | Mixed, *, query: str | None, truncate: bool, where: str
) -> InputTokens:
    """The tokens of one input, at least one and at most `n_ctx`. `where` names it in errors.

    Raises BadRequest for an input that is empty or holds a token that is none and for media that are not taken,
    ContextExceeded for one that is too long and must not be cut.
    """
    if isinstance(content, Mixed):
        return _of_segments(embedder, content.segments, where)
    if isinstance(content, tuple):
        found = _of_ids(embedder, content, where)
    elif query is None:
        found = _of_text(embedder, content)
    else:
        found = _of_pair(embedder, query, content)
    if not found.tokens:
        raise BadRequest(f"{where} is empty; send a text", field="input")
    if found.n_cut and not truncate:
        raise too_long(len(found.tokens) + found.n_cut, embedder.n_ctx, where)
    return found


def too_long(n_tokens: int, n_ctx: int, where: str) -> LocalrunError:
    """An input that does not fit: both numbers, and the ways out."""
    return by_code(
        ContextExceeded.code,
        # Clients of llama-server look for "too large", and then split the text.
        f"{where} is too large: it has {n_tokens} tokens, and this model reads {n_ctx} at once here; send it in "
        f'shorter parts, or let it be cut ("truncate": true)',
    )


def located(message: str, where: str, fields: Iterable[str]) -> str:
    """A message with the place that it is about, unless it begins with one of these fields, which say more."""
    is_located = any(field and message.startswith(f"{field}: ") for field in fields)
    return message if is_located else f"{where}: {message}"


def _of_segments(embedder: Embedder, segments: tuple[Segment, ...], where: str) -> InputTokens:
    """A chat template, or a client that sends token ids, may have written the affixes already. Only the sizes of media
    are read."""
    try:
        pieces = _pieces(embedder, segments)
    except LocalrunError as error:
        raise by_code(error.code, located(error.message, where, (one.field for one in segments))) from None
    (before, after), first, last = map(list, embedder.affixes), pieces[:1], pieces[-1:]
    begins, ends = ([bool(one.tokens) for one in some] for some in (segments[:1], segments[-1:]))
    if any(begins) or (first and isinstance(first[0], list) and first[0][: len(before)] == before):
        before = []
    if any(ends) or (after and last and isinstance(last[0], list) and last[0][-len(after) :] == after):
        after = []
    prompt = joined(embedder.projector, [before, *pieces, after], embedder.n_vocab, segments)
    check_chunks(prompt.chunks, embedder.batch.capacity, where)
    if len(prompt.tokens) > embedder.n_ctx:
        n_media = sum(span.chunk.n_tokens for span in prompt.chunks)
        raise by_code(
            ContextExceeded.code,
            f"{where} has {len(prompt.tokens)} tokens, {n_media} of them of pictures or sound, but this model reads "
            f"{embedder.n_ctx} at once here; send fewer or smaller ones, or less text, which is never cut here",
        )
    return InputTokens(prompt.tokens, chunks=prompt.chunks)


def _pieces(embedder: Embedder, segments: tuple[Segment, ...]) -> list[list[int] | MediaChunk]:
    if has_media(segments):
        return pieces_of(embedder.projector, segments)
    return [parts_of(embedder, segments)]


def _of_ids(embedder: Embedder, ids: tuple[int, ...], where: str) -> InputTokens:
    wrong = next((token for token in ids if not 0 <= token < embedder.n_vocab), None)
    if wrong is not None:
        raise BadRequest(f"{where}: {wrong} is not a token of this model, which has {embedder.n_vocab}", field="input")
    return InputTokens(list(ids[: embedder.n_ctx]), max(0, len(ids) - embedder.n_ctx))


def _of_text(embedder: Embedder, text: str) -> InputTokens:
    before, after = embedder.affixes
    tokens = embedder.tokenize(_bounded(embedder, text), parse_special=True)
    room = max(0, embedder.n_ctx - len(before) - len(after))
    return InputTokens([*before, *tokens[:room], *after], max(0, len(tokens) - room))


def _of_pair(embedder: Embedder, query: str, document: str) -> InputTokens:
    """The longest beginning of the document that fits, found by bisection: cutting tokens would cut the template."""
    document = _bounded(embedder, document)
    whole = _pair(embedder, query, document)
    if len(whole) <= embedder.n_ctx:
        return InputTokens(whole, 0)
    best = _pair(embedder, query, "")
    if len(best) > embedder.n_ctx:
        raise too_long(len(best), embedder.n_ctx, "query")
    low, high = 0, len(document) - 1
    while low < high:
        middle = (low + high + 1) // 2
        tokens = _pair(embedder, query, document[:middle])
        if len(tokens) <= embedder.n_ctx:
            best, low = tokens, middle
        else:
            high = middle - 1
    return InputTokens(best, len(whole) - len(best))


def _pair(embedder: Embedder, query: str, document: str) -> list[int]:
    form = embedder.pair_format
    if form.template is not None:
        return _from_template(embedder, form.template, query, document)
    return [
        *form.before,
        *embedder.tokenize(query, parse_special=False),
        *form.between,
        *embedder.tokenize(document, parse_special=False),
        *form.after,
    ]


def _from_template(embedder: Embedder, template: str, query: str, document: str) -> list[int]:
    """Control tokens of the template stand by themselves, and the text between them is filled in and tokenized as
    plain text: the same tokens as those of the whole text, as long as the filled in text names no control token."""
    control = [re.escape(text) for text in embedder.control_tokens if text]
    pieces = re.split(f"({'|'.join(control)})", template) if control else [template]
    tokens: list[int] = []
    for at, piece in enumerate(pieces):
        is_control = at % 2 == 1
        text = piece if is_control else _filled(piece, query, document)
        if text:
            tokens += embedder.tokenize(text, parse_special=is_control)
    return tokens


def _filled(text: str, query: str, document: str) -> str:
    """In one pass: a document that says `{query}` is left alone."""
    values = {"{query}": query, "{document}": document}
    return re.sub(r"\{query\}|\{document\}", lambda found: values[found.group()], text)


def _bounded(embedder: Embedder, text: str) -> str:
    return text[: embedder.n_ctx * _MOST_CHARACTERS_PER_TOKEN]
