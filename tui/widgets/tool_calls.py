"""A tool's call in a conversation: what is asked for, how it goes, what it gave; and questions that wait for a person.

Everything here comes from a model or a server, so it is drawn as plain text, without control characters, and cut to a
size. The arguments that are asked about are shown whole, in a box that scrolls, up to `SHOWN_CHARACTERS`.

Does not: run anything, or decide what needs no asking.
"""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Collapsible, OptionList, Static
from textual.widgets.option_list import Option

from localrun.tools.toolbox import Approval, Call, End, Outcome, Tool
from localrun.tui import short_text
from localrun.tui.short_text import block, fit, line
from localrun.tui.widgets.gallery import Gallery
from localrun.visible import as_json, inert, shortened

SHOWN_CHARACTERS = 20_000
DESCRIPTION_CHARACTERS = 400
_LINE_CELLS = 200

Answer = TypeVar("Answer")

_APPROVALS = (
    (Approval.NO, "No, not this time"),
    (Approval.ONCE, "Yes, this once"),
    (Approval.CHAT, "Yes, and always in this chat"),
    (Approval.ALWAYS, "Yes, and always; this is stored"),
    (Approval.NEVER, "Never; no model is offered it any more"),
)
_ENDS = {
    End.DONE: ("done", "$success"),
    End.FAILED: ("failed", "$error"),
    End.REFUSED: ("not allowed", "$warning"),
    End.STOPPED: ("stopped", "$warning"),
}


class Choices(OptionList, Generic[Answer]):
    """Answers to choose from. The first is the safe one, and marked; letters choose nothing, so that what is typed
    for the prompt answers no question."""

    def __init__(self, answers: tuple[tuple[Answer, str], ...]) -> None:
        super().__init__(*(Option(text) for _, text in answers))
        self._answers = answers
        self._chosen: asyncio.Future[Answer] | None = None

    def on_mount(self) -> None:
        self.highlighted = 0

    async def chosen(self) -> Answer:
        """Waits for a person."""
        self._chosen = asyncio.get_running_loop().create_future()
        return await self._chosen

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if self._chosen is not None and not self._chosen.done():
            self._chosen.set_result(self._answers[event.option_index][0])


class ToolCall(Vertical):
    """One call, from the moment when the model wants it."""

    def __init__(self, server: str, tool: str, arguments: str) -> None:
        super().__init__()
        self._what = f"{line(server)} · {fit(inert(tool), 60)}" if server else fit(inert(tool), 60)
        self._arguments = arguments
        self._head = Static()
        self._result = Static()
        self._folded = Collapsible(self._result, collapsed=True)
        self._folded.display = False
        self._show("waits", "$foreground 60%")

    @classmethod
    def of(cls, call: Call) -> ToolCall:
        """A call that is wanted."""
        server, tool = (call.tool.server, call.tool.own_name) if call.tool else ("", call.name)
        return cls(server, tool, call.shown_arguments)

    @classmethod
    def kept(cls, content: str, extra: dict[str, Any], gallery: Gallery | None) -> ToolCall:
        """One of the history."""
        arguments = as_json(extra.get("arguments") or {})
        made = cls(str(extra.get("server", "")), str(extra.get("tool") or extra.get("tool_name", "?")), arguments)
        end, duration_s = extra.get("end"), extra.get("duration_s")
        outcome = Outcome(
            End(end) if end in tuple(End) else End.DONE,
            content,
            duration_s=duration_s if isinstance(duration_s, float) else 0.0,
        )
        made._fill(outcome)
        made._gallery = gallery
        return made

    _gallery: Gallery | None = None

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._folded
        if self._gallery is not None:
            yield self._gallery

    async def ask(self, tool: Tool) -> Choices[Approval]:
        """Shows all of the call and the answers, which nobody has chosen yet."""
        self._show("asks to be called with", "bold $warning", is_whole=True)
        arguments = self._arguments
        if len(arguments) > SHOWN_CHARACTERS:
            arguments = f"{arguments[:SHOWN_CHARACTERS]}\n[{len(arguments)} characters; the rest is not shown]"
        said = line(shortened(tool.description, DESCRIPTION_CHARACTERS))
        self._choices = Choices(_APPROVALS)
        parts = [
            VerticalScroll(Static(Content(arguments)), classes="arguments", can_focus=False),
            Static(Content(f"Its server says: {said}" if said else "Its server does not describe it."), classes="said"),
            self._choices,
        ]
        self._question = Vertical(*parts, classes="question")
        await self.mount(self._question, after=self._head)
        self.add_class("-asking")
        return self._choices

    async def answered(self) -> None:
        """The answers go; what was asked becomes one line."""
        self.remove_class("-asking")
        await self._question.remove()
        self._show("waits", "$foreground 60%")

    def begin(self) -> None:
        self._show("runs", "$warning")

    async def finish(self, outcome: Outcome, gallery: Gallery | None = None) -> None:
        """It is over, and its result is folded."""
        self._fill(outcome)
        if gallery is not None:
            await self.mount(gallery)

    async def stop(self, outcome: Outcome) -> None:
        """The answer was stopped, perhaps while this was asked for."""
        if self.has_class("-asking"):
            await self.answered()
        self._fill(outcome)

    def _fill(self, outcome: Outcome) -> None:
        word, colour = _ENDS[outcome.end]
        took = f" in {short_text.seconds(outcome.duration_s)}" if outcome.duration_s else ""
        self._show(f"{word}{took}", colour)
        text = block(outcome.text)
        lines = text.count("\n") + 1 if text else 0
        size = f"{short_text.count(lines)} lines" if lines > 1 else f"{short_text.count(len(text))} characters"
        self._folded.title = f"Result, {size}" if text else "No text in the result"
        self._folded.display = outcome.end in (End.DONE, End.FAILED)
        if len(text) > SHOWN_CHARACTERS:
            text = f"{text[:SHOWN_CHARACTERS]}\n[the model has {short_text.count(len(text))} characters of it]"
        self._result.update(Content(text))

    def _show(self, state: str, colour: str, *, is_whole: bool = False) -> None:
        arguments = "" if is_whole else " ".join(self._arguments.split())
        arguments = "" if arguments == "{}" else f"  {fit(arguments, _LINE_CELLS)}"
        self._head.update(
            Content.assemble(
                Content.styled("tool ", "$foreground 60%"),
                Content.styled(self._what, "bold $accent"),
                "  ",
                Content.styled(state, colour),
                Content.styled(arguments, "$foreground 60%"),
            )
        )


class GoOn(Vertical):
    """Asks whether a model that calls tools again and again may go on."""

    def __init__(self, n_rounds: int) -> None:
        super().__init__(classes="-asking")
        self._text = Static(Content(f"The model has called tools in {n_rounds} rounds, one after the other. Go on?"))
        self.choices = Choices(((False, "No, stop here"), (True, f"Yes, {n_rounds} rounds more at most")))

    def compose(self) -> ComposeResult:
        yield self._text
        yield self.choices

    async def answered(self, goes_on: bool, n_rounds: int) -> None:
        self.remove_class("-asking")
        await self.choices.remove()
        word = "went on" if goes_on else "was stopped"
        self._text.update(Content(f"The model called tools in {n_rounds} rounds, and {word}."))
