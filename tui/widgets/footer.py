"""The last line of every screen: keys, as many as fit. Those that lead on (all keys, and out) are the last to go."""

from __future__ import annotations

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.widgets import Footer
from textual.widgets._footer import FooterKey

_KEPT_LONGEST = ("help", "quit")


class KeyLine(Footer):
    """No key is cut."""

    def __init__(self) -> None:
        super().__init__(show_command_palette=False)
        self._width = 0

    def on_resize(self, event: events.Resize) -> None:
        if event.size.width != self._width:
            self._width = event.size.width
            self.call_after_refresh(self.recompose)

    def compose(self) -> ComposeResult:
        keys = [widget for widget in super().compose() if isinstance(widget, FooterKey)]
        room = (self._width or self.app.size.width) + 1  # of the last one the blank at its end may go
        kept = set()
        for key in sorted(keys, key=lambda key: key.action not in _KEPT_LONGEST):
            room -= cell_len(f" {key.key_display} {key.description} ")
            if room < 0:
                break
            kept.add(key)
        yield from (key for key in keys if key in kept)
