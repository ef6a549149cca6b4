"""One chat on the screen, and the reading of its answers.

Owns its messages as widgets, and at most one running answer. The answer is read in a task of its own; cancelling that
task closes the stream, which makes the daemon cancel the request. Whatever ends an answer, the text that came stays and
the view is ready for the next question.

A long chat is mounted from its end: the last `PAGE` messages, and a page more whenever one scrolls to the top.

Does not: know about other chats, or about the event stream beyond the row of its own request.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.message import Message as Event
from textual.widget import Widget
from textual.worker import Worker

from localrun.attachments import MAX_MEDIA, MAX_MEDIA_BYTES, Kind, check_kind
from localrun.errors import Cancelled, LocalrunError
from localrun.snapshot import Snapshot
from localrun.tui.answer_progress import AnswerProgress
from localrun.tui.conversation import Conversation
from localrun.tui.files import Question
from localrun.tui.history import Message
from localrun.tui.media import media_of
from localrun.tui.session import Session
from localrun.tui.widgets.gallery import Gallery
from localrun.tui.widgets.messages import AnswerMessage, Notice, UserMessage
from localrun.tui.widgets.welcome import Welcome

PAGE = 16
# Final numbers such as the TTFT come with the next snapshot, so a finished answer looks at a few more of them.
_LAST_LOOKS = 8
_THINK = "think"


@dataclass
class _Exchange:
    """A question under way, and as much of its answer as came."""

    question: Question
    asked: UserMessage
    answer: AnswerMessage
    text: str = ""
    thinking: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_answer(self) -> bool:
        return bool(self.text or self.thinking or self.tool_calls)


class ConversationView(VerticalScroll):
    """`progress` is that of the running or last answer; None before the first. `unsent` is a question that was not
    answered while the prompt belonged to another chat."""

    @dataclass
    class Progressed(Event):
        """The running answer has news worth showing."""

        view: ConversationView

    @dataclass
    class Unsent(Event):
        """Nothing came back for this question; it was taken out of the conversation again."""

        view: ConversationView
        question: Question

    def __init__(self, session: Session, conversation: Conversation) -> None:
        super().__init__()
        self.conversation = conversation
        self.progress: AnswerProgress | None = None
        self.unsent: Question | None = None
        self._session = session
        self._worker: Worker[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answer: AnswerMessage | None = None
        self._looks_left = 0
        self._n_hidden = max(0, len(conversation.messages) - PAGE)
        self._is_paging = False
        self._has_told_trouble = False
        self._n_left_out = 0
        self._n_gone = 0

    def compose(self) -> ComposeResult:
        if not self.conversation.messages:
            yield Welcome(self.conversation.model)
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

    @property
    def welcome(self) -> Welcome | None:
        """The greeting, while the conversation is empty."""
        return next(iter(self.query(Welcome)), None)

    @property
    def is_answering(self) -> bool:
        return self._worker is not None and not self._worker.is_finished

    def ask(self, question: Question) -> None:
        """Sends a question. Must not be called while an answer runs."""
        assert not self.is_answering
        self.progress = AnswerProgress(self._session.client_name)
        self._worker = self.run_worker(self._run(question, self.progress), name="answer")
        self.post_message(self.Progressed(self))

    def stop(self) -> None:
        """Ends the running answer; does nothing when there is none."""
        if self._reading is not None:
            self._reading.cancel()

    async def reload(self) -> None:
        """Shows the conversation as it is now, after it went back or to another version."""
        self._n_hidden = max(0, len(self.conversation.messages) - PAGE)
        async with self.batch():
            await self.remove_children()
            await self.mount(*self._widgets(self.conversation.messages[self._n_hidden :]))
        self.scroll_end(animate=False)

    def see(self, snapshot: Snapshot) -> None:
        """Takes the news of the running answer, and the last ones of an answer that has just ended."""
        progress = self.progress
        if progress is None or (progress.outcome is not None and not self._looks_left):
            return
        self._looks_left = max(0, self._looks_left - 1)
        progress.see(snapshot)
        if progress.outcome is not None and self._answer is not None and progress.request_id is not None:
            self._answer.show_caption(progress.caption())
        self.post_message(self.Progressed(self))

    # --- what was said ---------------------------------------------------------------------------------------------

    def _widgets(self, messages: list[Message]) -> list[Widget]:
        return [self._widget(message) for message in messages]

    def _widget(self, message: Message) -> Widget:
        if message.role == "user":
            shown = str(message.extra.get("shown", message.content))
            return UserMessage(shown, message, self.conversation.versions(message), self._gallery(message.extra))
        answer = AnswerMessage(message.content, str(message.extra.get("thinking", "")), message)
        answer.call_after_refresh(answer.show_caption, str(message.extra.get("caption", "")))
        if message.extra.get("tool_calls"):
            answer.call(message.extra["tool_calls"])
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

    async def _run(self, question: Question, progress: AnswerProgress) -> None:
        await self.query(Welcome).remove()
        shown = str(question.extra.get("shown", question.text))
        if question.media:
            await asyncio.to_thread(self.conversation.keep, question.attachments)
        asked = UserMessage(shown, gallery=self._gallery(question.extra))
        exchange = _Exchange(question, asked, AnswerMessage())
        self._answer = exchange.answer
        await self.mount(exchange.asked, exchange.answer)
        self.anchor(self.is_anchored)
        self._reading = asyncio.create_task(self._read(exchange, progress))
        trouble: str | None = None
        try:
            await self._reading
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self._keep(exchange, progress)
                raise
            progress.finish("stopped")
        except Cancelled:
            progress.finish("stopped")
        except LocalrunError as error:
            trouble = error.message
            progress.finish("failed")
        except Exception as error:  # a defect must not take the conversation away
            trouble = f"{type(error).__name__}: {error}"
            progress.finish("failed")
        finally:
            self._reading = None
        await self._end(exchange, progress, trouble)

    async def _read(self, exchange: _Exchange, progress: AnswerProgress) -> None:
        conversation = self.conversation
        options = {name: value for name, value in conversation.parameters.items() if name != _THINK}
        pieces = self._session.daemon.chat(
            conversation.model,
            await self._messages(exchange.question),
            options=options or None,
            think=conversation.parameters.get(_THINK),
            lane="interactive",
        )
        # Closed here and now, also when cancelled: the daemon stops computing when the connection goes.
        async with aclosing(pieces):
            async for piece in pieces:
                if piece.request_id is not None:
                    progress.request_id = piece.request_id
                if piece.text or piece.thinking or piece.tool_calls:
                    if not exchange.has_answer:
                        progress.has_text = True
                        question = exchange.question
                        message = conversation.asked(question.content, question.extra)
                        exchange.asked.belong(message, conversation.versions(message))
                        self.post_message(self.Progressed(self))
                    exchange.text += piece.text
                    exchange.thinking += piece.thinking
                    if piece.text:
                        exchange.answer.append(piece.text)
                    if piece.thinking:
                        exchange.answer.think(piece.thinking)
                    if piece.tool_calls:
                        exchange.tool_calls += piece.tool_calls
                        exchange.answer.call(exchange.tool_calls)
                if piece.done:
                    cancelled = piece.done_reason == "cancelled"
                    progress.finish("stopped" if cancelled else "done", piece.done_reason, piece.metrics)

    async def _messages(self, question: Question) -> list[dict[str, Any]]:
        """What the daemon is sent. Raises BadRequest for a file that the model does not take."""
        conversation, media = self.conversation, media_of(question.extra)
        if not media and not conversation.has_media:
            return conversation.to_send(question.content, question.extra)
        taken = await self._session.taken_kinds(conversation.model)
        for medium in media:
            check_kind(conversation.model, taken, medium.kind, medium.name)
        n_left_out = conversation.n_left_out(question.extra, taken)
        if n_left_out != self._n_left_out:
            self._n_left_out = n_left_out
            self._tell_left_out(taken)
        messages = await asyncio.to_thread(conversation.to_send, question.content, question.extra, taken)
        self._tell_gone(
            conversation.n_media(question.extra) - n_left_out - sum(len(m.get("images", ())) for m in messages)
        )
        return messages

    def _tell_gone(self, n_gone: int) -> None:
        if n_gone and n_gone != self._n_gone:
            files = "pictures and sounds" if n_gone > 1 else "picture or sound"
            self.notify(f"Not sent, as gone from the disk: {n_gone} earlier {files} of this chat.", severity="warning")
        self._n_gone = n_gone

    def _tell_left_out(self, taken: frozenset[Kind]) -> None:
        if self._n_left_out:
            files = "pictures and sounds" if self._n_left_out > 1 else "picture or sound"
            reason = f"one request carries {MAX_MEDIA}, of {MAX_MEDIA_BYTES // 10**6} MB together"
            if taken != frozenset(Kind):
                reason += ", of those that the model takes"
            self.notify(f"{self._n_left_out} earlier {files} of this chat are not sent again: {reason}.")

    def _keep(self, exchange: _Exchange, progress: AnswerProgress) -> None:
        """The answer belongs to the chat from now on, with what there is to say of it."""
        if not exchange.has_answer:
            return
        extra: dict[str, Any] = {"caption": progress.caption()}
        if exchange.thinking:
            extra["thinking"] = exchange.thinking
        if exchange.tool_calls:
            extra["tool_calls"] = exchange.tool_calls
        exchange.answer.message = self.conversation.answered(exchange.text, extra)

    async def _end(self, exchange: _Exchange, progress: AnswerProgress, trouble: str | None) -> None:
        if progress.outcome is None:
            progress.finish("failed")
            trouble = "the daemon ended the answer without saying why"
        self._looks_left = _LAST_LOOKS
        self._keep(exchange, progress)
        if exchange.has_answer:
            await exchange.answer.finish(exchange.text, progress.caption())
        else:
            await exchange.answer.remove()
            self._answer = None
        if trouble is not None:
            await self.mount(Notice("The answer failed", trouble))
        if not exchange.has_answer and progress.outcome != "done":
            exchange.asked.add_class("-unanswered")
            self.post_message(self.Unsent(self, exchange.question))
        elif not exchange.has_answer:
            await self.mount(Notice("No answer", "The model ended its turn without a word."))
        await self._tell_trouble()
        self.post_message(self.Progressed(self))

    async def _tell_trouble(self) -> None:
        if self.conversation.trouble is not None and not self._has_told_trouble:
            self._has_told_trouble = True
            await self.mount(Notice("This chat is no longer kept", self.conversation.trouble))
