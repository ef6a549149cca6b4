"""Trains `tiny` from nothing and writes its GGUF file: `python -m localrun.models.builtin.train --out tiny.gguf`.

One process, CPU only, under two hours on two cores. Needs the `train` extra (PyTorch, tokenizers). The whole run
follows from `--seed`: the text, the tokenizer and the starting weights (sums of floats still differ between machines).

Matrices are trained with Muon, which gets a small network to copy words much sooner than AdamW does; embeddings and
norms with AdamW. The learning rate warms up, stays for a while and then falls to zero, and the rows grow from short
ones to the full context.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as functional
from tokenizers import Tokenizer
from torch import Tensor

from localrun.models.builtin import export, perplexity, tokenizer
from localrun.models.builtin.corpus import conversation
from localrun.models.builtin.network import Network, Shape
from localrun.models.builtin.windows import WindowMaker


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
    parser = argparse.ArgumentParser(prog="python -m localrun.models.builtin.train", description=__doc__)
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
    print(f"held-out perplexity {perplexity.held_out(network, text_tokenizer):.3f}")


if __name__ == "__main__":
    main()
