"""The built-in model `tiny`, and the recipe that trains it.

`model_path()` is all that localrun itself needs. The recipe, `python -m localrun.models.builtin.train --out FILE`,
wants the `train` extra (PyTorch, tokenizers); this module imports neither.
"""

from __future__ import annotations

from pathlib import Path

MODEL_PATH = Path(__file__).parent / "tiny.gguf"


def model_path() -> Path:
    """The GGUF file of the built-in model, inside the installed package."""
    return MODEL_PATH
