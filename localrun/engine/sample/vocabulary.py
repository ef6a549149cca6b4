"""A model's vocabulary as llguidance wants it, which takes a while to import."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from llguidance import LLTokenizer, TokenizerWrapper

# Marks a token that no text of a grammar can match, only its number.
_CONTROL_MARK = b"\xff"


class VocabularyAccess(Protocol):
    """What is read of a model's vocabulary; each as of `Backend`."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def eog_tokens(self) -> frozenset[int]: ...
    def tokenize(self, text: str, *, parse_special: bool) -> list[int]: ...
    def piece(self, token: int) -> bytes: ...
    def control_text(self, token: int) -> str: ...


class _Source:
    """What `TokenizerWrapper` reads."""

    def __init__(self, backend: VocabularyAccess) -> None:
        self._tokenize = backend.tokenize
        names = {token: backend.control_text(token) for token in range(backend.n_vocab)}
        self.tokens = [_CONTROL_MARK + name.encode() if name else backend.piece(token) for token, name in names.items()]
        self.control_ids = {name: token for token, name in names.items() if name}
        self.special_token_ids = list(self.control_ids.values())
        self.bos_token_id = None
        self.eos_token_id = min(backend.eog_tokens, default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenize(text, parse_special=False)


class GrammarVocabulary:
    """A model's vocabulary as the grammar library wants it: a trie over the bytes of all tokens.

    Made once per engine, when the first grammar comes: 0.35 s and 90 MB for 152,000 tokens, too much for engines that
    never see one. The library keeps the interpreter's lock meanwhile, so it is asked for two things one after the
    other, and streams have a step between.

    Owner: made in a thread of the compiler, only read after that.
    Does not: tokenize prompts.

    `pause` gives others time to take the interpreter's lock.
    """

    def __init__(self, backend: VocabularyAccess, pause: Callable[[], None] = lambda: None) -> None:
        source = _Source(backend)
        eog = sorted(backend.eog_tokens) or [source.eos_token_id]
        plain = LLTokenizer(TokenizerWrapper(source), n_vocab=backend.n_vocab, eos_token=eog, slices=[])
        pause()
        self.tokenizer = plain.with_slices(LLTokenizer.general_slices())
        self.n_tokens = backend.n_vocab
        self._pieces = source.tokens
        self._control_ids = source.control_ids
        names = sorted(filter(None, source.control_ids), key=len, reverse=True)
        self._control_text = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def shown(self, token: int) -> bytes:
        """The bytes of a token, or its name if it is a control token."""
        return self._pieces[token].removeprefix(_CONTROL_MARK)

    def names_in(self, text: str) -> tuple[str, ...]:
        """The control tokens that are named there."""
        return tuple(sorted({found.group() for found in self._control_text.finditer(text)}))

    def cut(self, text: str) -> list[tuple[str, int]]:
        """`text` as (text before, id of the control token named there); the last id is -1."""
        parts, at = [], 0
        for found in self._control_text.finditer(text):
            parts.append((text[at : found.start()], self._control_ids[found.group()]))
            at = found.end()
        return [*parts, (text[at:], -1)]
