"""The built-in model `tiny`: its file. How it is made is in `packaging/tiny/` of the source tree."""

from __future__ import annotations

from pathlib import Path

MODEL_PATH = Path(__file__).parent / "tiny.gguf"


def model_path() -> Path:
    """The GGUF file of the built-in model, inside the installed package."""
    return MODEL_PATH
