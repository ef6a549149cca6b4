"""From prompt segments to tokens, and from sampled tokens to text. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from localrun.engine.backend import Backend
from localrun.errors import BadRequest
from localrun.wire import Segment, Submit


class Vocabulary(Protocol):
    """What makes tokens of texts: a `Backend`, or an embedder."""

    n_vocab: int

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]: ...


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


def text_of(backend: Backend, token: int) -> bytes:
    """What a token stands for; of a control token its name."""
    return backend.piece(token) or backend.control_text(token).encode()


def pieces(backend: Backend, tokens: Sequence[int], most_bytes: int) -> tuple[bytes, ...]:
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

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        rest = self._advance(self._decoder.decode(b"", final=True))
        rest += "" if self.stopped else self._held
        self._held = ""
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
