"""Byte-level BPE for `tiny`: training it, and turning conversations into ids exactly as llama.cpp will.

Training-time only (needs the `tokenizers` library). The pre-tokenizer is the one that llama.cpp calls `qwen2`: words
with one leading blank, every digit alone, newlines apart; `tokenizer.ggml.pre` names the rule that trained the merges.

Does not: write the GGUF file (see `export`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = 0, 1, 2

PRE_TOKENIZER_NAME = "qwen2"
PRE_TOKENIZER_PATTERN = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of `vocab_size` entries: control tokens, the 256 bytes, then merges learned from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in CONTROL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of `text`; control tokens written out in it become their ids."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def vocabulary(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Token texts by id, and the merges as `left right`, both in the byte alphabet that GGUF uses."""
    content = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].__getitem__)
    return tokens, [" ".join(merge) for merge in content["merges"]]


def load(path: Path) -> Tokenizer:
    """Reads what `Tokenizer.save` wrote."""
    return Tokenizer.from_file(str(path))
