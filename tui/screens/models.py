"""The models: those that are here, chosen by Enter; those of the catalogue and the hub, pulled by Enter.

One list, narrowed by typing. A path to a GGUF file is a model name too, so typing one offers it as it stands. Below it
stand the pulls that run. What is found on the hub comes a moment after the last letter.

Does not: hold pulls (the session does); they go on when this closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, ClassVar

from rich.cells import cell_len
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localrun.errors import LocalrunError
from localrun.tui import short_text
from localrun.tui.files import model_file
from localrun.tui.keys import bind
from localrun.tui.screens.details import ModelDetailScreen
from localrun.tui.screens.dialog import Picker
from localrun.tui.session import Session, pull_line
from localrun.tui.short_text import column, line

_NAME_WIDTH = 28
_HUB_NAME_WIDTH = 44
_MARK_WIDTH, _SIZE_WIDTH, _STATE_WIDTH, _GAP = 2, 9, 13, 2
_LOOK_EVERY_S = 0.5
# After the last letter, before the hub is asked; and what is too short to be asked for.
_SEARCH_AFTER_S = 0.5
_FEWEST_LETTERS = 3
_GB = 1_000_000_000
_UNDER_WAY = ("planning", "pulling")
_PULLING = "Pulling "
_ASKING, _NOTHING = "Asking the daemon…", "No model has this in its name."
# Prefixes of option ids: what Enter does with one.
_HERE, _THERE = "here ", "there "


class ModelsScreen(Picker[str]):
    """Dismissed with the chosen name, or with None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f3,ctrl+o", "dismiss", "Close"),
        bind("models.detail", "detail", priority=True),
        bind("models.load", "load", priority=True),
        bind("models.cancel", "cancel", priority=True),
        bind("models.delete", "delete", priority=True),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__(Input(placeholder="Type to narrow or to search the hub, or a path to a .gguf file"))
        self._session = session
        self._rows: list[dict[str, Any]] = []
        self._catalog: list[dict[str, Any]] = []
        self._hub: list[dict[str, Any]] = []
        self._said = ""
        self._states: list[str] = []
        self._ended_before: set[tuple[str, float]] | None = None
        self._pulls = Static(id="pulls")
        self._forecast = Static(id="forecast")

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Models"
            detail, load, delete = (self._session.key(f"models.{what}") for what in ("detail", "load", "delete"))
            hints = (f"{detail} details", f"{load} load", f"{delete} delete", "Esc closes")
            self.hint(box, "Enter chooses or pulls", *hints)
            yield self._input
            yield self._list
            yield self._forecast
            yield self._note
            yield self._pulls

    def on_mount(self) -> None:
        self._say(_ASKING)
        self.run_worker(self._told(self._load()), name="models", group="models", exclusive=True)
        self.set_interval(_LOOK_EVERY_S, self._look)

    def on_resize(self) -> None:
        if self._list.option_count:
            self.call_after_refresh(self._narrow)

    async def _load(self) -> None:
        self._rows = await self._session.daemon.models()
        self._catalog = await self._session.daemon.catalog()
        self._narrow()

    async def _look(self) -> None:
        """The pulls, as they are now; a model that has come is listed at once."""
        before = {row.model for row in self._session.pulls.rows if row.state == "done"}
        try:
            await self._session.pulls.look()
        except LocalrunError:
            return  # the banner of the screen below says so
        rows = self._session.pulls.rows
        if self._ended_before is None:  # what went wrong before this was opened is no news
            self._ended_before = {(row.model, row.started_at_s) for row in rows if row.state not in _UNDER_WAY}
        news = [row for row in rows if (row.model, row.started_at_s) not in self._ended_before and row.state != "done"]
        self._pulls.update(Content("\n").join(Content(pull_line(row)) for row in news[-4:]))
        if self._said.startswith(_PULLING) and not self._session.pulls.is_running:
            self._say("")
        if self._states != [self._state(row) for row in self._rows]:
            self._narrow()
        if {row.model for row in rows if row.state == "done"} != before:
            await self._told(self._load())

    # --- the list ----------------------------------------------------------------------------------------------------

    @on(Input.Changed)
    def _typed(self) -> None:
        self._hub = []
        self._doomed = None
        self._say("")
        self._narrow()
        self._search(self._input.value.strip())

    @work(name="search", group="search", exclusive=True)
    async def _search(self, query: str) -> None:
        if len(query) < _FEWEST_LETTERS or model_file(query) is not None:
            return
        await asyncio.sleep(_SEARCH_AFTER_S)
        try:
            found = await self._session.daemon.search(query)
        except LocalrunError as error:
            found = {"problem": error.message}
        self._hub = found.get("hub") or []
        if self._hub:
            self._narrow()
        elif found.get("problem") and self._said in ("", _NOTHING):
            self._say(line(f"The hub was not searched: {found['problem']}"))

    def _narrow(self) -> None:
        text = self._input.value
        wanted = text.strip().lower()
        here = [row for row in self._rows if wanted in _name(row).lower()]
        names = {_name(row).lower() for row in self._rows}
        there = [
            each
            for each in self._catalog
            if wanted in f"{each['name']} {each['repo']} {each['use']}".lower() and each["name"].lower() not in names
        ]
        options: list[Option | None] = [self._option(row) for row in here]
        path = model_file(text)
        if path is not None:
            label = Content.assemble(Content.styled("file ", "$accent"), line(str(path)))
            options.append(Option(label, id=_HERE + str(path)))
        if there:
            options += [None, *map(self._entry, there)]
        if self._hub:
            options += [None, *(_hit(hit, self._row_width) for hit in self._hub)]
        highlighted = self._list.highlighted_option
        before = None if highlighted is None else highlighted.id
        self._states = [self._state(row) for row in self._rows]
        self._list.clear_options()
        self._list.add_options(options[1:] if options and options[0] is None else options)
        ids = [option.id for option in self._list.options]
        marked = before if before in ids or wanted else _HERE + self._session.model
        if ids:
            self._list.highlighted = ids.index(marked) if marked in ids else 0
        # What was said of something else (a pull, a model about to be deleted) stays: the hub answers when it likes.
        if not ids:
            self._say(_NOTHING)
        elif self._said in (_NOTHING, _ASKING):
            self._say("")

    def _option(self, row: dict[str, Any]) -> Option:
        name = _name(row)
        details = row.get("details") or {}
        facts = (
            column(str(details.get("parameter_size") or ""), 6, right=True),
            column(str(details.get("quantization_level") or ""), 7),
        )
        mark = "›" if name == self._session.model else " "
        return Option(self._row(mark, name, row.get("size"), facts, (self._state(row), "$success")), id=_HERE + name)

    def _state(self, row: dict[str, Any]) -> str:
        """Whether it is loaded, and how long still, in the largest unit: more has no room in 80 columns."""
        engine = self._session.engine_of(_name(row))
        if engine is None:
            return ""
        return "loaded" + ("" if engine.expires_in_s is None else f", {short_text.age(engine.expires_in_s).split()[0]}")

    def _entry(self, entry: dict[str, Any]) -> Option:
        """A model of the catalogue, and whether this machine has the memory for it."""
        smallest_gb = min(entry["quants"].values())
        snapshot = self._session.snapshot
        fits = snapshot is None or entry["memory_gb"] * _GB <= snapshot.system.memory_total_bytes
        verdict = ("fits", "$success") if fits else (f"wants {entry['memory_gb']:g} GB", "$warning")
        facts = (column(entry["use"], 15),)
        row = self._row(" ", entry["name"], round(smallest_gb * _GB), facts, verdict)
        return Option(row, id=_THERE + entry["name"])

    def _row(
        self, mark: str, name: str, size_bytes: int | None, facts: tuple[str, ...], state: tuple[str, str]
    ) -> Content:
        """In a narrow window the name gives way to the size, and the facts to the state."""
        name_width = max(_FEWEST_LETTERS, min(_NAME_WIDTH, self._row_width - _MARK_WIDTH - _SIZE_WIDTH))
        room = self._row_width - _MARK_WIDTH - name_width - _SIZE_WIDTH - _STATE_WIDTH
        shown = ""
        for fact in facts:
            room -= cell_len(fact) + _GAP
            shown += " " * _GAP + fact if room >= 0 else ""
        has_state = self._row_width >= _MARK_WIDTH + name_width + _SIZE_WIDTH + _STATE_WIDTH
        return Content.assemble(
            (mark.ljust(_MARK_WIDTH), "$primary bold"),
            column(name, name_width),
            Content.styled(f"{short_text.size(size_bytes):>{_SIZE_WIDTH}}{shown}", "$foreground 65%"),
            Content.styled(" " * _GAP + state[0] if has_state else "", state[1]),
        )

    @property
    def _row_width(self) -> int:
        return self._list.content_region.width - self._list.styles.scrollbar_size_vertical  # which may come

    def _say(self, text: str) -> None:
        self._said = text
        self._note.update(Content(text))
        self._note.display = bool(text)

    @on(OptionList.OptionHighlighted)
    def _show_forecast(self, event: OptionList.OptionHighlighted) -> None:
        """Of the marked model, if `localrun plan` was asked about it."""
        marked = next((row for row in self._rows if _HERE + _name(row) == event.option_id), {})
        forecast = marked.get("forecast")
        text = "" if forecast is None else _carries(forecast)
        self._forecast.update(Content(text))
        self._forecast.display = bool(text)

    # --- what can be done --------------------------------------------------------------------------------------------

    @on(Input.Submitted)
    def _choose_marked(self) -> None:
        option = self._list.highlighted_option
        if option is not None and option.id is not None:
            self._choose(option.id)

    @on(OptionList.OptionSelected)
    def _choose_clicked(self, event: OptionList.OptionSelected) -> None:
        if event.option_id is not None:
            self._choose(event.option_id)

    def _choose(self, option_id: str) -> None:
        name = option_id.removeprefix(_HERE).removeprefix(_THERE)
        if option_id.startswith(_HERE) and model_file(name) is not None:
            self.run_worker(self._told(self._take_file(name)), name="take", group="take")
        elif option_id.startswith(_HERE):
            self.dismiss(name)
        else:
            self._session.pulls.start(name)
            key = self._session.key("models.cancel")
            self._say(line(f"{_PULLING}{name}; it continues when this window is closed. {key} cancels it."))

    async def _take_file(self, path: str) -> None:
        await self._session.daemon.show(path)  # what is no model is refused here, not with the next question
        self.dismiss(path)

    def _marked(self, kind: str) -> str | None:
        """The name of the marked model, if it is of this kind."""
        option = self._list.highlighted_option
        if option is None or option.id is None or not option.id.startswith(kind):
            return None
        return option.id.removeprefix(kind)

    async def action_detail(self) -> None:
        name = self._marked(_HERE)
        if name is not None:
            await self.app.push_screen(ModelDetailScreen(self._session, name))

    def action_load(self) -> None:
        name = self._marked(_HERE)
        if name is not None:
            self.run_worker(self._told(self._load_or_unload(name)), name="load", group="load")

    async def _load_or_unload(self, name: str) -> None:
        daemon = self._session.daemon
        if self._session.engine_of(name) is None:
            self._say(line(f"Loading {name}…"))
            await daemon.load(name)
            self._say(line(f"{name} is loaded."))
        else:
            await daemon.unload(name)
            self._say(line(f"{name} is unloaded when its running requests have ended."))

    async def _told(self, work: Awaitable[None]) -> None:
        """Does something; what the daemon refuses is said."""
        try:
            await work
        except LocalrunError as error:
            self._say(line(error.message))

    def action_cancel(self) -> None:
        """Cancels the newest pull that runs."""
        running = [row for row in self._session.pulls.rows if row.state in _UNDER_WAY]
        if running:
            work = self._session.daemon.cancel_pull(running[-1].model)
            self.run_worker(self._told(work), name="cancel", group="cancel")
        else:
            self._say("Nothing is being pulled.")

    def action_delete(self) -> None:
        """Asks first: the second press deletes."""
        name = self._marked(_HERE)
        if name is None:
            return
        if not self._is_asked_again(name):
            self._say(line(f"{self._session.key('models.delete')} again deletes {name} from this machine."))
            return
        self._say(line(f"Deleting {name}…"))
        self.run_worker(self._told(self._delete(name)), name="delete", group="delete")

    async def _delete(self, name: str) -> None:
        freed = await self._session.daemon.remove(name)
        await self._told(self._load())
        said = f"Deleted {name}; {short_text.size(freed.get('freed_bytes', 0))} are free again."
        self._say(line("; ".join([said, *freed.get("notes", ())])))


def _carries(forecast: dict[str, Any]) -> str:
    n_chats = forecast["chats"]
    each = f"{short_text.rate(forecast['tokens_per_s'])} tok/s"
    return f"about {n_chats} chats at once at {each} each" if n_chats > 1 else f"about one chat at once at {each}"


def _hit(hit: dict[str, Any], row_width: int) -> Option:
    gated = "  gated" if hit.get("is_gated") else ""
    facts = f"  {short_text.count(hit.get('n_downloads'), widest=9_999):>6} downloads{gated}"
    name = str(hit["repo"])
    label = Content.assemble(" " * _MARK_WIDTH, column(name, min(_HUB_NAME_WIDTH, row_width - _MARK_WIDTH)))
    if label.cell_length + len(facts) <= row_width:
        label += Content.styled(facts, "$foreground 65%")
    return Option(label, id=f"{_THERE}hf.co/{name}")


def _name(row: dict[str, Any]) -> str:
    return str(row.get("name") or row.get("model") or "").removesuffix(":latest")
