"""Prompts with pictures and sound: from segments to tokens, and a table of where their chunks are. Pure.

A chunk of n rows takes n *pseudo tokens*: negative numbers made of a hash of all that its rows depend on. So whoever
compares tokens compares media, in cells, in memory and on disk. Nothing below zero ever reaches a vocabulary.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np

from localrun.engine.backend import Backend, MediaChunk, Projector
from localrun.engine.request import MediaSpan, Prompt
from localrun.engine.sample.text import lacks_bos, tokenize, tokens_of
from localrun.errors import BadRequest, EngineFailed
from localrun.wire import Count, Segment, Submit

_SCHEME = b"localrun media rows 1"
# Of fewer rows the pseudo tokens have too few bits to be sure of what they stand for: they are another request's never.
LEAST_SHARED_TOKENS = 5
_N_PSEUDO_TOKENS = 2**31 - 2  # from -2 down to the smallest int32 but one


def prompt_of(backend: Backend, submit: Submit) -> Prompt:
    """The prompt of a request. Raises BadRequest, or EngineFailed if the projector does not fit the model."""
    if submit.tokens is None and has_media(submit.segments):
        return read(backend, submit.segments, submit.namespace)
    return Prompt(tokens_of(backend, submit))


def count(backend: Backend, message: Count) -> list[int]:
    """The tokens of a text that may have media, whose pixels nobody looks at. Raises as `prompt_of`."""
    if has_media(message.segments):
        return read(backend, message.segments).tokens
    return tokenize(backend, message.segments, is_prompt=message.is_prompt)


def has_media(segments: Sequence[Segment]) -> bool:
    """Whether there is anything but text."""
    return any(segment.media is not None for segment in segments)


def read(backend: Backend, segments: Sequence[Segment], namespace: bytes = b"") -> Prompt:
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
                return BadRequest(f"{segment.field}: {own.message}", field=segment.field)
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
