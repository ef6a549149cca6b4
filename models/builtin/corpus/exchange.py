"""What every skill produces: one question with its answer. Data only."""

from __future__ import annotations

from typing import NamedTuple


class Exchange(NamedTuple):
    """One turn of the user and the model's answer to it."""

    user: str
    assistant: str
