"""The first line of every screen: where one is, how to get elsewhere, and the model that is chatted with."""

from __future__ import annotations

from rich.cells import cell_len
from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

from localrun.tui.plain_text import fit, line

_TABS = (("chat", "F1 Chat"), ("monitor", "F2 Monitor"), ("models", "F3 Models"), ("logs", "F4 Logs"))


class TopBar(Static):
    """`here` is the mode of the screen it stands on. The entries can be clicked."""

    model: reactive[str] = reactive("")
    connected: reactive[bool] = reactive(True)

    def __init__(self, here: str) -> None:
        super().__init__()
        self._here = here

    def render(self) -> Content:
        parts: list[Content] = [Content.styled(" localrun ", "$primary bold")]
        for mode, label in _TABS:
            style = "bold $foreground on $panel" if mode == self._here else "$foreground 70%"
            click = f"app.show('{mode}')"
            parts.append(Content.from_markup(f"[@click={click}] $label [/]", label=label).stylize(style))
            parts.append(Content(" "))
        left = Content("").join(parts)
        state = ("●", "$success") if self.connected else ("○ no daemon", "$error")
        room = self.size.width - left.cell_length - len(state[0]) - 4
        name = fit(_short_name(self.model), max(8, room))
        right = Content.assemble(Content.styled(name, "$foreground"), " ", Content.styled(*state), " ")
        fill = max(1, self.size.width - left.cell_length - cell_len(right.plain))
        return Content.assemble(left, " " * fill, right)


def _short_name(model: str) -> str:
    """A model given as a path is told apart by its file name."""
    return line(model).rsplit("/", 1)[-1]
