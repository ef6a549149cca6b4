"""Trains `tiny` from nothing and writes its GGUF file: `python -m tiny.train --out tiny.gguf`, in `packaging/`.

One process, CPU only, under two hours on two cores. Needs the `train` extra (PyTorch, tokenizers). The whole run
follows from `--seed`: the text, the tokenizer and the starting weights (sums of floats still differ between machines).

Matrices are trained with Muon, which gets a small network to copy words much sooner than AdamW does; embeddings and
norms with AdamW. The learning rate warms up, stays for a while and then falls to zero, and the rows grow from short
ones to the full context.

One row is one conversation (never two, so nothing leaks from one into the next); only what the assistant says is
learned. A few rows are plain stories, so that a bare prompt is continued too. The perplexity is that of conversations
which training never drew, counted over what the assistant says, in windows of 512 tokens.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as functional
from tokenizers import Tokenizer
from torch import Tensor

from tiny import export, tokenizer
from tiny.corpus import conversation, stories
from tiny.network import Network, Shape
from tiny.tokenizer import END_OF_TEXT_ID, TURN_END_ID, TURN_START_ID, encode

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


HELD_OUT_SEED = "held-out conversations"


def held_out_perplexity(network: Network, tokenizer: Tokenizer, n_rows: int = 128, window_tokens: int = 512) -> float:
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


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train."""

    n_steps: int = 2800
    step_tokens: int = 8192
    warmup_steps: int = 60
    decay_fraction: float = 0.88
    matrix_rate: float = 0.02
    matrix_decay: float = 0.02
    other_rate: float = 0.003
    gradient_limit: float = 1.0
    report_steps: int = 50
    checkpoint_steps: int = 200


def window_tokens(plan: Plan, step: int, random: Random) -> int:
    """Length of the rows of `step`: short at first, when copying is learned; up to the full context at the end."""
    progress = step / plan.n_steps
    if progress < 0.15:
        return random.choice((128, 256))
    if progress < 0.86:
        return random.choice((256, 512, 512, 512, 1024))
    return random.choice((256, 512, 512, 1024, 2048, 2048, 4096))


def rate_factor(plan: Plan, step: int) -> float:
    """Share of the full learning rate at `step`."""
    decay_start = plan.n_steps * (1 - plan.decay_fraction)
    if step < plan.warmup_steps:
        return (step + 1) / plan.warmup_steps
    if step < decay_start:
        return 1.0
    return max(0.0, (plan.n_steps - step) / (plan.n_steps - decay_start))


def optimizers(network: Network, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside of the blocks, AdamW for the embedding and the norms."""
    matrices = [p for name, p in network.named_parameters() if p.dim() == 2 and "embedding" not in name]
    others = [p for name, p in network.named_parameters() if p.dim() != 2 or "embedding" in name]
    found = [
        torch.optim.Muon(
            matrices, lr=plan.matrix_rate, momentum=0.95, weight_decay=plan.matrix_decay, adjust_lr_fn="original"
        ),
        torch.optim.AdamW(others, lr=plan.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in found:
        for group in optimizer.param_groups:
            group["full_rate"] = group["lr"]
    return found


def train_tokenizer(shape: Shape, seed: int) -> Tokenizer:
    """A tokenizer for the text of some thousand conversations."""
    random = Random(f"tokenizer {seed}")
    texts = [
        f"{message['role']}\n{message['content']}"
        for _ in range(4000)
        for message in islice(conversation.messages(random), 24)
    ]
    return tokenizer.train(texts, shape.vocab_size)


def train(shape: Shape, plan: Plan, seed: int, checkpoints: Path | None) -> tuple[Network, Tokenizer]:
    """Runs the whole plan; prints loss and speed as it goes."""
    torch.manual_seed(seed)
    random = Random(f"windows {seed}")
    text_tokenizer = train_tokenizer(shape, seed)
    windows = WindowMaker(text_tokenizer, Random(f"text {seed}"))
    network = Network(shape)
    steppers = optimizers(network, plan)
    n_parameters = sum(p.numel() for p in network.parameters())
    print(f"{n_parameters:,} parameters, {plan.n_steps * plan.step_tokens:,} tokens", flush=True)
    started_s, loss_sum = time.monotonic(), 0.0
    for step in range(plan.n_steps):
        length = window_tokens(plan, step, random)
        inputs, targets, weights = windows.batch(plan.step_tokens // length, length)
        loss = weighted_loss(network, inputs, targets, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), plan.gradient_limit)
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = group["full_rate"] * rate_factor(plan, step)
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        loss_sum += loss.item()
        if (step + 1) % plan.report_steps == 0:
            spent_s = time.monotonic() - started_s
            speed = (step + 1) * plan.step_tokens / spent_s
            print(
                f"step {step + 1} loss {loss_sum / plan.report_steps:.4f} {spent_s:.0f} s {speed:.0f} tok/s", flush=True
            )
            loss_sum = 0.0
        if checkpoints is not None and (step + 1) % plan.checkpoint_steps == 0:
            save_checkpoint(checkpoints / f"step{step + 1:05d}.pt", network, text_tokenizer)
    return network, text_tokenizer


def weighted_loss(network: Network, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean loss of the learned tokens by weight; all arguments (rows, tokens).

    Logits are made only for the learned tokens, rounded up to a few sizes: the CPU kernels are compiled and kept for
    every new size.
    """
    n_learned = int((weights > 0).sum())
    n_rows = min(weights.numel(), -(-n_learned // 512) * 512)
    chosen_weights, chosen = weights.flatten().topk(n_rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = network.logits(network(inputs).flatten(0, 1)[chosen])
    losses = functional.cross_entropy(logits, targets.flatten()[chosen], reduction="none")
    return (losses * chosen_weights).sum() / chosen_weights.sum()


def save_checkpoint(path: Path, network: Network, text_tokenizer: Tokenizer) -> None:
    """Weights, shape and tokenizer in one file, enough to export from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {"shape": asdict(network.shape), "weights": network.state_dict(), "tokenizer": text_tokenizer.to_str()}, path
    )


def load_checkpoint(path: Path) -> tuple[Network, Tokenizer]:
    """What `save_checkpoint` wrote."""
    content = torch.load(path, weights_only=True)
    network = Network(Shape(**content["shape"]))
    network.load_state_dict(content["weights"])
    return network, Tokenizer.from_str(content["tokenizer"])


def main() -> None:
    """Parses the command line, trains, measures perplexity, writes the file."""
    parser = argparse.ArgumentParser(prog="python -m tiny.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where to write the GGUF file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=Plan.n_steps)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoints", type=Path, help="folder for weights saved on the way")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    started_s = time.monotonic()
    network, text_tokenizer = train(Shape(), Plan(n_steps=arguments.steps), arguments.seed, arguments.checkpoints)
    minutes = (time.monotonic() - started_s) / 60
    print(f"trained in {minutes:.1f} minutes")
    size_bytes = export.write(arguments.out, network, text_tokenizer)
    print(f"wrote {arguments.out}, {size_bytes / 1e6:.2f} MB")
    print(f"held-out perplexity {held_out_perplexity(network, text_tokenizer):.3f}")


if __name__ == "__main__":
    main()
