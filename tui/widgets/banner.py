"""One line that says that the daemon does not answer, and what can be done. Hidden while all is well."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from localrun.tui.plain_text import line


class Banner(Static):
    """Shown below the top bar of every screen."""

    def show(self, trouble: str | None, base_url: str) -> None:
        """`trouble` None hides it."""
        self.set_class(trouble is not None, "-shown")
        if trouble is None:
            return
        place = base_url.removeprefix("http://")
        self.update(
            Content.assemble(
                Content.styled("No daemon", "bold"),
                f" at {place}, retrying (",
                Content.styled("^r", "bold"),
                " now). ",
                Content.styled("localrun serve", "bold"),
                " starts one.",
            )
        )
        self.tooltip = line(trouble)
