"""From prompt segments to tokens, with a table of where pictures and sound are; and from sampled tokens to text. Pure.

A chunk of n rows of media takes n *pseudo tokens*: negative numbers made of a hash of all that its rows depend on. So
whoever compares tokens compares media, in cells, in memory and on disk. Nothing below zero ever reaches a vocabulary.
"""

from __future__ import annotations

import codecs
import hashlib
import secrets
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from localrun.engine.backend import Backend, MediaChunk, Projector
from localrun.errors import BadRequest, EngineFailed
from localrun.wire import Count, Segment, Submit


class MediaSpan(NamedTuple):
    """A chunk that begins at token `start` of a prompt. `key` names its rows, `field` where the client put it."""

    start: int
    chunk: MediaChunk
    key: bytes
    field: str = ""

    @property
    def end(self) -> int:
        return self.start + self.chunk.n_tokens


class Prompt(NamedTuple):
    """The tokens of a prompt and its chunks, in order."""

    tokens: list[int]
    chunks: tuple[MediaSpan, ...] = ()


class Vocabulary(Protocol):
    """What makes tokens of texts: a `Backend`, or an embedder."""

    n_vocab: int

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]: ...

    def piece(self, token: int) -> bytes: ...

    def control_text(self, token: int) -> str: ...


def tokens_of(backend: Backend, submit: Submit) -> list[int]:
    """The prompt of a request, whose tokens are all in the vocabulary. Raises BadRequest."""
    if submit.tokens is None:
        return tokenize(backend, submit.segments)
    return _checked(backend, submit.tokens)


def tokenize(backend: Backend, segments: Sequence[Segment], *, is_prompt: bool = True) -> list[int]:
    """Token ids of a text. Only trusted segments may hold control tokens. Raises BadRequest for a segment of tokens
    that are not in the vocabulary.

    To a prompt that begins with text the model's BOS token is put in front when the model wants one and the template
    did not write it.
    """
    tokens = parts_of(backend, segments)
    begins_with_text = not (segments and segments[0].tokens)
    if is_prompt and begins_with_text and backend.bos_token is not None and lacks_bos(backend, tokens):
        tokens.insert(0, backend.bos_token)
    return tokens


def parts_of(vocabulary: Vocabulary, segments: Sequence[Segment]) -> list[int]:
    """Token ids of a text, and nothing put around it. Raises BadRequest as `tokenize`."""
    tokens: list[int] = []
    for segment in segments:
        if segment.tokens:
            tokens += _checked(vocabulary, segment.tokens)
        else:
            tokens += vocabulary.tokenize(segment.text, parse_special=segment.trusted)
    return tokens


def text_of(backend: Vocabulary, token: int) -> bytes:
    """What a token stands for; of a control token its name."""
    return backend.piece(token) or backend.control_text(token).encode()


def pieces(backend: Vocabulary, tokens: Sequence[int], most_bytes: int) -> tuple[bytes, ...]:
    """What each token stands for (`text_of`). Raises BadRequest for more than `most_bytes`."""
    found: list[bytes] = []
    n_bytes = 0
    for token in tokens:
        piece = text_of(backend, token)
        n_bytes += len(piece) + PIECE_OVERHEAD_BYTES
        if n_bytes > most_bytes:
            raise BadRequest(
                f"the texts of {len(tokens)} tokens take more than {most_bytes // 1_000_000} MB, the limit; send fewer",
                field="tokens",
            )
        found.append(piece)
    return tuple(found)


# What a piece takes in a frame besides its bytes.
PIECE_OVERHEAD_BYTES = 8


def _checked(backend: Vocabulary, given: Sequence[int]) -> list[int]:
    tokens = list(given)
    # Not one by one: streams would be without the interpreter for as long as that takes.
    bad = next((end for end in (min(tokens), max(tokens)) if not 0 <= end < backend.n_vocab), None) if tokens else None
    if bad is not None:
        limit = backend.n_vocab - 1
        raise BadRequest(f"token {bad} is not in the vocabulary; ids go from 0 to {limit}", field="prompt")
    return tokens


def lacks_bos(backend: Backend, tokens: Sequence[int]) -> bool:
    """Whether a prompt that begins with these tokens needs the BOS token in front."""
    return backend.bos_token is not None and (not tokens or tokens[0] != backend.bos_token)


class TextStream:
    """Text that may be shown: whole UTF-8 characters, no stop string, nothing taken back.

    A token may be a part of a character, and a stop string may begin in one token and end three tokens later. So text
    is held back for as long as it could still turn into a stop string, and bytes until their character is complete.

    The text of one request. After `stopped` is set, everything is dropped."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        # Invalid bytes become U+FFFD: a model may emit any byte sequence, JSON may not.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._has_part = False  # of a character
        self._held = ""
        self.stopped: str | None = None

    def feed(self, piece: bytes) -> str:
        """The text that this token makes certain. Sets `stopped` to the stop string it completes, if any."""
        if not self._has_part and piece.isascii():
            text = piece.decode("ascii")
        else:
            text = self._decoder.decode(piece)
            self._has_part = bool(self._decoder.getstate()[0])
        return self._advance(text) if self._stop else text

    def ends_at(self, text: str) -> bool:
        """Whether this is a stop string."""
        return text in self._stop

    def finish(self) -> str:
        """What was held back, when no more tokens come; a part of a character is left out."""
        rest, self._held = "" if self.stopped else self._held, ""
        return rest

    def _advance(self, text: str) -> str:
        if not self._stop or self.stopped:
            return "" if self.stopped else text
        text = self._held + text
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:at]
        keep = max(_open_suffix(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _open_suffix(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


_SCHEME = b"localrun media rows 1"
# Of fewer rows the pseudo tokens have too few bits to be sure of what they stand for: they are another request's never.
LEAST_SHARED_TOKENS = 5
_N_PSEUDO_TOKENS = 2**31 - 2  # from -2 down to the smallest int32 but one


def prompt_of(backend: Backend, submit: Submit) -> Prompt:
    """The prompt of a request. Raises BadRequest, or EngineFailed if the projector does not fit the model."""
    if submit.tokens is None and has_media(submit.segments):
        return _with_media(backend, submit.segments, submit.namespace)
    return Prompt(tokens_of(backend, submit))


def count(backend: Backend, message: Count) -> list[int]:
    """The tokens of a text that may have media, whose pixels nobody looks at. Raises as `prompt_of`."""
    if has_media(message.segments):
        return _with_media(backend, message.segments).tokens
    return tokenize(backend, message.segments, is_prompt=message.is_prompt)


def has_media(segments: Sequence[Segment]) -> bool:
    """Whether there is anything but text."""
    return any(segment.media is not None for segment in segments)


def _with_media(backend: Backend, segments: Sequence[Segment], namespace: bytes = b"") -> Prompt:
    """A prompt with media, whose rows are kept for requests of this namespace. Raises as `prompt_of`."""
    pieces = pieces_of(backend.projector, segments)
    begin = pieces[0] if pieces and not isinstance(pieces[0], MediaChunk) else []
    bos = [backend.bos_token] if backend.bos_token is not None and lacks_bos(backend, begin) else []
    return joined(backend.projector, [bos, *pieces], backend.n_vocab, segments, namespace)


def pieces_of(projector: Projector | None, segments: Sequence[Segment]) -> list[list[int] | MediaChunk]:
    """Token ids, and chunks where the media are. Raises BadRequest for media that are not taken."""
    if projector is None:
        raise BadRequest("this model takes text only; load it with a projector (mmproj) for pictures or sound")
    for segment in segments:
        if segment.media is not None and segment.media.kind not in projector.kinds:
            takes = " and ".join(projector.kinds)
            raise BadRequest(f"this model's projector takes {takes}, and no {segment.media.kind}")
    try:
        return projector.tokenize(segments)
    except BadRequest as error:
        raise _naming(projector, segments, error) from None


def joined(
    projector: Projector | None,
    pieces: Sequence[list[int] | MediaChunk],
    n_vocab: int,
    segments: Sequence[Segment] = (),
    namespace: bytes = b"",
) -> Prompt:
    """The pieces as one prompt, whose chunks are of the media of `segments` and are kept for requests of this
    namespace. Raises EngineFailed if the projector does not fit the model."""
    fields = {segment.media: segment.field for segment in reversed(segments)}
    tokens: list[int] = []
    chunks: list[MediaSpan] = []
    for piece in pieces:
        if isinstance(piece, MediaChunk):
            assert projector is not None, "a chunk without a projector"
            key = chunk_key(projector, piece, namespace)
            chunks.append(MediaSpan(len(tokens), piece, key, fields.get(piece.media, "")))
            tokens += _pseudo_tokens(key, piece.n_tokens)
        else:
            if piece and not 0 <= min(piece) <= max(piece) < n_vocab:
                raise EngineFailed(
                    "the projector is not one for this model: it needs tokens that the model does not have"
                )
            tokens += piece
    return Prompt(tokens, tuple(chunks))


def _naming(projector: Projector, segments: Sequence[Segment], error: BadRequest) -> BadRequest:
    """The error of a prompt, as that of the field whose media it is about."""
    for segment in segments:
        if segment.media is not None and segment.field:
            try:
                projector.tokenize([segment])
            except BadRequest as own:
                return BadRequest.of(segment.field, own.message)
    return error


def chunk_key(projector: Projector, chunk: MediaChunk, namespace: bytes = b"") -> bytes:
    """32 bytes that name the rows of a chunk and their places: equal keys mean equal rows."""
    key = hashlib.sha256(_SCHEME)
    for part in (projector.fingerprint, chunk.media.digest, *([namespace] if namespace else [])):
        key.update(len(part).to_bytes(4, "little") + part)
    for number in (chunk.ordinal, chunk.n_tokens, chunk.n_pos, chunk.is_causal):
        key.update(number.to_bytes(8, "little"))
    return key.digest()


def _pseudo_tokens(key: bytes, n_tokens: int) -> list[int]:
    salt = secrets.token_bytes(16) if n_tokens < LEAST_SHARED_TOKENS else b""
    stream = np.frombuffer(hashlib.shake_256(key + salt).digest(4 * n_tokens), "<u4").astype(np.int64)
    tokens: list[int] = (-2 - stream % _N_PSEUDO_TOKENS).tolist()
    return tokens
