"""One chat on the screen, and the reading of its answers.

Owns its messages as widgets, and at most one running answer. The answer is read in a task of its own; cancelling that
task closes the stream, which makes the daemon cancel the request. Whatever ends an answer, the text that came stays and
the view is ready for the next question.

Where tools are configured, an answer may have several rounds: the model calls tools, each call is shown and, unless it
was allowed before, asked for; the results go back to the model, which answers anew. Every round is kept when it is
over, and every call has a result, also when it was stopped.

A long chat is mounted from its end: the last `PAGE` messages, and a page more whenever one scrolls to the top.

Does not: know about other chats, or about the event stream beyond the row of its own request.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.message import Message as Event
from textual.widget import Widget
from textual.worker import Worker

from localrun.attachments import MAX_MEDIA, MAX_MEDIA_BYTES, Attachment, Kind, check_kind, media_kind
from localrun.errors import Cancelled, LocalrunError
from localrun.snapshot import Snapshot
from localrun.tools.toolbox import (
    MAX_ROUNDS,
    NOT_RUN,
    REFUSED,
    STOPPED,
    Approval,
    Call,
    Outcome,
    Rule,
    Tool,
    Toolbox,
    calls_of,
)
from localrun.tui.answer_progress import AnswerProgress
from localrun.tui.conversation import Conversation
from localrun.tui.files import Question
from localrun.tui.history import Message
from localrun.tui.media import Medium, examined, extra_of, media_of
from localrun.tui.session import Session
from localrun.tui.short_text import line
from localrun.tui.widgets.gallery import Gallery
from localrun.tui.widgets.messages import AnswerMessage, Notice, UserMessage, Welcome
from localrun.tui.widgets.tool_calls import Choices, GoOn, ToolCall
from localrun.visible import inert

PAGE = 16
# Final numbers such as the TTFT come with the next snapshot, so a finished answer looks at a few more of them.
_LAST_LOOKS = 8


@dataclass
class _Turn:
    """A question under way, and as much of its answer as came; of several rounds the last one's."""

    question: Question
    asked: UserMessage
    answer: AnswerMessage
    text: str = ""
    thinking: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_answer(self) -> bool:
        return bool(self.text or self.thinking or self.tool_calls)

    def go_on(self, answer: AnswerMessage) -> None:
        """The next round begins."""
        self.answer, self.text, self.thinking, self.tool_calls = answer, "", "", []


class ConversationView(VerticalScroll, can_focus=False):
    """`progress` is that of the running or last answer; None before the first."""

    class AnswerChanged(Event):
        """The running answer has news worth showing."""

    @dataclass
    class ApprovalNeeded(Event):
        """A call waits for a person to allow it."""

        view: ConversationView
        choices: Choices[Any]

    class ApprovalGiven(Event):
        """A person has answered what was asked."""

    @dataclass
    class QuestionReturned(Event):
        """Nothing came back for this question. It is kept, and may be asked again, or another in its place."""

        view: ConversationView
        question: Question

    def __init__(self, session: Session, conversation: Conversation) -> None:
        super().__init__()
        self.conversation = conversation
        self.progress: AnswerProgress | None = None
        self._session = session
        self._worker: Worker[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answer: AnswerMessage | None = None
        self._looks_left = 0
        self._n_hidden = max(0, len(conversation.messages) - PAGE)
        self._is_paging = False
        self._has_told_trouble = False
        self._told_left_out: list[str] = []
        self._n_gone = 0

    def compose(self) -> ComposeResult:
        if not self.conversation.messages:
            yield self.greeting(self.conversation.model)
        yield from self._widgets(self.conversation.messages[self._n_hidden :])

    def on_mount(self) -> None:
        if self.conversation.messages:
            self.call_after_refresh(self.scroll_end, animate=False)

    def on_resize(self) -> None:
        self._anchor_if_long()

    def watch_virtual_size(self) -> None:
        self._anchor_if_long()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if new_value < 2 and new_value < old_value and self._n_hidden and not self._is_paging:
            self._is_paging = True
            self.run_worker(self._show_earlier(), name="earlier", group="earlier")

    def _anchor_if_long(self) -> None:
        """Sticks to the bottom once there is more than fits. A short anchored view would be pushed down instead."""
        is_long = self.virtual_size.height > self.container_size.height
        if is_long != self.is_anchored:
            self.anchor(is_long)
            if not is_long and self.scroll_y < 0:  # it was laid out in between
                self.scroll_y = 0

    @property
    def welcome(self) -> Welcome | None:
        """The greeting, while the conversation is empty."""
        return next(iter(self.query(Welcome)), None)

    def greeting(self, model: str) -> Welcome:
        """A new one, of this model."""
        return Welcome(model, self._session.machine, self._session.key("app.models").partition(" ")[0])

    @property
    def choices(self) -> Choices[Any] | None:
        """What waits for a person's answer."""
        return next(iter(self.query(Choices)), None)

    @property
    def is_answering(self) -> bool:
        return self._worker is not None and not self._worker.is_finished

    def ask(self, question: Question) -> None:
        """Sends a question. Must not be called while an answer runs."""
        assert not self.is_answering
        self.progress = AnswerProgress(self._session.client_name)
        self._worker = self.run_worker(self._run(question), name="answer")
        self.post_message(self.AnswerChanged())

    def stop(self) -> None:
        """Ends the running answer; does nothing when there is none."""
        if self._reading is not None:
            self._reading.cancel()

    async def reload(self, marked: int | None = None) -> None:
        """Shows the conversation as it is now, after it went back or to another version: its end, or the message with
        the number `marked`, which gets the focus."""
        n_messages = len(self.conversation.messages)
        self._n_hidden = max(0, min(n_messages - PAGE, n_messages if marked is None else marked))
        widgets = self._widgets(self.conversation.messages[self._n_hidden :])
        async with self.batch():
            await self.remove_children()
            await self.mount(*widgets)
        if marked is None:
            self.scroll_end(animate=False)
        else:
            self.call_after_refresh(self._focus, widgets[marked - self._n_hidden])

    def _focus(self, widget: Widget) -> None:
        self.release_anchor()
        self.screen.set_focus(widget, scroll_visible=False)
        self.scroll_to_widget(widget, top=True, animate=False, force=True)

    def focus_newest(self) -> None:
        """The newest message, or what waits for an answer, gets the focus; nothing does in an empty chat."""
        newest = [widget for widget in self.screen.focus_chain if self in widget.ancestors]
        if newest:
            newest[-1].focus()

    def see(self, snapshot: Snapshot) -> None:
        """Takes the news of the running answer, and the last ones of an answer that has just ended."""
        progress = self.progress
        if progress is None or (progress.outcome is not None and not self._looks_left):
            return
        self._looks_left = max(0, self._looks_left - 1)
        progress.see(snapshot)
        if progress.outcome is not None and self._answer is not None and progress.request_id is not None:
            self._answer.show_caption(progress.caption())
        self.post_message(self.AnswerChanged())

    # --- what was said ---------------------------------------------------------------------------------------------

    def _widgets(self, messages: list[Message]) -> list[Widget]:
        return [self._widget(message) for message in messages]

    def _widget(self, message: Message) -> Widget:
        if message.role == "user":
            shown = str(message.extra.get("shown", message.content))
            asked = UserMessage(shown, message, self.conversation.versions(message), self._gallery(message.extra))
            is_under_way = self.is_answering and message is self.conversation.unanswered
            if self.conversation.is_unanswered(message) and not is_under_way:
                asked.mark_unanswered()
            return asked
        if message.role == "tool":
            return ToolCall.kept(message.content, message.extra, self._gallery(message.extra))
        answer = AnswerMessage(message.content, str(message.extra.get("thinking", "")), message)
        answer.call_after_refresh(answer.show_caption, str(message.extra.get("caption", "")))
        has_results = self.conversation.has_results(message)
        if message.extra.get("tool_calls") and not has_results:
            answer.call(message.extra["tool_calls"])
        answer.display = bool(message.content or message.extra.get("thinking") or not has_results)
        return answer

    def _gallery(self, extra: dict[str, Any]) -> Gallery | None:
        media = media_of(extra)
        return Gallery(media, self._session.thumbnails, self._session.history.files.get) if media else None

    async def _show_earlier(self) -> None:
        """A page more at the top; what is on the screen stays where it is."""
        height_before = self.virtual_size.height
        first = max(0, self._n_hidden - PAGE)
        page = self._widgets(self.conversation.messages[first : self._n_hidden])
        self._n_hidden = first
        await self.mount(*page, before=0)

        def stay() -> None:
            self.scroll_relative(y=self.virtual_size.height - height_before, animate=False, force=True)
            self._is_paging = False

        self.call_after_refresh(stay)

    # --- an answer ---------------------------------------------------------------------------------------------------

    async def _run(self, question: Question) -> None:
        await self.query(Welcome).remove()
        shown = str(question.extra.get("shown", question.text))
        if question.media:
            await asyncio.to_thread(self.conversation.keep, question.attachments)
        message = self.conversation.asked(question.content, question.extra)
        for before in self.query(UserMessage):
            if before.message is message:  # it is asked again
                await before.remove()
        asked = UserMessage(shown, message, self.conversation.versions(message), self._gallery(question.extra))
        turn = _Turn(question, asked, AnswerMessage())
        self._answer = turn.answer
        await self.mount(turn.asked, turn.answer)
        self.anchor(self.is_anchored)
        self._reading = asyncio.create_task(self._read(turn))
        trouble: str | None = None
        try:
            await self._reading
        except asyncio.CancelledError:
            task = asyncio.current_task()
            self._progress.finish("stopped")
            if task is not None and task.cancelling():
                self._keep(turn)
                raise
        except Cancelled:
            self._progress.finish("stopped")
        except LocalrunError as error:
            trouble = error.message
            self._progress.finish("failed")
        except Exception as error:  # a defect must not take the conversation away
            trouble = f"{type(error).__name__}: {error}"
            self._progress.finish("failed")
        finally:
            self._reading = None
        await self._end(turn, trouble)

    @property
    def _progress(self) -> AnswerProgress:
        assert self.progress is not None
        return self.progress

    def _do(self, what: str) -> None:
        self._progress.doing = what
        self.post_message(self.AnswerChanged())

    async def _read(self, turn: _Turn) -> None:
        toolbox = await self._toolbox()
        for n_rounds in itertools.count(1):
            offered = [] if toolbox is None else toolbox.offered(self.conversation.tools.off)
            await self._read_round(turn, offered)
            if toolbox is None or not turn.tool_calls or self._progress.outcome != "done":
                return
            self._keep(turn)
            await turn.answer.finish(turn.text, self._progress.caption())
            await self._call(toolbox, calls_of(turn.tool_calls, offered))
            if n_rounds % MAX_ROUNDS == 0 and not await self._goes_on(n_rounds):
                return
            turn.go_on(AnswerMessage())
            self._answer = turn.answer
            self.progress = AnswerProgress(self._session.client_name)
            await self.mount(turn.answer)
            self.post_message(self.AnswerChanged())

    async def _read_round(self, turn: _Turn, offered: list[Tool]) -> None:
        conversation, progress = self.conversation, self._progress
        pieces = self._session.daemon.chat(
            conversation.model,
            await self._messages(turn.question),
            options=conversation.options or None,
            think=conversation.think,
            lane="interactive",
            tools=[tool.as_function for tool in offered],
        )
        # Closed here and now, also when cancelled: the daemon stops computing when the connection goes.
        async with aclosing(pieces):
            async for piece in pieces:
                if piece.request_id is not None and progress.request_id is None:
                    progress.request_id = piece.request_id
                    self._session.remember_model(conversation.model)
                if piece.text or piece.thinking or piece.tool_calls:
                    if not turn.has_answer:
                        progress.has_text = True
                        self.post_message(self.AnswerChanged())
                    turn.text += piece.text
                    turn.thinking += piece.thinking
                    if piece.text:
                        turn.answer.append(piece.text)
                    if piece.thinking:
                        turn.answer.think(piece.thinking)
                    if piece.tool_calls:
                        turn.tool_calls += piece.tool_calls
                        if not offered:
                            turn.answer.call(turn.tool_calls)
                if piece.done:
                    cancelled = piece.done_reason == "cancelled"
                    progress.finish("stopped" if cancelled else "done", piece.done_reason, piece.metrics)

    # --- tools ---

    async def _toolbox(self) -> Toolbox | None:
        """The tools of this chat, with the servers that it needs started; None where there are none."""
        toolbox, settings = self._session.toolbox, self.conversation.tools
        if toolbox is None or settings.is_on is False:
            return None
        if settings.is_on is None and "tools" not in await self._session.capabilities(self.conversation.model):
            return None
        names = [name for name in toolbox.names if name not in settings.off]
        starting = [name for name in names if not toolbox.servers.is_running(name) and name not in toolbox.failures]
        if starting:
            self._do(f"starting {', '.join(starting)}")
        for problem in await toolbox.look(names):
            await self.mount(Notice("A server of tools is not there", problem), before=self._answer)
        self._do("")
        return toolbox

    async def _call(self, toolbox: Toolbox, calls: list[Call]) -> None:
        """One call after the other; whatever happens, each has a result in the chat."""
        widgets = [ToolCall.of(call) for call in calls]
        await self.mount(*widgets)
        waiting = list(zip(calls, widgets, strict=True))
        try:
            while waiting:
                call, widget = waiting[0]
                outcome = await self._outcome(toolbox, call, widget)
                media = await self._kept_pictures(call, outcome)
                del waiting[0]
                self._has_result(call, outcome, media)
                await widget.finish(outcome, self._gallery(extra_of(media)))
        except asyncio.CancelledError:
            for (call, widget), outcome in zip(waiting, (STOPPED, *(NOT_RUN for _ in waiting)), strict=False):
                self._has_result(call, outcome, ())
                self.call_later(widget.stop, outcome)
            raise
        finally:
            self._do("")

    async def _outcome(self, toolbox: Toolbox, call: Call, widget: ToolCall) -> Outcome:
        if call.tool is None:
            return await toolbox.run(call)
        name = f"{call.tool.server} · {line(inert(call.tool.own_name))}"
        may_run = toolbox.may_run(call.tool, self.conversation.tools.allowed)
        if may_run is None:
            self._do(f"asks to call {name}")
            choices = await widget.ask(call.tool)
            self.post_message(self.ApprovalNeeded(self, choices))
            approval = await choices.chosen()
            self._remember(toolbox, call.tool, approval)
            may_run = approval.may_run
            self.post_message(self.ApprovalGiven())
            await widget.answered()
        if not may_run:
            return REFUSED
        self._do(f"calling {name}")
        widget.begin()
        return await toolbox.run(call)

    def _remember(self, toolbox: Toolbox, tool: Tool, approval: Approval) -> None:
        """What a person allowed or forbade for more than one call. Where it cannot be stored, it counts once."""
        try:
            if approval is Approval.CHAT:
                self.conversation.set_tools(allowed=(*self.conversation.tools.allowed, tool.fingerprint))
            elif approval in (Approval.ALWAYS, Approval.NEVER):
                toolbox.store(tool, Rule(approval.value))
        except (OSError, KeyError, sqlite3.Error) as error:
            self.notify(line(f"It counts for this call only: {error}"), severity="warning", markup=False)

    async def _kept_pictures(self, call: Call, outcome: Outcome) -> tuple[Medium, ...]:
        """Pictures of a result are kept as those of questions are."""
        name = call.tool.own_name if call.tool is not None else call.name
        files = [
            examined(Attachment(f"{name} {number}", Kind.PICTURE, data))
            for number, data in enumerate(outcome.pictures, 1)
            if media_kind(data) is Kind.PICTURE
        ]
        await asyncio.to_thread(self.conversation.keep, files)
        return tuple(file.medium for file in files if file.medium is not None)

    def _has_result(self, call: Call, outcome: Outcome, media: tuple[Medium, ...]) -> None:
        extra: dict[str, Any] = {"tool_name": call.name, "arguments": call.arguments, "end": outcome.end.value}
        extra |= {"tool_call_id": call.id} if call.id else {}
        extra |= {"server": call.tool.server, "tool": call.tool.own_name} if call.tool else {}
        extra |= {"duration_s": outcome.duration_s} | extra_of(media)
        self.conversation.called(outcome.text, extra)

    async def _goes_on(self, n_rounds: int) -> bool:
        question = GoOn(n_rounds)
        self._do("asks to go on with tools")
        await self.mount(question)
        self.post_message(self.ApprovalNeeded(self, question.choices))
        try:
            goes_on = await question.choices.chosen()
        except asyncio.CancelledError:
            self.call_later(question.answered, False, n_rounds)
            raise
        finally:
            self._do("")
        self.post_message(self.ApprovalGiven())
        await question.answered(goes_on, n_rounds)
        return goes_on

    # --- what is sent and kept ---

    async def _messages(self, question: Question) -> list[dict[str, Any]]:
        """What the daemon is sent. Raises BadRequest for a file of the question that the model does not take."""
        conversation = self.conversation
        if not conversation.media:
            return conversation.to_send()
        taken = await self._session.taken_kinds(conversation.model)
        for medium in media_of(question.extra):
            check_kind(conversation.model, taken, medium.kind, medium.name)
        not_taken, too_many = conversation.left_out(taken)
        self._tell_left_out(not_taken, too_many)
        messages = await asyncio.to_thread(conversation.to_send, taken)
        n_carried = len(conversation.media) - len(not_taken) - len(too_many)
        self._tell_gone(n_carried - sum(len(message.get("images", ())) for message in messages))
        return messages

    def _tell_gone(self, n_gone: int) -> None:
        if n_gone and n_gone != self._n_gone:
            files = "pictures and sounds" if n_gone > 1 else "picture or sound"
            self.notify(f"Not sent, as gone from the disk: {n_gone} earlier {files} of this chat.", severity="warning")
        self._n_gone = n_gone

    def _tell_left_out(self, not_taken: list[Medium], too_many: list[Medium]) -> None:
        reasons = (
            (not_taken, f"{self.conversation.model} cannot take {'them' if len(not_taken) > 1 else 'it'}"),
            (too_many, f"one request carries {MAX_MEDIA}, of {MAX_MEDIA_BYTES // 10**6} MB together"),
        )
        told = [f"Not sent again: {_files(media)}; {why}." for media, why in reasons if media]
        if told != self._told_left_out:
            self._told_left_out = told
            for text in told:
                self.notify(line(text), markup=False)

    def _keep(self, turn: _Turn) -> None:
        """The answer belongs to the chat from now on, with what there is to say of it."""
        if not turn.has_answer or turn.answer.message is not None:
            return
        extra: dict[str, Any] = {"caption": self._progress.caption()}
        if turn.thinking:
            extra["thinking"] = turn.thinking
        if turn.tool_calls:
            extra["tool_calls"] = turn.tool_calls
        turn.answer.message = self.conversation.answered(turn.text, extra)

    async def _end(self, turn: _Turn, trouble: str | None) -> None:
        progress = self._progress
        if progress.outcome is None:
            progress.finish("failed")
            trouble = "the daemon ended the answer without saying why"
        self._looks_left = _LAST_LOOKS
        self._keep(turn)
        if turn.has_answer:
            await turn.answer.finish(turn.text, progress.caption())
        else:
            await turn.answer.remove()
            self._answer = None
        if trouble is not None:
            await self.mount(Notice("The answer failed", trouble))
        if not turn.has_answer and progress.outcome != "done":
            if self.conversation.unanswered is not None:
                turn.asked.mark_unanswered()
                self.post_message(self.QuestionReturned(self, turn.question))
        elif not turn.has_answer:
            await self.mount(Notice("No answer", "The model ended its turn without a word."))
        await self._tell_trouble()
        self.post_message(self.AnswerChanged())

    async def _tell_trouble(self) -> None:
        if self.conversation.trouble is not None and not self._has_told_trouble:
            self._has_told_trouble = True
            await self.mount(Notice("This chat is no longer kept", self.conversation.trouble))


def _files(media: list[Medium]) -> str:
    kinds = {medium.kind for medium in media}
    names = [name for kind, name in ((Kind.PICTURE, "picture"), (Kind.SOUND, "sound")) if kind in kinds]
    return f"{len(media)} earlier {' and '.join(name + 's' * (len(media) > 1) for name in names)} of this chat"
