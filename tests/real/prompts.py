"""The forty prompts of prompts.toml and the text of text.txt, as a model's tokens.

A prompt is words of the text, then `text`. With `chat` that is a user's message, after a `system` message if there is
one, in the model's own form. Pure but for reading the two files.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class Prompt(NamedTuple):
    text: str
    chat: bool
    system: str
    core: bool


@cache
def prompts() -> tuple[Prompt, ...]:
    """In the order of the file, in which the first with a long beginning comes before those that share it."""
    rows = tomllib.loads((HERE / "prompts.toml").read_text(encoding="utf-8"))["prompt"]
    return tuple(
        Prompt(_text(row), row.get("chat", False), row.get("system", ""), row.get("core", False)) for row in rows
    )


def fixed_text() -> str:
    """Several thousand tokens of English."""
    return (HERE / "text.txt").read_text(encoding="utf-8")


def _text(row: dict[str, Any]) -> str:
    parts = (_words(*row["words"]) if "words" in row else "", row.get("text", ""))
    return "\n\n".join(part for part in parts if part)


def _words(start: int, count: int) -> str:
    return " ".join(fixed_text().split()[start : start + count])


def turn(model: str, role: str, text: str) -> str:
    """One message of a conversation, as SmolLM2 or Gemma write it."""
    if "gemma" in model:
        return f"<start_of_turn>{'model' if role == 'assistant' else 'user'}\n{text}<end_of_turn>\n"
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def opening(model: str) -> str:
    """What an answer begins after."""
    return "<start_of_turn>model\n" if "gemma" in model else "<|im_start|>assistant\n"


def rendered(model: str, prompt: Prompt) -> str:
    """A prompt as the text that the model is given."""
    if not prompt.chat:
        return prompt.text
    system = turn(model, "system", prompt.system) if prompt.system else ""
    return system + turn(model, "user", prompt.text) + opening(model)
