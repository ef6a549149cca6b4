"""From inputs to tokens: affixes, pairs, truncation."""

from __future__ import annotations

import pytest

from localrun.engine.embedding.inputs import PairFormat, tokens_of
from localrun.errors import BadRequest, ContextExceeded
from localrun.wire import Pooling
from tests.fakes.embedder import FakeEmbedder
from tests.fakes.tokens import IM_END, IM_START


def embedder(n_ctx: int = 40, template: str | None = None) -> FakeEmbedder:
    made = FakeEmbedder(pooling=Pooling.RANK if template else Pooling.LAST, n_ctx=n_ctx)
    if template:
        made.pair_format = PairFormat((), (), (), template)
    return made


def test_control_tokens_of_a_text_are_tokens_but_those_of_a_pair_are_text():
    text = tokens_of(embedder(), "a<|im_end|>", query=None, truncate=False, where="input").tokens
    assert text == [IM_START, ord("a"), IM_END, IM_END]
    pair = tokens_of(embedder(), "<|im_end|>", query="q", truncate=False, where="documents").tokens
    assert pair == [IM_START, ord("q"), IM_END, *b"<|im_end|>", IM_END]


def test_a_template_holds_control_tokens_and_what_is_filled_in_does_not():
    template = "<|im_start|>Q: {query} D: {document}<|im_end|>"
    found = tokens_of(
        embedder(template=template), "{query}<|im_end|>", query="who", truncate=False, where="documents"
    ).tokens
    assert found == [IM_START, *b"Q: who D: {query}<|im_end|>", IM_END]


@pytest.mark.parametrize("template", [None, "<|im_start|>{query}|{document}<|im_end|>"])
def test_of_a_pair_that_is_too_long_the_document_loses_its_end(template: str | None):
    made = embedder(n_ctx=30, template=template)
    found = tokens_of(made, "0123456789" * 5, query="query", truncate=True, where="documents[3]")
    assert len(found.tokens) == 30
    assert found.tokens[-1] == IM_END
    assert bytes(token for token in found.tokens if token < 256).startswith(b"query")
    assert found.n_cut == len(tokens_of(embedder(500, template), "0123456789" * 5, query="query", truncate=False,
                                        where="").tokens) - 30  # fmt: skip
    with pytest.raises(ContextExceeded, match=r"documents\[3\].* 30\b"):
        tokens_of(made, "0123456789" * 5, query="query", truncate=False, where="documents[3]")


def test_a_query_that_leaves_no_room_is_an_error_even_where_cutting_is_allowed():
    with pytest.raises(ContextExceeded, match="query is too large: it has 43"):
        tokens_of(embedder(n_ctx=30), "document", query="q" * 40, truncate=True, where="documents")


def test_what_has_no_tokens_is_refused():
    made = embedder()
    made.affixes = ((), ())
    with pytest.raises(BadRequest, match="input is empty"):
        tokens_of(made, "", query=None, truncate=False, where="input")
    with pytest.raises(BadRequest, match=r"input\[2\] is empty"):
        tokens_of(made, (), query=None, truncate=False, where="input[2]")


def test_a_text_beyond_all_measure_is_not_tokenized_as_a_whole():
    made = embedder(n_ctx=10)
    seen: list[int] = []
    tokenize = made.tokenize
    made.tokenize = lambda text, *, parse_special: (  # type: ignore[method-assign]
        seen.append(len(text)) or tokenize(text, parse_special=parse_special)
    )
    assert len(tokens_of(made, "x" * 1_000_000, query=None, truncate=True, where="input").tokens) == 10
    assert max(seen) < 10_000
