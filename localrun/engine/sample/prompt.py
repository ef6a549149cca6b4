"""From prompt segments to token ids. Runs in the threads of `tokenizing.py`, beside the step loop."""

from __future__ import annotations

from collections.abc import Sequence

from localrun.engine.backend import Backend
from localrun.errors import BadRequest
from localrun.wire import Segment, Submit


def tokens_of(backend: Backend, submit: Submit) -> list[int]:
    """The prompt of a request, whose tokens are all in the vocabulary. Raises BadRequest."""
    if submit.tokens is None:
        return tokenize(backend, submit.segments)
    tokens = list(submit.tokens)
    # Not one by one: streams would be without the interpreter for as long as that takes.
    bad = next((end for end in (min(tokens), max(tokens)) if not 0 <= end < backend.n_vocab), None) if tokens else None
    if bad is not None:
        limit = backend.n_vocab - 1
        raise BadRequest(f"token {bad} is not in the vocabulary; ids go from 0 to {limit}", field="prompt")
    return tokens


def tokenize(backend: Backend, segments: Sequence[Segment]) -> list[int]:
    """Token ids of a whole prompt. Only trusted segments may hold control tokens.

    The model's BOS token is put in front when the model wants one and the template did not write it.
    """
    tokens: list[int] = []
    for segment in segments:
        tokens += backend.tokenize(segment.text, parse_special=segment.trusted)
    if backend.bos_token is not None and (not tokens or tokens[0] != backend.bos_token):
        tokens.insert(0, backend.bos_token)
    return tokens
