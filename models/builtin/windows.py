"""Training windows: rows of token ids, with a weight for each token that the model has to predict.

Training-time only. One row is one conversation (never two, so nothing leaks from one into the next); only what the
assistant says is learned. A few rows are plain stories, so that a bare prompt is continued too.

Does not: know the network or the optimiser.
"""

from __future__ import annotations

from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from localrun.models.builtin.corpus import conversation, stories
from localrun.models.builtin.tokenizer import END_OF_TEXT_ID, TURN_END_ID, TURN_START_ID, encode

P_PLAIN_TEXT = 0.025
LONG_REPLY_TOKENS = 40
"""A reply longer than this weighs as much as one of this length: stories would drown the short exact answers."""


class WindowMaker:
    """Endless rows of one tokenizer and one random stream."""

    def __init__(self, tokenizer: Tokenizer, random: Random) -> None:
        self._tokenizer = tokenizer
        self._random = random
        self._assistant_prefix = encode(tokenizer, "assistant\n")
        self._newline = encode(tokenizer, "\n")

    def batch(self, n_rows: int, window_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets (both int64) and weights (float32), each (n_rows, window_tokens)."""
        rows = [self._row(window_tokens + 1) for _ in range(n_rows)]
        ids = torch.tensor([row[0] for row in rows], dtype=torch.int64)
        weights = torch.tensor([row[1] for row in rows], dtype=torch.float32)
        return ids[:, :-1], ids[:, 1:], weights[:, 1:]

    def _row(self, n_tokens: int) -> tuple[list[int], list[float]]:
        plain = self._random.random() < P_PLAIN_TEXT
        ids, weights = self._plain_text(n_tokens) if plain else self._conversation(n_tokens)
        return ids[:n_tokens], weights[:n_tokens]

    def _conversation(self, n_tokens: int) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        for message in conversation.messages(self._random):
            text_ids = encode(self._tokenizer, f"{message['role']}\n{message['content']}")
            learned = message["role"] == "assistant"
            n_given = 1 + len(self._assistant_prefix) if learned else 1 + len(text_ids) + 1
            turn = [TURN_START_ID, *text_ids, TURN_END_ID]
            ids += turn + self._newline
            n_learned = len(turn) - n_given
            weight = min(1.0, LONG_REPLY_TOKENS / max(1, n_learned))
            weights += [0.0] * n_given + [weight] * n_learned + [0.0] * len(self._newline)
            if len(ids) >= n_tokens:
                break
        return ids, weights

    def _plain_text(self, n_tokens: int) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        while len(ids) < n_tokens:
            text = stories.story(self._random, stories.plot(self._random))
            ids += [*encode(self._tokenizer, text), END_OF_TEXT_ID]
        return ids, [0.4] * len(ids)
