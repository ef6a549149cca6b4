"""The chat: conversations, the prompt, and the line with the live numbers.

Any number of chats may be open and being answered; one is shown, or two beside each other, and the prompt belongs to
the marked one. What stands in the prompt is only ever removed by being sent. It waits for its chat while another is
gone to, and at the end of the program it is kept with it, and the next window begins there.

Does not: read answers (`conversation_view.py`), or know what a slash command does (`chat_commands.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.screen import Screen

from localrun.attachments import check_amount, check_kind
from localrun.errors import LocalrunError
from localrun.last_model import first_model
from localrun.snapshot import Snapshot
from localrun.tui import short_text, slash
from localrun.tui.answer_progress import StatusPart
from localrun.tui.conversation import Conversation
from localrun.tui.files import Question, attached, edited
from localrun.tui.history import Message
from localrun.tui.keys import bind
from localrun.tui.media import AttachedFile
from localrun.tui.screens.chats import ChatsScreen
from localrun.tui.session import Session
from localrun.tui.short_text import fit, line
from localrun.tui.slash import completions
from localrun.tui.widgets.conversation_view import ConversationView
from localrun.tui.widgets.messages import AnswerMessage, Suggestion, UserMessage
from localrun.tui.widgets.prompt import Attachments, Completions, Prompt, StatusLine
from localrun.tui.widgets.top_bar import Banner, KeyLine, TopBar

# Chats that stay mounted though nobody looks at them; older ones are opened again from the history.
MAX_IDLE_VIEWS = 6
MAX_BESIDE = 2


# What a slash command does to the screen.
CarryOut = Callable[["ChatScreen", slash.Slash], Awaitable[None]]


class ChatScreen(Screen[None]):
    AUTO_FOCUS = "Prompt"

    # textual declares these as instance variables
    VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-medium")]  # noqa: RUF012
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (70, "-wide")]  # noqa: RUF012

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("chat.stop", "stop"),
        bind("chat.new", "new", priority=True),
        bind("chat.list", "chats", priority=True),
        bind("chat.copy", "copy", priority=True),
        bind("chat.beside", "beside", show=False, priority=True),
        bind("chat.other", "other", show=False, priority=True),
        bind("chat.editor", "editor", show=False, priority=True),
    ]

    def __init__(self, session: Session, carry_out: CarryOut) -> None:
        super().__init__()
        self.session = session
        self._carry_out = carry_out
        self.view = ConversationView(session, Conversation(session.history, session.model, session.clock))
        self._shown = [self.view]
        self._open = [self.view]
        self._bar = TopBar("chat", session)
        self._conversations = Horizontal(self.view, id="conversations")
        self._attachments = Attachments()
        self._completions = Completions()
        self.prompt = Prompt(self._completions)
        self._status = StatusLine()
        self._drafts: dict[int | None, list[Question]] = {}  # what waits, by the chat's number; None for one to begin
        self._was_answering = False
        self._has_begun = False
        # Nobody knows yet which model answers, and what is asked waits for it.
        self._waits_for_model = session.last_model_file is not None
        self._early: Prompt.Submitted | None = None

    def compose(self) -> ComposeResult:
        yield self._bar
        yield Banner(self.session)
        yield self._conversations
        yield self._attachments
        yield self._completions
        yield self.prompt
        yield self._status
        yield KeyLine()

    async def on_mount(self) -> None:
        for notices in self.query("ToastRack"):
            self.move_child(notices, after=self._conversations)
        self._show_status()
        self.session.snapshots.subscribe(self, self._on_snapshot)
        self.session.connection.subscribe(self, self._on_connection)
        self.session.models.subscribe(self, self._on_model)
        self.session.deleted.subscribe(self, self._on_deleted)
        with self._history_said("A draft cannot be read"):
            chat_id = self.session.history.drafted_chat()
            if chat_id is not None:
                await self.open_chat(chat_id)
        self._take_back()

    def on_unmount(self) -> None:
        own = self.view.conversation.chat_id
        waiting = self._drafts.pop(own, [])
        self._drafts[own] = [*waiting, Question(self.prompt.text)]  # the last one: there the next window begins
        for chat_id, questions in self._drafts.items():
            text = "\n\n".join(question.text for question in reversed(questions) if question.text.strip())
            if text:
                with contextlib.suppress(sqlite3.Error):  # the app has said that it keeps no chats
                    self.session.history.keep_draft(chat_id, text)

    # --- which chats are shown -------------------------------------------------------------------------------------

    async def _on_model(self, model: str) -> None:
        """Another model was chosen: the chat with it that was used last, or a new one."""
        if self.view.conversation.model == model:
            return
        found = [view for view in reversed(self._open) if view.conversation.model == model and view not in self._shown]
        await self._replace(found[0] if found else self._new_view(model))

    async def open_chat(self, chat_id: int) -> None:
        """Show a chat of the history; one that is open already is gone to. Raises KeyError for one that was deleted,
        and sqlite3.Error."""
        view = next((view for view in self._open if view.conversation.chat_id == chat_id), None)
        if view is None:
            history = self.session.history
            conversation = Conversation(history, "", self.session.clock, history.chat(chat_id))
            view = ConversationView(self.session, conversation)
        elif not view.is_answering and view.conversation.read_again():
            await view.reload()
        self._put_aside()
        if view in self._shown:
            self._mark(view)
        else:
            await self._replace(view)

    async def _on_deleted(self, chat_id: int) -> None:
        """A chat that was deleted leaves the screen, with its answer if one is written; a new one takes its place."""
        self._drafts.setdefault(None, []).extend(self._drafts.pop(chat_id, []))
        for gone in [view for view in self._open if view.conversation.chat_id == chat_id]:
            gone.stop()
            if gone in self._shown:
                marked, self.view = self.view, gone
                await self._replace(self._new_view(gone.conversation.model))
                if marked is not gone:
                    self._mark(marked)
            if gone in self._open:
                self._open.remove(gone)
                await gone.remove()

    def _new_view(self, model: str) -> ConversationView:
        return ConversationView(self.session, Conversation(self.session.history, model, self.session.clock))

    async def _replace(self, view: ConversationView) -> None:
        """Show a chat in the place of the marked one, whose answer goes on unseen."""
        self._shown[self._shown.index(self.view)] = view
        self.view = view
        if view not in self._open:
            self._open.append(view)
            await self._conversations.mount(view)
        await self._arrange()

    async def _arrange(self) -> None:
        self._open.remove(self.view)
        self._open.append(self.view)
        idle = [view for view in self._open if view not in self._shown and not view.is_answering]
        for view in idle[:-MAX_IDLE_VIEWS] + [view for view in idle if not view.conversation.messages]:
            if view in self._open:
                self._open.remove(view)
                await view.remove()
        for view in self._open:
            view.set_class(view not in self._shown, "-away")
        for before, view in zip(self._shown, self._shown[1:], strict=False):
            self._conversations.move_child(view, after=before)
        self._mark(self.view)

    def _mark(self, view: ConversationView) -> None:
        """The prompt belongs to this chat from now on."""
        self.view = view
        self._bar.model = self.session.model = view.conversation.model
        for shown in self._shown:
            shown.set_class(len(self._shown) > 1 and shown is view, "-marked")
            shown.set_class(len(self._shown) > 1 and shown is not view, "-unmarked")
        self.prompt.focus()
        self._take_back()
        self._show_status()

    async def show_model(self, model: str) -> None:
        """The marked chat goes on with another model."""
        self._bar.model = model
        if self.view.welcome:
            await self.view.welcome.remove()
            await self.view.mount(self.view.greeting(model))
        self._show_status()

    async def action_new(self) -> None:
        """An answer that is being written goes on; its chat is in the list."""
        self._put_aside()
        await self._replace(self._new_view(self.session.model))

    async def action_beside(self) -> None:
        """A second chat beside the marked one; or back to one."""
        if len(self._shown) < MAX_BESIDE:
            self._put_aside()
            view = self._new_view(self.session.model)
            self._shown.append(view)
            self._open.append(view)
            self.view = view
            await self._conversations.mount(view)
        else:
            self._shown = [self.view]
        await self._arrange()

    def action_other(self) -> None:
        if len(self._shown) > 1:
            self._put_aside()
            self._mark(self._shown[1 - self._shown.index(self.view)])

    async def action_chats(self, words: str = "") -> None:
        async def chosen(chat_id: int | None) -> None:
            if chat_id is None:
                return
            with self._history_said("The chat cannot be read"):
                await self.open_chat(chat_id)

        await self.app.push_screen(ChatsScreen(self.session, words), chosen)

    # --- what is going on --------------------------------------------------------------------------------------------

    async def _on_connection(self, trouble: str | None) -> None:
        self._show_status()
        if trouble is not None:
            await self._ask_early()

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        if not self._has_begun:
            self._has_begun = self._waits_for_model = True
            self.run_worker(self._choose_first_model(), name="first model", group="first model")
        for view in self._open:
            view.see(snapshot)
        if self.is_current:
            self._show_status()

    @on(ConversationView.AnswerChanged)
    def _show_status(self) -> None:
        view = self.view
        parts = view.progress.parts() if view.progress else self._idle_parts(view)
        if view.conversation.is_edited:
            parts = [StatusPart("editing", 0, "wait"), StatusPart("Esc leaves it as it was", 1)]
        # The top bar names the model too, so it is the first to go.
        self._status.parts = (*parts, StatusPart(short_text.model(view.conversation.model, 24), 9))
        placeholder = "Ask something, or / for commands"
        if view.welcome:
            placeholder = "Enter asks the marked question"
        if self._attachments.files:
            placeholder = "Ask something about it; Backspace takes the last file away"
        if view.is_answering:
            placeholder = "Shift+Tab goes to what is asked, Esc stops" if view.choices else "Answering… Esc stops it"
        self.prompt.placeholder = placeholder
        if view.is_answering != self._was_answering:
            self._was_answering = view.is_answering
            self.refresh_bindings()

    def _idle_parts(self, view: ConversationView) -> list[StatusPart]:
        """Before the first question: whether the model is in memory."""
        if self.session.trouble is not None:
            return [StatusPart("not connected" if self.session.machine else "no daemon", 0, "bad")]
        if self.session.snapshot is None:
            return [StatusPart("connecting", 0, "wait")]
        engine = self.session.engine_of(view.conversation.model)
        if engine is None:
            return [StatusPart("ready", 0, "good"), StatusPart("the model loads with the first question", 1)]
        parts = [StatusPart("ready" if engine.state == "ready" else engine.state, 0, "good")]
        if engine.n_ctx:
            parts.append(StatusPart(f"context {short_text.count(engine.n_ctx)} tokens", 1))
        if engine.backend:
            parts.append(StatusPart(engine.backend, 2))
        return parts

    async def _choose_first_model(self) -> None:
        """Once, when the daemon is there, unless something was asked or chosen already."""
        begun_with, last = self.session.model, self.session.last_model()
        with contextlib.suppress(LocalrunError):  # the banner says so, and F3 lists models whenever one likes
            model = await first_model(self.session.daemon, last)
            if self.session.model == begun_with != model and self.view.welcome:
                await self._on_model(model)
                self.session.choose(model)
                if last:
                    self.notify(line(f"{last}, which you used last, is no longer here; {model} answers."), markup=False)
        await self._ask_early()

    async def _ask_early(self) -> None:
        """What was asked while nobody knew which model would answer."""
        self._waits_for_model, early, self._early = False, self._early, None
        if early is not None:
            await self._submit(early)

    # --- asking ------------------------------------------------------------------------------------------------------

    @on(Prompt.Submitted)
    async def _submit(self, event: Prompt.Submitted) -> None:
        command = slash.parse(event.text)
        if command is not None:
            await self._carry_out(self, command)
        elif self._waits_for_model:
            self._early = event
        else:
            text = slash.unescaped(event.text)
            if text or self._attachments.files or not self.view.welcome:
                self._ask(text)
            else:
                self._ask(self.view.welcome.marked.text)

    @on(Prompt.Changed)
    def _suggest(self) -> None:
        if self.prompt.text.startswith("/"):
            self._complete()
        else:
            self._completions.show("", ())

    @work(group="complete", exclusive=True)
    async def _complete(self) -> None:
        text = self.prompt.text
        files = [attached.file.name for attached in self._attachments.files]
        found = await completions(text, self.session.daemon, self.view.conversation, files)
        if text == self.prompt.text:
            self._completions.show(text, found)

    @on(Suggestion.Chosen)
    def _ask_clicked(self, event: Suggestion.Chosen) -> None:
        self._ask(event.text)

    def _ask(self, question: str) -> None:
        if not question and not any(attached.medium for attached in self._attachments.files):
            return
        if self._refuse_while_answering():
            return
        if slash.unescaped(self.prompt.text.strip()) == question:
            self.prompt.take()
        self.view.ask(Question(question, self._attachments.take()))
        self._take_draft()

    def _put(self, question: Question) -> None:
        """Into the prompt, with its files."""
        self.prompt.put(question.text)
        self._attachments.add(*question.attachments)
        self._show_status()

    async def attach(self, paths: Sequence[Path]) -> None:
        """Send these files with the next question; all of them or, with the reason raised as LocalrunError, none."""
        files = [await asyncio.to_thread(attached, path) for path in paths]
        await self.attach_files(files)

    async def attach_files(self, files: Sequence[AttachedFile]) -> None:
        """As `attach`, for files that were read."""
        model, media = self.view.conversation.model, [file.medium for file in files if file.medium is not None]
        if media:
            taken = await self.session.taken_kinds(model)
            for medium in media:
                check_kind(model, taken, medium.kind, medium.name)
            there = [file.medium for file in self._attachments.files if file.medium is not None]
            check_amount([medium.size_bytes for medium in (*there, *media)])
        self._attachments.add(*files)
        self._show_status()

    @on(Prompt.FilesDropped)
    async def _attach_dropped(self, event: Prompt.FilesDropped) -> None:
        """What cannot be attached is text, as everything else that is pasted."""
        try:
            await self.attach(event.paths)
        except LocalrunError as error:
            self.prompt.insert(event.text)
            self.notify(line(str(error)), severity="warning", markup=False)

    def detach(self, name: str) -> str:
        """The file of this name, or the last one, does not go with the question: its name. Raises KeyError."""
        names = [each.file.name for each in self._attachments.files]
        if not names or (name and name not in names):
            raise KeyError(name)
        index = names.index(name) if name else len(names) - 1
        self._attachments.action_detach(index)
        self._show_status()
        return names[index]

    @on(Prompt.BackspacePressed)
    def _detach_last(self) -> None:
        if self._attachments.files:
            self.detach("")

    async def edit(self, message: Message) -> None:
        """Take a question back into the prompt; what is asked instead begins another branch. What stood in the prompt
        comes back when that is asked or given up."""
        if self._refuse_while_answering():
            return
        self._put_aside()
        question = await self._asked_before(message)
        if names := question.gone:
            self.notify(line(f"{names} is gone from the disk; attach it again."), severity="warning", markup=False)
        self.view.conversation.edit(message)
        await self.view.reload()
        self._put(question)
        self.prompt.focus()
        self.refresh_bindings()

    async def _give_up_edit(self) -> None:
        """The chat is as before the edit; ↑ brings back what was typed."""
        self.view.conversation.give_up_edit()
        await self.view.reload()
        self.prompt.take()
        self._attachments.take()
        self._take_draft()
        self._show_status()
        self.refresh_bindings()

    def _put_aside(self) -> None:
        """What is being written waits for its chat."""
        if self.prompt.text.strip() or self._attachments.files:
            waiting = self._drafts.setdefault(self.view.conversation.chat_id, [])
            waiting.append(Question(self.prompt.text, self._attachments.take()))
            self.prompt.put("")

    def _take_draft(self) -> None:
        waiting = self._drafts.get(self.view.conversation.chat_id)
        if waiting and not self.prompt.text.strip() and not self._attachments.files:
            self._put(waiting.pop())

    async def retry(self, message: Message) -> None:
        """Ask a question again, as it was; not without a file that is gone."""
        if self._refuse_while_answering():
            return
        question = await self._asked_before(message)
        if names := question.gone:
            self.notify(
                line(f"{names} is gone from the disk; edit the question to ask without it, or attach it again."),
                severity="warning", markup=False,
            )  # fmt: skip
            return
        if message is not self.view.conversation.unanswered:
            self.view.conversation.back_to(message)
            await self.view.reload()
        self.view.ask(question)

    async def _asked_before(self, message: Message) -> Question:
        return await asyncio.to_thread(Question.of, message, self.session.history.files.get)

    def _refuse_while_answering(self) -> bool:
        if self.view.is_answering:
            self.notify("The model is still answering; Esc stops it.", severity="warning")
        return self.view.is_answering

    def last_question(self) -> Message | None:
        messages = self.view.conversation.messages
        return next((message for message in reversed(messages) if message.role == "user"), None)

    @on(Prompt.ArrowPressed)
    def _browse(self, event: Prompt.ArrowPressed) -> None:
        if self.view.welcome:
            self.view.welcome.move(event.step)
            self._show_status()

    @on(ConversationView.ApprovalNeeded)
    def _show_what_is_asked(self, event: ConversationView.ApprovalNeeded) -> None:
        """The focus goes there only from an empty prompt: who types goes on typing."""
        if not event.choices.is_attached:
            return
        if event.view is self.view and self.is_current and self.prompt.has_focus and not self.prompt.text:
            event.choices.focus()
        else:
            where = "above" if event.view in self._shown else f"in “{fit(event.view.conversation.title, 40)}”"
            self.notify(f"A model asks {where} whether it may call a tool.", markup=False)
        self._show_status()

    @on(ConversationView.ApprovalGiven)
    def _go_back_to_prompt(self) -> None:
        self.prompt.focus()

    @on(ConversationView.QuestionReturned)
    def _give_back(self, event: ConversationView.QuestionReturned) -> None:
        self._drafts.setdefault(event.view.conversation.chat_id, []).append(event.question)
        if event.view is self.view:
            self._take_draft()

    def _take_back(self) -> None:
        """What waits for the marked chat, or was not sent when its window was closed, goes into the prompt, after what
        is typed now."""
        chat_id = self.view.conversation.chat_id
        with self._history_said("A draft cannot be read"):
            kept = map(Question, self.session.history.take_drafts(chat_id))
            self._drafts.setdefault(chat_id, []).extend(kept)
        self._take_draft()

    @on(Prompt.FocusMessages)
    def _go_to_messages(self) -> None:
        self.view.focus_newest()

    def on_key(self, event: events.Key) -> None:
        """What is typed while something else has the focus is meant for the prompt."""
        is_text = event.is_printable and event.key not in self.active_bindings
        if event.character and is_text and not self.prompt.has_focus:
            event.stop()
            self.prompt.focus()
            self.prompt.insert(event.character)

    def on_paste(self, event: events.Paste) -> None:
        if not self.prompt.has_focus:
            event.stop()
            self.prompt.focus()
            self.prompt.post_message(events.Paste(event.text))

    # --- with a message that has the focus ---------------------------------------------------------------------------

    @on(UserMessage.ActionChosen)
    async def _do_with_question(self, event: UserMessage.ActionChosen) -> None:
        if event.what == "edit":
            await self.edit(event.message)
        elif event.what == "retry" and self.session.trouble is not None:
            await self.run_action("app.reconnect")  # the banner says that this key does that
        elif event.what == "retry":
            await self.retry(event.message)
        else:
            await self._show_version(event.message, -1 if event.what == "previous" else 1)

    async def _show_version(self, message: Message, step: int) -> None:
        if self._refuse_while_answering():
            return
        conversation = self.view.conversation
        with self._history_said("The history cannot be read"):
            number = conversation.messages.index(message)
            if conversation.show_version(message, step):
                await self.view.reload(number)

    @contextlib.contextmanager
    def _history_said(self, title: str) -> Iterator[None]:
        """What the history refuses within this is told, and does not end the app."""
        try:
            yield
        except KeyError:
            self.notify("This chat was deleted in another window.", severity="warning")
        except sqlite3.Error as error:
            self.notify(line(str(error)), title=title, severity="error", markup=False)

    @on(AnswerMessage.CopyRequested)
    def _copy_from_answer(self, event: AnswerMessage.CopyRequested) -> None:
        self.copy(event.text, event.what)

    # --- keys --------------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "stop":
            # Disabled rather than hidden, so that the other keys do not move when an answer begins.
            has_use = self.view.is_answering or self.view.conversation.is_edited or not self.prompt.has_focus
            return True if has_use else None
        return True

    async def action_stop(self) -> None:
        if not self.prompt.has_focus:
            self.prompt.focus()
        elif self.view.is_answering:
            self.view.stop()
        elif self.view.conversation.is_edited:
            await self._give_up_edit()

    def interrupt(self) -> bool:
        """Stops the answer, or else empties the prompt, which Ctrl-Z undoes; false if there is neither."""
        if self.view.is_answering:
            self.view.stop()
        elif self.prompt.text:
            self.prompt.clear()
        else:
            return False
        return True

    def action_copy(self) -> None:
        if self.prompt.has_focus and self.prompt.history.redo_stack:  # what the key does in every text box
            self.prompt.redo()
            return
        marked = self.focused.message if isinstance(self.focused, AnswerMessage) else None
        self.copy(marked.content if marked else self.view.conversation.last_answer(), "answer")

    def copy(self, text: str | None, what: str) -> None:
        """To the clipboard, by way of the terminal."""
        if not text:
            self.notify(f"There is no {what} to copy yet.", severity="warning")
            return
        self.app.copy_to_clipboard(text)
        self.notify(f"Copied {short_text.count(len(text))} characters.")

    def action_editor(self) -> None:
        with tempfile.TemporaryDirectory(prefix="localrun-") as folder, self.app.suspend():
            try:
                text = edited(self.prompt.text, Path(folder))
            except (OSError, subprocess.SubprocessError) as error:
                self.notify(line(str(error)), title="The editor failed", severity="error", markup=False)
                return
        self.prompt.put(text)

    def action_scroll_conversation(self, pages: int) -> None:
        if pages < 0:
            self.view.scroll_page_up(animate=False)
        else:
            self.view.scroll_page_down(animate=False)
