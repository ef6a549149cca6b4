"""One line above the prompt: the files that go with the next question, or the commands that fit what is typed."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from localrun.tui import quantity, slash
from localrun.tui.attachment import Attachment
from localrun.tui.plain_text import fit, line

_MAX_COMMANDS = 6


class Attachments(Widget):
    """Takes no room while there is nothing to show."""

    commands: reactive[list[str]] = reactive([], layout=True)
    files: reactive[tuple[Attachment, ...]] = reactive((), layout=True)

    def add(self, file: Attachment) -> None:
        self.files = (*self.files, file)

    def take(self) -> tuple[Attachment, ...]:
        """The files, which are no longer here."""
        files, self.files = self.files, ()
        return files

    def watch_commands(self) -> None:
        self._show()

    def watch_files(self) -> None:
        self._show()

    def _show(self) -> None:
        self.display = bool(self.commands or self.files)
        self.styles.height = min(_MAX_COMMANDS, max(1, len(self.commands)))

    def render(self) -> Content:
        if self.commands:
            return Content("\n").join([_command(name, self.size.width) for name in self.commands[:_MAX_COMMANDS]])
        names = ", ".join(f"{file.name} ({quantity.size(file.size_bytes)})" for file in self.files)
        return Content.assemble(
            Content.styled("with ", "$foreground 60%"), fit(line(names), max(8, self.size.width - 5))
        )


def _command(name: str, width: int) -> Content:
    arguments, what = slash.COMMANDS[name]
    usage = f"/{name} {arguments}".ljust(26)
    return Content.assemble(
        Content.styled(usage, "bold $primary"), Content.styled(fit(what, width - 27), "$foreground 70%")
    )
