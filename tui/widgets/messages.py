"""The messages of a conversation: questions as they were typed, answers, and remarks of the interface itself, the
greeting of an empty one among them.

An answer's pieces are collected and written at most `WRITES_PER_S` times a second, however fast they come: parsing
costs more than a token takes, and in a chat that nobody sees nothing is written until it is seen. This replaces
textual's MarkdownStream, whose `stop` raises when a stream ends before its task has begun. The end is rendered once
more from the whole text, since a block that was parsed in halves may differ.

Thinking is folded: one line that says how much there is, and the text when it is opened: its end while it grows, since
drawing all of a long one takes longer than the time between two writes, and all of it when it is over.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline, emphasis
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message as Event
from textual.reactive import reactive
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Collapsible, Markdown, Static

from localrun.last_model import BUILT_IN
from localrun.tui import short_text
from localrun.tui.files import code_blocks
from localrun.tui.history import Message
from localrun.tui.keys import bind
from localrun.tui.short_text import block, line
from localrun.tui.widgets.gallery import Gallery


class UserMessage(Vertical, can_focus=True):
    """What the person said, verbatim: no Markdown, no markup; below it the pictures and sounds, if any. Of several
    versions the caption says which one this is."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("message.edit", "want('edit')"),
        bind("message.retry", "want('retry')"),
        bind("message.previous", "want('previous')"),
        bind("message.next", "want('next')"),
    ]

    @dataclass
    class ActionChosen(Event):
        """A person wants this done with the question: edit, retry, previous or next (version)."""

        message: Message
        what: str

    def __init__(self, text: str, message: Message, version: tuple[int, int], gallery: Gallery | None = None) -> None:
        super().__init__()
        self.message = message
        self._text = Static(Content(block(text)))
        self._text.display = bool(text)
        self._gallery = gallery
        self._version = Static(classes="caption")
        number, n_versions = version
        self._caption = f"version {number} of {n_versions}" if n_versions > 1 else ""
        self._show_caption()

    def compose(self) -> ComposeResult:
        yield self._text
        if self._gallery is not None:
            yield self._gallery
        yield self._version

    def mark_unanswered(self) -> None:
        """Nothing came back for it."""
        self.add_class("-unanswered")
        self._caption = " · ".join(filter(None, (self._caption, "not answered")))
        self._show_caption()

    def _show_caption(self) -> None:
        self._version.update(self._caption)
        self._version.display = bool(self._caption)

    def action_want(self, what: str) -> None:
        self.post_message(self.ActionChosen(self.message, what))


WRITES_PER_S = 20
SHOWN_THOUGHT_CHARACTERS = 4_000


class AnswerMessage(Vertical, can_focus=True):
    """The model's answer: Markdown that grows while it is being read, and a caption at the end.

    Mounted empty, or with `text` of an answer that is over. `append` and `think` from the reading task, then
    `finish` once. `message` is set once it belongs to the chat.
    """

    BINDINGS: ClassVar[list[BindingType]] = [bind("message.code", "copy_code"), bind("message.thinking", "unfold")]

    @dataclass
    class CopyRequested(Event):
        """A person wants this text; `what` it is, and None when there is no such thing."""

        text: str | None
        what: str

    def __init__(self, text: str = "", thinking: str = "", message: Message | None = None) -> None:
        super().__init__()
        self.message = message
        self._is_over = message is not None
        self._markdown = Markdown(block(text), parser_factory=parser, open_links=False)
        self._thoughts = Static()
        self._thinking = Collapsible(self._thoughts, title="Thinking", collapsed=True)
        self._thinking.display = False
        self._calls = Static(classes="calls")
        self._calls.display = False
        self._caption = Static(classes="caption")
        self._pending: list[str] = []
        self._thought = thinking
        self._is_thought_new = bool(thinking)
        self._timer: Timer | None = None

    def compose(self) -> ComposeResult:
        yield self._thinking
        yield self._markdown
        yield self._calls
        yield self._caption

    def on_mount(self) -> None:
        if self._is_over:
            self._show_thoughts("Thought")
        else:
            self._timer = self.set_interval(1 / WRITES_PER_S, self._write)

    def append(self, text: str) -> None:
        """Shows more text at the next write."""
        self._pending.append(text)

    def think(self, text: str) -> None:
        """Shows more thinking at the next write."""
        self._thought += text
        self._is_thought_new = True

    def call(self, tool_calls: list[dict[str, Any]]) -> None:
        self._calls.update(Content("\n").join(map(_call_line, tool_calls)))
        self._calls.display = True

    async def _write(self) -> None:
        if not self._is_seen:
            return
        if self._is_thought_new:
            self._show_thoughts("Thinking")
        if not self._pending:
            return
        text = "".join(self._pending)
        self._pending.clear()
        await self._markdown.append(block(text))

    @property
    def _is_seen(self) -> bool:
        """Whether its chat is on the screen; for one that is not, writing waits."""
        return self.screen.is_current and all(
            node.display for node in self.ancestors_with_self if isinstance(node, Widget)
        )

    def _show_thoughts(self, verb: str) -> None:
        self._is_thought_new = False
        self._thinking.display = bool(self._thought)
        if self._thought:
            self._thinking.title = f"{verb}, {short_text.count(len(self._thought.split()))} words"
            self._fill_thoughts()

    @on(Collapsible.Expanded)
    def _fill_thoughts(self) -> None:
        if self._thinking.collapsed:
            return
        thought = self._thought.strip()
        if not self._is_over and len(thought) > SHOWN_THOUGHT_CHARACTERS:
            thought = f"…{thought[-SHOWN_THOUGHT_CHARACTERS:]}"
        self._thoughts.update(Content(block(thought)))

    async def finish(self, full_text: str, caption: str) -> None:
        """Shows the text and the caption for good. A write that is under way comes before it: Markdown keeps order.
        An answer that did nothing but call tools takes no room."""
        self.display = bool(full_text or self._thought or self._calls.display)
        if self._timer is not None:
            self._timer.stop()
        self._pending.clear()
        self._is_over = True
        self._show_thoughts("Thought")
        await self._markdown.update(block(full_text))
        self.show_caption(caption)

    def show_caption(self, caption: str) -> None:
        """Replaces the line below the answer; an empty one takes no room."""
        self._caption.update(caption)
        self._caption.display = bool(caption)

    def action_copy_code(self) -> None:
        blocks = code_blocks(self.message.content if self.message else "")
        self.post_message(self.CopyRequested("\n\n".join(blocks) or None, "code block"))

    def action_unfold(self) -> None:
        self._thinking.collapsed = not self._thinking.collapsed

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """A model may write any link. Only web pages are opened; for others the address is shown."""
        event.stop()
        if event.href.startswith(("http://", "https://")):
            self.app.open_url(event.href)
        else:
            self.notify(line(event.href), title="Not a web address", severity="warning", markup=False)


def _call_line(call: dict[str, Any]) -> Content:
    function = call.get("function") or {}
    arguments = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    return Content.assemble(
        Content.styled("calls ", "$foreground 60%"),
        Content.styled(line(str(function.get("name", "?"))), "bold $accent"),
        line(f"({arguments})"),
    )


class Notice(Static):
    """Something failed, and what to do: `title` says what happened in a few words, `text` why."""

    def __init__(self, title: str, text: str) -> None:
        super().__init__(Content.assemble(Content.styled(title, "bold $error"), "\n", Content(block(text))))


# How an answer's Markdown is read: nothing of what the model said is dropped. There is no HTML in answers:
# `Vec<String>`, `<name>` and `<answer>` are text, and so is what follows an open `<style>`. Only `<br>` in a cell of a
# table, which has no other way to say it, breaks a line; elsewhere line feeds do. A line such as `[note]: text` is no
# definition, which would not be shown. Formulas, backslashes before what needs none, names as `__init__`, and the
# stars of globs, comments, products and powers stay as they are. Other stars begin and end emphasis beside Chinese,
# Japanese and Korean, too, which have no blanks between words; CommonMark asks for one where a sign such as 」 stands.

_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
# Bounded, for a model may repeat anything without end.
_LITERAL = re.compile(
    r"""\\\([\s\S]{1,1000}?\\\) | \\\[[\s\S]{1,1000}?\\\] | \$\$[\s\S]{1,1000}?\$\$
    | \$(?![\s$])[^$\n]{0,300}[^$\s]\$(?![\d$]) | \\[!"'%,/:;=?@^{}()\[\]\\] | \b__[a-z\d_]{1,99}__\b
    | (?<=/)\*(?!\*) | (?<=[^\W_])\*(?=[^\W_]) | (?<!\*)\*(?=\.\w) | (?<=/)\*\*(?=/) | \*\*(?=/\*)
    | (?<=\w)\*\*(?=\d) | (?<=\d)\*\*(?=\w)""",
    re.VERBOSE,
)
_IN_CELL = "in_cell"


def parser() -> MarkdownIt:
    """A new one: it keeps what it has read."""
    made = MarkdownIt("gfm-like", {"html": False}).disable("reference")
    made.core.ruler.at("inline", _inline)
    made.inline.ruler.before("escape", "as_said", _as_said)
    made.inline.ruler.at("emphasis", _emphasis)
    return made


def _inline(state: StateCore) -> None:
    """As the rule that it replaces; it says what is in a cell, and keeps line feeds."""
    before = ""
    for token in state.tokens:
        if token.type == "inline":
            state.env[_IN_CELL] = before in ("th_open", "td_open")
            assert token.children is not None
            state.md.inline.parse(token.content, state.md, state.env, token.children)
            for child in token.children:
                child.type = "hardbreak" if child.type == "softbreak" else child.type
        before = token.type


def _as_said(state: StateInline, silent: bool) -> bool:
    literal = _LITERAL.match(state.src, state.pos)
    found = literal or (_BREAK.match(state.src, state.pos) if state.env.get(_IN_CELL) else None)
    if found is None:
        return False
    for n, said in enumerate(found[0].split("\n") if literal else ("", "")):
        if n and not silent:
            state.push("hardbreak", "br", 0)
        state.pending += "" if silent else said
    state.pos = found.end()
    return True


def _emphasis(state: StateInline, silent: bool) -> bool:
    start, n_before = state.pos, len(state.delimiters)
    if not emphasis.tokenize(state, silent):
        return False
    before, after = state.src[max(0, start - 1) : start] or " ", state.src[state.pos : state.pos + 1] or " "
    for mark in state.delimiters[n_before:] if state.src[start] == "*" else ():
        mark.open |= _is_unspaced(before) and not after.isspace()
        mark.close |= _is_unspaced(after) and not before.isspace()
    return True


def _is_unspaced(letter: str) -> bool:
    return unicodedata.east_asian_width(letter) in ("W", "F", "H")


# --- the greeting ---

_SUGGESTIONS = {
    BUILT_IN: ("Tell me a story about a fox.", "What is 3 + 4?", "What is localrun?"),
    "": (
        "What can you help me with?",
        "Explain what a KV cache is, in two sentences.",
        "Write a haiku about patience.",
    ),
}


class Suggestion(Static):
    """A question that can be marked. `marked` shows that Enter would ask it."""

    marked: reactive[bool] = reactive(False)

    @dataclass
    class Chosen(Event):
        text: str

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def render(self) -> Content:
        style = "bold $primary" if self.marked else "$foreground 80%"
        return Content.styled(("› " if self.marked else "  ") + self.text, style)

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.post_message(self.Chosen(self.text))


class Welcome(Vertical):
    """What an empty conversation shows until the first question: which model answers, and questions to begin with.
    Enter in the empty prompt asks the marked one, so the first answer is one key away. `machine` is the name of
    another one that answers, `models_key` the key that lists the models."""

    def __init__(self, model: str, machine: str, models_key: str) -> None:
        super().__init__()
        place = f"on {machine}" if machine else "on this machine alone"
        if model == BUILT_IN:
            who, another = "tiny, the small model that comes with localrun", "finds better ones"
        else:
            who, another = short_text.model(model, 60), "chooses another"
        self._greeting = f"This is {who}. It runs {place}. {models_key} {another}."
        self._suggestions = [Suggestion(text) for text in _SUGGESTIONS.get(model, _SUGGESTIONS[""])]
        self._suggestions[0].marked = True

    def compose(self) -> ComposeResult:
        yield Static(Content(self._greeting), classes="greeting")
        yield Static(Content("Type below, or press Enter to ask:"), classes="hint")
        yield from self._suggestions

    @property
    def marked(self) -> Suggestion:
        """What Enter asks."""
        return next(suggestion for suggestion in self._suggestions if suggestion.marked)

    def move(self, step: int) -> None:
        """Marks the next (1) or previous (-1) question, round and round."""
        index = (self._suggestions.index(self.marked) + step) % len(self._suggestions)
        for at, suggestion in enumerate(self._suggestions):
            suggestion.marked = at == index
