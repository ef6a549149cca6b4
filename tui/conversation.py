"""One chat: what was said in the branch that is shown, and how the next answer is to be made.

Owner: the TUI's event loop. Backed by the history: a question is stored when it is sent, the answer when it ends, so a
crash loses one answer at most. Editing or repeating goes back to an earlier message; what is said after that is another
branch, and an edit may be given up. A question that nobody answered stays in the chat, and is no part of later
requests.

How it fails: a history that refuses (a full disk, a chat that another window deleted) ends the storing of this chat,
`trouble` says why, and the conversation goes on in memory.

Does not: know widgets, or talk to the daemon.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import sqlite3
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from localrun.attachments import Kind, n_carried
from localrun.tools.toolbox import result_message
from localrun.tui.history import Chat, History, Message
from localrun.tui.media import AttachedFile, Medium, media_of

_UNSTORED = 0
# Among a chat's parameters, but no options of a model.
_THINK = "think"
_TOOLS = "tools"
# What a model reads of a call without a result: one of an answer that was stopped, or lost with the program.
_NO_RESULT = "There is no result: this call was not run."


class ToolSettings(msgspec.Struct, frozen=True):
    """Of one chat: whether tools are offered (None: if the model says that it can call them), which servers and tools
    are not, and the fingerprints of those that may run without being asked for."""

    is_on: bool | None = None
    off: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()


class Conversation:
    """`messages` are those of the shown branch, first to last. `clock` gives seconds since the epoch."""

    def __init__(self, history: History, model: str, clock: Callable[[], float], chat: Chat | None = None) -> None:
        self.model = model if chat is None else chat.model
        self.system = "" if chat is None else chat.system
        self.parameters: dict[str, Any] = {} if chat is None else dict(chat.parameters)
        self.messages: list[Message] = [] if chat is None else history.branch(chat.id)
        self.trouble: str | None = None
        self._history = history
        self._clock = clock
        self._chat_id = None if chat is None else chat.id
        self._before_edit: list[Message] | None = None

    @property
    def chat_id(self) -> int | None:
        """Its number in the history; None before the first question."""
        return self._chat_id

    @property
    def title(self) -> str:
        """Empty for one that has not begun, or was deleted."""
        if self._chat_id is None:
            return ""
        try:
            return self._history.chat(self._chat_id).title
        except (KeyError, sqlite3.Error):
            return ""

    @property
    def model_parameters(self) -> dict[str, Any]:
        return {name: value for name, value in self.parameters.items() if name != _TOOLS}

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in self.model_parameters.items() if name != _THINK}

    @property
    def think(self) -> bool | str | None:
        """None leaves it to the model."""
        return self.parameters.get(_THINK)

    @property
    def tools(self) -> ToolSettings:
        """See there. What a damaged history has is as if nothing had been set."""
        try:
            return msgspec.convert(self.parameters.get(_TOOLS, {}), ToolSettings)
        except msgspec.ValidationError:
            return ToolSettings()

    def set_tools(self, **changes: Any) -> None:
        """Raises KeyError when the chat was deleted, and sqlite3.Error; it counts here all the same."""
        changed = msgspec.to_builtins(msgspec.structs.replace(self.tools, **changes))
        self.configure(parameters={**self.parameters, _TOOLS: changed})

    def to_send(self, taken: frozenset[Kind] = frozenset(Kind)) -> list[dict[str, Any]]:
        """What `/api/chat` is asked. A stopped answer counts as the answer; earlier questions without any are left out.
        Of all pictures and sounds that the model takes, the newest, as many as one request carries. Reads their files,
        so it is called in a thread; nothing is added to the conversation meanwhile."""
        found: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        media = [medium for medium in self.media if medium.kind in taken]
        left_out = set(range(len(media) - n_carried([medium.size_bytes for medium in media])))
        numbers = itertools.count()
        for role, content, its_extra in ((each.role, each.content, each.extra) for each in self._asked_of_model()):
            message: dict[str, Any] = {"role": role, "content": content}
            files = [
                self._history.files.get(medium.sha256)
                for medium in media_of(its_extra)
                if medium.kind in taken and next(numbers) not in left_out
            ]
            images = [base64.b64encode(data).decode("ascii") for data in files if data is not None]
            message |= {"images": images} if images else {}
            n_unseen = len(media_of(its_extra)) - len(images)
            if role == "tool" and n_unseen:
                message["content"] += f"\n[{n_unseen} of this result's pictures are not shown to you]"
            kept = ("thinking", "tool_calls", "tool_name", "tool_call_id")
            message |= {name: its_extra[name] for name in kept if its_extra.get(name)}
            found.append(message)
        return _with_all_results(found)

    @property
    def media(self) -> list[Medium]:
        """All pictures and sounds that belong to the next request, the oldest first."""
        return [medium for message in self._asked_of_model() for medium in media_of(message.extra)]

    def left_out(self, taken: frozenset[Kind]) -> tuple[list[Medium], list[Medium]]:
        """The pictures and sounds that `to_send` leaves out: what the model does not take, and what is too much for one
        request."""
        media = self.media
        takes = [medium for medium in media if medium.kind in taken]
        n_carried_again = n_carried([medium.size_bytes for medium in takes])
        return [medium for medium in media if medium.kind not in taken], takes[: len(takes) - n_carried_again]

    def keep(self, files: Iterable[AttachedFile]) -> None:
        """Keeps the pictures and sounds of a question that is about to be asked. In a thread, as `to_send`."""
        try:
            for attached in files:
                if attached.medium is not None:
                    self._history.files.put(attached.file.data)
        except OSError as error:
            self.trouble = f"a file cannot be kept: {error.strerror or error}"

    def asked(self, question: str, extra: dict[str, Any] | None = None) -> Message:
        """This question is sent. The one at the end that nobody answered is not stored twice."""
        unanswered = self.unanswered
        if unanswered is not None and (unanswered.content, unanswered.extra) == (question, extra or {}):
            return unanswered
        return self._add("user", question, extra or {})

    @property
    def unanswered(self) -> Message | None:
        """The question at the end that has no answer: it is being answered, or that came to nothing."""
        return self.messages[-1] if self.messages and self.messages[-1].role == "user" else None

    def is_unanswered(self, message: Message) -> bool:
        """Whether a shown message is a question without an answer, at the end or followed by another question."""
        after = self.messages.index(message) + 1
        return message.role == "user" and (after == len(self.messages) or self.messages[after].role == "user")

    def answered(self, text: str, extra: dict[str, Any]) -> Message:
        """The answer is over, or as much of it as came."""
        return self._add("assistant", text, extra)

    def called(self, text: str, extra: dict[str, Any]) -> Message:
        """A tool that the model called has a result."""
        return self._add("tool", text, extra)

    def has_results(self, message: Message) -> bool:
        """Whether results of tools follow a shown answer."""
        after = self.messages.index(message) + 1
        return after < len(self.messages) and self.messages[after].role == "tool"

    def back_to(self, message: Message) -> None:
        """Forget a shown message and all after it, here; they stay in the history as another branch."""
        self.messages = self.messages[: self.messages.index(message)]

    @property
    def is_edited(self) -> bool:
        """Whether the next question takes the place of an earlier one."""
        return self._before_edit is not None

    def edit(self, message: Message) -> None:
        """As `back_to`, until the next question is asked or the edit is given up."""
        before = self.messages if self._before_edit is None else self._before_edit
        self.back_to(message)
        self._before_edit = before

    def give_up_edit(self) -> None:
        """The branch as it was before the edit."""
        if self._before_edit is not None:
            self.messages, self._before_edit = self._before_edit, None

    def versions(self, message: Message) -> tuple[int, int]:
        """Which version of a message is shown, from 1 on, and how many there are."""
        ids: list[int] = []
        with contextlib.suppress(sqlite3.Error):
            if message.id != _UNSTORED:
                ids = [sibling.id for sibling in self._history.siblings(message)]
        return (ids.index(message.id) + 1, len(ids)) if message.id in ids else (1, 1)

    def show_version(self, message: Message, step: int) -> bool:
        """Show the next (1) or previous (-1) version of a message, with what followed it. False if there is none.
        Raises KeyError when the chat was deleted, and sqlite3.Error."""
        if self._chat_id is None or message.id == _UNSTORED:
            return False
        siblings = self._history.siblings(message)
        at = next((index for index, sibling in enumerate(siblings) if sibling.id == message.id), 0) + step
        if not 0 <= at < len(siblings):
            return False
        self._history.show(siblings[at])
        self.messages, self._before_edit = self._history.branch(self._chat_id), None
        return True

    def read_again(self) -> bool:
        """Takes the shown branch from the history: an edit may have been given up, or another window have gone on.
        False when nothing is different. Raises KeyError when the chat was deleted, and sqlite3.Error."""
        if self._chat_id is None or self.trouble is not None:
            return False
        before, self.messages = self.messages, self._history.branch(self._chat_id)
        self._before_edit = None
        return self.messages != before

    def configure(
        self, *, model: str | None = None, system: str | None = None, parameters: dict[str, Any] | None = None
    ) -> None:
        """How the next answers are made; None leaves it as it is."""
        self.model = self.model if model is None else model
        self.system = self.system if system is None else system
        self.parameters = self.parameters if parameters is None else parameters
        if self._chat_id is not None:
            self._history.configure(self._chat_id, model=self.model, system=self.system, parameters=self.parameters)

    def last_answer(self) -> str | None:
        """The newest text that a model wrote."""
        return next((message.content for message in reversed(self.messages) if message.role == "assistant"), None)

    def _add(self, role: str, content: str, extra: dict[str, Any]) -> Message:
        parent_id = self.messages[-1].id if self.messages else None
        message = None
        if self.trouble is None:
            try:
                message = self._store(parent_id, role, content, extra)
            except KeyError:
                self.trouble = "it was deleted in another window"
            except sqlite3.Error as error:
                self.trouble = str(error)
        if message is None:
            message = Message(_UNSTORED, 0, parent_id, role, content, extra, self._clock())
        self.messages.append(message)
        self._before_edit = None
        return message

    def _asked_of_model(self) -> list[Message]:
        """The shown messages without earlier questions that nobody answered: many templates want turns to alternate."""
        pairs = itertools.zip_longest(self.messages, self.messages[1:])
        return [each for each, after in pairs if after is None or (each.role, after.role) != ("user", "user")]

    def _store(self, parent_id: int | None, role: str, content: str, extra: dict[str, Any]) -> Message:
        now_s = self._clock()
        if self._chat_id is None:
            self._chat_id = self._history.begin(
                self.model, now_s=now_s, system=self.system, parameters=self.parameters
            ).id
        return self._history.add(self._chat_id, parent_id, role, content, now_s=now_s, extra=extra)


def _with_all_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With a result for every call: models that are shown a call without one may make it again, or fail."""
    found: list[dict[str, Any]] = []
    missing: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            call_id, name = message.get("tool_call_id"), message.get("tool_name")
            answered = next(
                (m for m in missing if (m["tool_call_id"] == call_id if call_id else m["tool_name"] == name)), None
            )
            if answered is not None:
                missing.remove(answered)
        else:
            found += missing
            calls = message.get("tool_calls")
            missing = [_no_result(call) for call in calls] if isinstance(calls, list) else []
        found.append(message)
    return found + missing


def _no_result(call: Any) -> dict[str, Any]:
    call = call if isinstance(call, dict) else {}
    function = call.get("function") or {}
    return result_message(str(function.get("name", "")), str(call.get("id", "")), _NO_RESULT)
