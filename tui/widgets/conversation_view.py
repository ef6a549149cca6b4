"""One conversation on the screen, and the reading of its answers.

Owns the conversation with one model: its messages as widgets, and at most one running answer. The answer is read in
a task of its own; cancelling that task closes the stream, which makes the daemon cancel the request. Whatever ends an
answer, the text that came stays and the view is ready for the next question.

Does not: know about other conversations, or about the event stream beyond the row of its own request.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.message import Message
from textual.worker import Worker

from localrun.errors import Cancelled, LocalrunError
from localrun.snapshot import Snapshot
from localrun.tui.answer_progress import AnswerProgress
from localrun.tui.conversation import Conversation, Turn
from localrun.tui.session import Session
from localrun.tui.widgets.answer_message import AnswerMessage
from localrun.tui.widgets.notice import Notice
from localrun.tui.widgets.user_message import UserMessage
from localrun.tui.widgets.welcome import Welcome

# Final numbers such as the TTFT come with the next snapshot, so a finished answer looks at a few more of them.
_LAST_LOOKS = 8


class ConversationView(VerticalScroll):
    """`progress` is that of the running or last answer; None before the first."""

    @dataclass
    class Progressed(Message):
        """The running answer has news worth showing."""

        view: ConversationView

    @dataclass
    class Unsent(Message):
        """Nothing came back for this question; it was taken out of the conversation again."""

        view: ConversationView
        question: str

    def __init__(self, session: Session, model: str) -> None:
        super().__init__()
        self.conversation = Conversation(model)
        self.progress: AnswerProgress | None = None
        self._session = session
        self._worker: Worker[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answer: AnswerMessage | None = None
        self._looks_left = 0

    def compose(self) -> ComposeResult:
        yield Welcome(self.conversation.model)

    def on_resize(self) -> None:
        self._anchor_if_long()

    def watch_virtual_size(self) -> None:
        self._anchor_if_long()

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

    def ask(self, question: str) -> None:
        """Sends a question. Must not be called while an answer runs."""
        assert not self.is_answering
        self.progress = AnswerProgress(self._session.client_name)
        self._worker = self.run_worker(self._run(question, self.progress), name="answer", exit_on_error=True)
        self.post_message(self.Progressed(self))

    def stop(self) -> None:
        """Ends the running answer; does nothing when there is none."""
        if self._reading is not None:
            self._reading.cancel()

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

    async def _run(self, question: str, progress: AnswerProgress) -> None:
        await self.query(Welcome).remove()
        turn = self.conversation.ask(question)
        asked = UserMessage(question)
        answer = self._answer = AnswerMessage()
        await self.mount(asked, answer)
        self.anchor(self.is_anchored)
        self._reading = asyncio.create_task(self._read(turn, answer, progress))
        trouble: str | None = None
        try:
            await self._reading
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
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
        await self._end(asked, answer, turn, progress, trouble)

    async def _read(self, turn: Turn, answer: AnswerMessage, progress: AnswerProgress) -> None:
        messages = self.conversation.messages()
        pieces = self._session.daemon.chat(self.conversation.model, messages, lane="interactive")
        # Closed here and now, also when cancelled: the daemon stops computing when the connection goes.
        async with aclosing(pieces):
            async for piece in pieces:
                if piece.request_id is not None:
                    progress.request_id = piece.request_id
                if piece.text:
                    if not progress.has_text:
                        progress.has_text = True
                        self.post_message(self.Progressed(self))
                    turn.answer += piece.text
                    answer.append(piece.text)
                if piece.done:
                    cancelled = piece.done_reason == "cancelled"
                    progress.finish("stopped" if cancelled else "done", piece.done_reason, piece.metrics)

    async def _end(
        self, asked: UserMessage, answer: AnswerMessage, turn: Turn, progress: AnswerProgress, trouble: str | None
    ) -> None:
        if progress.outcome is None:
            progress.finish("failed")
            trouble = "the daemon ended the answer without saying why"
        self._looks_left = _LAST_LOOKS
        if turn.answer:
            await answer.finish(turn.answer, progress.caption())
        else:
            await answer.remove()
            self._answer = None
        if trouble is not None:
            await self.mount(Notice("The answer failed", trouble))
        if not turn.answer and progress.outcome != "done":
            self.conversation.drop_unanswered()
            asked.add_class("-unanswered")
            self.post_message(self.Unsent(self, turn.question))
        elif not turn.answer:
            self.conversation.drop_unanswered()
            await self.mount(Notice("No answer", "The model ended its turn without a word."))
        self.post_message(self.Progressed(self))
