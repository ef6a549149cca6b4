"""One line that says that the daemon does not answer, and what can be done. Hidden while all is well."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from localrun.tui.plain_text import line
from localrun.tui.session import Session


class Banner(Static):
    """Shown below the top bar of every screen."""

    def show(self, session: Session) -> None:
        """What there is to say of the session's connection, if anything."""
        trouble = session.trouble
        self.set_class(trouble is not None, "-shown")
        if trouble is None:
            return
        self.update(Content(line(trouble)) if session.is_replay else _no_daemon(session))
        self.tooltip = line(trouble)


def _no_daemon(session: Session) -> Content:
    place = session.base_url.removeprefix("http://")
    way_out: list[str | Content] = [" starts one."]
    if not session.can_start:
        way_out = [" now. ", Content.styled("localrun serve", "bold"), " starts one."]
    return Content.assemble(
        Content.styled("No daemon", "bold"), f" at {place}, retrying; ", Content.styled("^r", "bold"), *way_out
    )
