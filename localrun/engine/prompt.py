"""From prompt segments to token ids. Runs in the reader thread, beside the step loop."""

from __future__ import annotations

from collections.abc import Sequence

from localrun.engine.backend import Backend
from localrun.wire import Segment


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
