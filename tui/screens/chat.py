"""The chat: a conversation with the chosen model, the prompt, and the line with the live numbers.

There is one conversation per model, kept in memory while the app runs; choosing another model shows that one's, and an
answer that is being written goes on meanwhile. What stands in the prompt is only ever removed by being sent.
"""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import Screen
from textual.widgets import Footer

from localrun.snapshot import Snapshot
from localrun.tui import quantity
from localrun.tui.answer_progress import Fact
from localrun.tui.plain_text import fit
from localrun.tui.session import Session
from localrun.tui.widgets.banner import Banner
from localrun.tui.widgets.conversation_view import ConversationView
from localrun.tui.widgets.prompt import Prompt
from localrun.tui.widgets.status_line import StatusLine
from localrun.tui.widgets.top_bar import TopBar
from localrun.tui.widgets.welcome import Suggestion


class ChatScreen(Screen[None]):
    AUTO_FOCUS = "Prompt"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop"),
        Binding("ctrl+n", "new", "New chat", priority=True),
        Binding("ctrl+y", "copy", "Copy answer", priority=True),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._model = session.model
        self._views = {self._model: ConversationView(session, self._model)}
        self._bar = TopBar("chat")
        self._banner = Banner()
        self._conversations = Container(self.view, id="conversations")
        self._prompt = Prompt()
        self._status = StatusLine()
        self._was_answering = False

    def compose(self) -> ComposeResult:
        yield self._bar
        yield self._banner
        yield self._conversations
        yield self._prompt
        yield self._status
        yield Footer()

    async def on_mount(self) -> None:
        self._bar.model = self._model
        self._on_connection(self._session.trouble)
        self._session.snapshots.subscribe(self, self._on_snapshot)
        self._session.connection.subscribe(self, self._on_connection)
        self._session.models.subscribe(self, self._on_model)

    @property
    def view(self) -> ConversationView:
        """The conversation on the screen."""
        return self._views[self._model]

    async def _on_model(self, model: str) -> None:
        self._model = self._bar.model = model
        if model in self._views:
            self._show_view()
        else:
            await self._begin(model)

    async def _begin(self, model: str) -> None:
        """An empty conversation in place of what was there."""
        # Known before it is mounted: between the awaits here, others ask for the view.
        former = self._views.get(model)
        view = self._views[model] = ConversationView(self._session, model)
        if former is not None:
            await former.remove()
        await self._conversations.mount(view)
        self._show_view()

    def _show_view(self) -> None:
        for view in self._views.values():
            view.display = view is self.view
        self._prompt.focus()
        self._show_status()

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        for view in self._views.values():
            view.see(snapshot)
        if self.is_current:
            self._show_status()

    def _on_connection(self, trouble: str | None) -> None:
        self._bar.connected = trouble is None
        self._banner.show(trouble, self._session.base_url)
        self._show_status()

    @on(ConversationView.Progressed)
    def _show_status(self) -> None:
        view = self.view
        facts = view.progress.facts() if view.progress else self._idle_facts(view)
        # The top bar names the model too, so it is the first to go.
        self._status.facts = (*facts, Fact(fit(self._model, 24), 9))
        placeholder = "Enter asks the marked question" if view.welcome else "Ask something"
        self._prompt.placeholder = "Answering… Esc stops it" if view.is_answering else placeholder
        if view.is_answering != self._was_answering:
            self._was_answering = view.is_answering
            self.refresh_bindings()

    def _idle_facts(self, view: ConversationView) -> list[Fact]:
        """Before the first question: whether the model is in memory."""
        if self._session.trouble is not None:
            return [Fact("no daemon", 0, "bad")]
        if self._session.snapshot is None:
            return [Fact("connecting", 0, "wait")]
        engine = self._session.engine_of(view.conversation.model)
        if engine is None:
            return [Fact("ready", 0, "good"), Fact("the model loads with the first question", 1)]
        facts = [Fact("ready" if engine.state == "ready" else engine.state, 0, "good")]
        if engine.n_ctx:
            facts.append(Fact(f"context {quantity.count(engine.n_ctx)} tokens", 1))
        if engine.backend:
            facts.append(Fact(engine.backend, 2))
        return facts

    @on(Prompt.Submitted)
    def _submit(self, event: Prompt.Submitted) -> None:
        self._ask(event.text or (self.view.welcome.marked if self.view.welcome else ""))

    @on(Suggestion.Chosen)
    def _ask_suggestion(self, event: Suggestion.Chosen) -> None:
        self._ask(event.text)

    def _ask(self, question: str) -> None:
        if not question:
            return
        if self.view.is_answering:
            self.notify("The model is still answering; Esc stops it.", severity="warning")
            return
        if self._prompt.text.strip() == question:
            self._prompt.take()
        self.view.ask(question)

    @on(Prompt.Browsed)
    def _browse(self, event: Prompt.Browsed) -> None:
        if self.view.welcome:
            self.view.welcome.move(event.step)

    @on(ConversationView.Unsent)
    def _give_back(self, event: ConversationView.Unsent) -> None:
        if event.view is self.view:
            self._prompt.give_back(event.question)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "stop":
            # Disabled rather than hidden, so that the other keys do not move when an answer begins.
            return True if self.view.is_answering else None
        return True

    def action_stop(self) -> None:
        self.view.stop()

    async def action_new(self) -> None:
        """Ends a running answer, too: removing the view cancels its worker."""
        await self._begin(self._model)

    def action_copy(self) -> None:
        answer = self.view.conversation.last_answer()
        if answer is None:
            self.notify("There is no answer to copy yet.", severity="warning")
            return
        self.app.copy_to_clipboard(answer)
        self.notify(f"Copied {quantity.count(len(answer))} characters.")

    def action_scroll_conversation(self, pages: int) -> None:
        if pages < 0:
            self.view.scroll_page_up(animate=False)
        else:
            self.view.scroll_page_down(animate=False)
