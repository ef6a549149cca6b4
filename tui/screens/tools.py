"""The tools of a chat: which servers there are, what they offer, what is switched off in this chat, what was allowed.

Opening it starts the servers that do not run, since only they know their tools. What a server says of itself is drawn
as plain text and cut.

Does not: allow anything; that is asked for with a call.
"""

from __future__ import annotations

import sqlite3
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from localrun.tools.toolbox import Rule, Tool, Toolbox
from localrun.tui.conversation import Conversation
from localrun.tui.keys import bind
from localrun.tui.screens.dialog import Dialog
from localrun.tui.session import Session
from localrun.tui.short_text import column, fit, line
from localrun.visible import inert, shortened

_DESCRIPTION_CHARACTERS = 300
_NAME_WIDTH = 34
_STATE_WIDTH = 24


class ToolsScreen(Dialog[None]):
    """`toolbox` is the session's, which has one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close"),
        Binding("space", "switch", "On or off"),
        bind("tools.forget", "forget"),
    ]

    def __init__(self, session: Session, toolbox: Toolbox, conversation: Conversation) -> None:
        super().__init__()
        self._session = session
        self._toolbox = toolbox
        self._conversation = conversation
        self._list = OptionList()
        self._note = Static(id="note")

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Tools of this chat"
            self.hint(box, "Enter on/off", f"{self._session.key('tools.forget')} forget what was allowed", "Esc")
            yield self._list
            yield self._note

    def on_resize(self) -> None:
        self._show()

    def on_mount(self) -> None:
        self._note.update("Starting the servers…")
        self._look()

    @work(name="tools", group="tools", exclusive=True)
    async def _look(self) -> None:
        await self._toolbox.look(self._toolbox.names)
        self._show()

    def _show(self) -> None:
        marked = self._list.highlighted
        self._list.clear_options()
        for name in self._toolbox.names:
            tools = [tool for tool in self._toolbox.tools if tool.server == name]
            self._list.add_option(Option(self._server_row(name, len(tools)), id=f"server {name}"))
            self._list.add_options([Option(self._tool_row(tool), id=f"tool {tool.name}") for tool in tools])
        if self._list.option_count:
            self._list.highlighted = min(marked or 0, self._list.option_count - 1)
        self._describe()

    def _server_row(self, name: str, n_tools: int) -> Content:
        if name in self._conversation.tools.off:
            state, colour = "off", "$foreground 60%"
        elif name in self._toolbox.failures:
            state, colour = "not there", "$error"
        elif not self._toolbox.servers.is_running(name):
            state, colour = "not started", "$foreground 60%"
        else:
            state, colour = f"{n_tools} tools", "$success"
        return Content.assemble(Content.styled(column(name, _NAME_WIDTH), "bold"), Content.styled(state, colour))

    def _tool_row(self, tool: Tool) -> Content:
        state, colour = self._state_of(tool)
        room = max(0, self._list.scrollable_content_region.width - _NAME_WIDTH - _STATE_WIDTH - 2)
        return Content.assemble(
            Content.styled(f"  {column(inert(tool.own_name), _NAME_WIDTH - 2)}", "$accent"),
            Content.styled(column(state, _STATE_WIDTH), colour),
            Content.styled(fit(tool.description, room), "$foreground 60%"),
        )

    def _state_of(self, tool: Tool) -> tuple[str, str]:
        settings, rule = self._conversation.tools, self._toolbox.rule(tool)
        if rule is Rule.NEVER:
            return "never", "$error"
        if tool.name in settings.off or tool.server in settings.off:
            return "off", "$foreground 60%"
        if rule is Rule.ALWAYS:
            return "allowed always", "$warning"
        if tool.fingerprint in settings.allowed:
            return "allowed in this chat", "$warning"
        return "asks each time", "$success"

    @property
    def _marked(self) -> tuple[str, str]:
        """Whether a server or a tool is marked, and its name."""
        option = self._list.highlighted_option
        kind, _, name = (option.id or "").partition(" ") if option is not None else ("", "", "")
        return kind, name

    @on(OptionList.OptionHighlighted)
    def _describe(self) -> None:
        kind, name = self._marked
        tool = next((each for each in self._toolbox.tools if each.name == name), None)
        if kind == "server" and name in self._toolbox.failures:
            self._note.update(Content(f"{line(self._toolbox.failures[name])}. Enter tries it again."))
        elif kind == "tool" and tool is not None:
            said = line(shortened(tool.description, _DESCRIPTION_CHARACTERS)) or "nothing"
            self._note.update(Content(f"Models call it {tool.name}. Its server describes it: {said}"))
        else:
            self._note.update("")

    @on(OptionList.OptionSelected)
    def action_switch(self) -> None:
        """On or off in this chat; a server that is not there is tried again."""
        kind, name = self._marked
        if not kind:
            return
        off = self._conversation.tools.off
        if name in self._toolbox.failures and name not in off:
            self._toolbox.forget_failure(name)
            self._note.update(Content(f"Starting {name}…"))
            self._look()
            return
        try:
            self._conversation.set_tools(off=tuple(o for o in off if o != name) if name in off else (*off, name))
        except (KeyError, sqlite3.Error) as error:
            self.notify(line(f"It is not stored: {error}"), severity="warning", markup=False)
        self._show()

    def action_forget(self) -> None:
        """The tool, or all of the server, is asked for again."""
        kind, name = self._marked
        tools = [tool for tool in self._toolbox.tools if name == (tool.name if kind == "tool" else tool.server)]
        gone = {tool.fingerprint for tool in tools}
        try:
            for tool in tools:
                self._toolbox.store(tool, None)
            allowed = tuple(each for each in self._conversation.tools.allowed if each not in gone)
            if allowed != self._conversation.tools.allowed:
                self._conversation.set_tools(allowed=allowed)
        except (OSError, KeyError, sqlite3.Error) as error:
            self.notify(line(f"It is not stored: {error}"), severity="warning", markup=False)
        self._show()
