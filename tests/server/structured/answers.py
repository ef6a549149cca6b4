"""Whether a text is an answer to a schema: as the daemon writes it and the engine compiles it, byte by byte."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from llguidance import LLMatcher

from localrun.engine.sample.grammar_library import GrammarVocabulary, source_of
from localrun.engine.sample.grammar_worker import checked
from localrun.server.structured import json_schema


class _Bytes:
    n_vocab = 257
    eog_tokens = frozenset({256})

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def control_text(self, token: int) -> str:
        return "<end>" if token == 256 else ""


@cache
def _vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(_Bytes())


def takes(schema: Any, text: str) -> bool:
    """Raises BadRequest for a schema that is refused, here or there."""
    grammar = checked(json_schema(schema, field="format")).grammar
    assert grammar is not None
    matcher = LLMatcher(_vocabulary().tokenizer, source_of(grammar, _vocabulary().cut))
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def takes_value(schema: Any, value: Any) -> bool:
    """The same for a value, as a program writes it."""
    return takes(schema, json.dumps(value, ensure_ascii=False, separators=(",", ":")))
