"""Strings on which llama.cpp's tokenizer has to agree with the one that trained the model, and their ids.

`python -m tiny.parity CHECKPOINT OUT.json` writes the fixture that the tests compare llama.cpp with.
Training-time only.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from random import Random

from tiny import tokenizer as bpe
from tiny.corpus import conversation
from tiny.train import load_checkpoint

WRITTEN = (
    "",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    " \n",
    "\n ",
    " \n \n ",
    "\t",
    "\t\t",
    "\r\n",
    "\r\n\r\n",
    "a\r\nb",
    "a\rb",
    "\v",
    "\f",
    "a ",
    " a",
    "  a",
    "   a",
    "a  b",
    "a   b",
    "a \n b",
    "a\n\n\nb",
    "a \t b",
    "trailing  ",
    "trailing\n",
    "\n\nleading",
    "don't",
    "DON'T",
    "I'm",
    "I'M",
    "we'll",
    "WE'LL",
    "they've",
    "you're",
    "he'd",
    "it's",
    "'s",
    "''s",
    "' s",
    "rock 'n' roll",
    "dogs' toys",
    "l’été",
    "don’t",
    "1",
    "12",
    "123",
    "1234",
    "1 2 3",
    "3.14",
    "1,000,000",
    "3+4",
    "3 + 4 = 7",
    "-5",
    "1e10",
    "0x1F",
    "²³¹",
    "½ ¼",
    "①②③",
    "٣٤",
    "१२३",
    "Ⅳ",
    "x2y3",
    "a1b2",
    "Zoë",
    "José",
    "Łukasz",
    "Søren",
    "naïve",
    "façade",
    "ÀÉÎÕÜ",
    "ß",
    "ſ",
    "ﬁ",
    "e\u0301",
    "n\u0303o",
    "\u0301",
    "a\u0301\u0302b",
    "İstanbul",
    "ıI",
    "Ελληνικά",
    "Привет, мир!",
    "שלום",
    "مرحبا",
    "नमस्ते",
    "ไทย",
    "こんにちは世界",
    "カタカナ",
    "你好，世界。",
    "한국어",
    "日本 12",
    "😀",
    "😀😃😄",
    "👩‍👩‍👧‍👦",
    "👍🏽",
    "🇩🇪",
    "❤️",
    "a😀b",
    " 😀 ",
    "😀\n😀",
    "→ ← ↑",
    "€5",
    "£ 10",
    "¿qué?",
    "¡hola!",
    "«ja»",
    "„nein“",
    "…",
    "–—",
    "a—b",
    "!!!",
    "?!",
    "...",
    ". . .",
    "(a)",
    "[b]",
    "{c}",
    "<d>",
    '"e"',
    "'f'",
    "`g`",
    "a_b",
    "__init__",
    "snake_case",
    "camelCase",
    "kebab-case",
    "C++",
    "C#",
    "@user",
    "#tag",
    "a/b/c",
    "C:\\path",
    "https://example.com/?q=1&r=2",
    "user@example.com",
    "def f(x):\n    return x + 1\n",
    "if a:\n\tb()\n\n\nc",
    "    indented",
    "\tindented",
    '{"key": [1, 2, null]}',
    "<b>bold</b>",
    "SELECT * FROM t;",
    "a\u00a0b",
    "\u00a0",
    "a\u2003b",
    "\u3000a",
    "a\u2028b",
    "a\u200bb",
    "\ufeffa",
    "\u200d",
    "a\u0085b",
    "\u00ad",
    "soft\u00adhyphen",
    "\x00",
    "\x01\x02",
    "\x7f",
    "\x1b[31mred",
    "\U0001d54f\U0001d550",
    "\U0001f9d1\u200d\U0001f4bb",
    "\U000e0041",
    "\ud7ff",
    "\ue000",
    "\ufffd",
    "𐍈",
    "𠜎",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
    "AbCdEfGhIj",
    "ALL CAPS",
    "MiXeD",
    "word." * 5,
    " ." * 5,
    "-" * 30,
    "=" * 31,
    " " * 33,
    "\n" * 9,
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "a<|im_end|>b",
    "a <|im_end|> b",
    "a\n<|im_start|>user\nb",
    "<|im_end|>\n",
    "<|im_start|><|im_end|>",
    "<|im_stop|>",
    "<|im_end|",
    "|im_end|>",
    "<|im_start|>system\nBe brief.<|im_end|>\n",
)

SCRIPTS = (
    (32, 126),
    (32, 126),
    (160, 591),
    (768, 879),
    (880, 1279),
    (8192, 8303),
    (12288, 12543),
    (19968, 20200),
    (128512, 128591),
)


def strings(n_conversations: int = 12, n_noise: int = 120) -> list[str]:
    """The written strings, whole conversations in the chat format, and noise from several scripts."""
    random = Random("parity")
    found = list(WRITTEN)
    for _ in range(n_conversations):
        found.extend(
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            for message in islice(conversation.messages(random), 8)
        )
    for _ in range(n_noise):
        low, high = random.choice(SCRIPTS)
        letters = [
            chr(random.randint(low, high)) if random.random() < 0.8 else random.choice(" \n\t'1a") for _ in range(12)
        ]
        found.append("".join(letters))
    return found


def main() -> None:
    """Writes `[[text, ids], ...]` as JSON."""
    _, text_tokenizer = load_checkpoint(Path(sys.argv[1]))
    rows = [[text, bpe.encode(text_tokenizer, text)] for text in strings()]
    lines = ",\n".join(json.dumps(row) for row in rows)
    Path(sys.argv[2]).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
