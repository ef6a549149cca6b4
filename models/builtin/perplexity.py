"""Perplexity of the network on conversations that training never drew.

Training-time only. Counted over what the assistant says, in 512-token windows, on the weights as they are given.
"""

from __future__ import annotations

import math
from random import Random

import torch
import torch.nn.functional as functional
from tokenizers import Tokenizer

from localrun.models.builtin.network import Network
from localrun.models.builtin.windows import WindowMaker

HELD_OUT_SEED = "held-out conversations"


def held_out(network: Network, tokenizer: Tokenizer, n_rows: int = 128, window_tokens: int = 512) -> float:
    """exp of the mean loss per assistant token."""
    windows = WindowMaker(tokenizer, Random(HELD_OUT_SEED))
    loss_sum, n_tokens = 0.0, 0
    with torch.no_grad():
        for _ in range(n_rows // 16):
            inputs, targets, weights = windows.batch(16, window_tokens)
            learned = weights > 0
            logits = network.logits(network(inputs)[learned])
            loss_sum += functional.cross_entropy(logits, targets[learned], reduction="sum").item()
            n_tokens += int(learned.sum())
    return math.exp(loss_sum / n_tokens)
