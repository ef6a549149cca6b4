"""The aggregate decode and prefill rates as big numbers."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Digits, Static

from localrun.snapshot import Aggregate


class Throughput(Horizontal):
    def __init__(self) -> None:
        super().__init__()
        self._decode = Digits("0", classes="decode")
        self._prefill = Digits("0", classes="prefill")

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static("decode tok/s", classes="decode")
            yield self._decode
        with Vertical():
            yield Static("prefill tok/s", classes="prefill")
            yield self._prefill

    def show(self, aggregate: Aggregate) -> None:
        """Whole tokens: a decimal that flickers says nothing."""
        self._decode.update(_whole(aggregate.decode_tokens_per_s))
        self._prefill.update(_whole(aggregate.prefill_tokens_per_s))


def _whole(tokens_per_s: float) -> str:
    return f"{round(tokens_per_s)}"
