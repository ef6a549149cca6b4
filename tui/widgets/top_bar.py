"""The first line of every screen: where one is, how to get elsewhere, and the model that is chatted with; and below it
the line that says that the daemon does not answer. Both follow the session."""

from __future__ import annotations

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Footer, Static
from textual.widgets._footer import FooterKey

from localrun.tui.session import Session
from localrun.tui.short_text import fit, line

_TABS = (("chat", "F1 Chat"), ("monitor", "F2 Monitor"), ("models", "F3 Models"), ("logs", "F4 Logs"))
_SHORTEST_NAME = 8


class TopBar(Static):
    """`here` is the mode of the screen it stands on. The entries can be clicked."""

    model: reactive[str] = reactive("")
    connected: reactive[bool] = reactive(True)

    def __init__(self, here: str, session: Session) -> None:
        super().__init__()
        self._here = here
        self._session = session

    def on_mount(self) -> None:
        self.model = self._session.model
        self._session.models.subscribe(self, self._on_model)
        self._session.connection.subscribe(self, self._on_connection)
        self._on_connection(self._session.trouble)

    def _on_model(self, model: str) -> None:
        self.model = model

    def _on_connection(self, trouble: str | None) -> None:
        self.connected = trouble is None

    def render(self) -> Content:
        away = "○ not connected" if self._session.machine else "○ no daemon"
        state = ("●", "$success") if self.connected else (away, "$error")
        brand = Content.styled(" localrun ", "$primary bold")
        # Where there is no room, this program's name goes first, then those of the places where one is not.
        ways = (brand + self._tabs(), self._tabs(), self._tabs(is_short=True))
        room = self.size.width - len(state[0]) - 4
        left = next((way for way in ways if room - way.cell_length >= _SHORTEST_NAME), ways[-1])
        # A model given as a path is told apart by its file name.
        name = fit(line(self.model).rsplit("/", 1)[-1], max(0, room - left.cell_length))
        right = Content.assemble(Content.styled(name, "$foreground"), " ", Content.styled(*state), " ")
        fill = max(1, self.size.width - left.cell_length - cell_len(right.plain))
        return Content.assemble(left, " " * fill, right)

    def _tabs(self, *, is_short: bool = False) -> Content:
        parts: list[Content] = []
        for mode, label in _TABS:
            style = "bold $foreground on $panel" if mode == self._here else "$foreground 70%"
            shown = label.split()[0] if is_short and mode != self._here else label
            click = f"app.show('{mode}')"
            parts.append(Content.from_markup(f"[@click={click}] $label [/]", label=shown).stylize(style))
            parts.append(Content(" "))
        return Content("").join(parts)


class Banner(Static):
    """What is wrong with the connection, and what can be done. Hidden while all is well."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def on_mount(self) -> None:
        self._session.connection.subscribe(self, self._show)
        self._show(self._session.trouble)

    def _show(self, trouble: str | None) -> None:
        self.set_class(trouble is not None, "-shown")
        if trouble is not None:
            self.update(Content(line(trouble)) if self._session.is_replay else _no_daemon(self._session, trouble))
            self.tooltip = Content(line(trouble))


def _no_daemon(session: Session, trouble: str) -> Content:
    if session.machine:  # another machine's, which nobody here can start
        return Content.assemble(
            Content.styled("Not connected", "bold"),
            ", retrying; ",
            Content.styled("^r", "bold"),
            f" now: {line(trouble)}",
        )
    place = session.base_url.removeprefix("http://")
    way_out: list[str | Content] = [" starts one."]
    if not session.can_start:
        way_out = [" now. ", Content.styled("localrun serve", "bold"), " starts one."]
    return Content.assemble(
        Content.styled("No daemon", "bold"), f" at {place}, retrying; ", Content.styled("^r", "bold"), *way_out
    )


# A key, whether it is enabled, and its tooltip.
_Shown = tuple[Binding, bool, str]
_KEPT_LONGEST = ("help", "quit")


class _Key(FooterKey):
    """Not bound to what its line says of `compact`, which would style each key three times."""

    compact = reactive(False)


class KeyLine(Footer):
    """No key is cut. Keys are made anew only when others are to be shown, not with every move of the focus."""

    def __init__(self) -> None:
        super().__init__(show_command_palette=False)
        self._width = 0
        self._shown: list[_Shown] = []

    def on_resize(self, event: events.Resize) -> None:
        if event.size.width != self._width:
            self._width = event.size.width
            self.call_after_refresh(self.recompose)

    async def recompose(self) -> None:
        kept = self._kept()
        if kept != self._shown:
            self._shown = kept
            await super().recompose()

    def compose(self) -> ComposeResult:
        for binding, is_enabled, tooltip in self._shown:
            name = self.app.get_key_display(binding)
            yield _Key(binding.key, name, binding.description, binding.action, disabled=not is_enabled, tooltip=tooltip)

    def _kept(self) -> list[_Shown]:
        if not self._bindings_ready:
            return []
        keys = dict[str, _Shown]()
        for _, binding, is_enabled, tooltip in self.screen.active_bindings.values():
            if binding.show:
                keys.setdefault(binding.action, (binding, is_enabled, tooltip))
        room = (self._width or self.app.size.width) + 1  # of the last one the blank at its end may go
        kept = set()
        for action in sorted(keys, key=lambda action: action not in _KEPT_LONGEST):
            binding = keys[action][0]
            room -= cell_len(f" {self.app.get_key_display(binding)} {binding.description} ")
            if room < 0:
                break
            kept.add(action)
        return [key for action, key in keys.items() if action in kept]
