"""The line below the prompt: the state of the current answer and its numbers, live."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from localrun.tui.answer_progress import Fact, fit_facts

_MARK = "● "
_WIDE_GAP, _NARROW_GAP = 3, 2
_TONES = {"good": "$success", "bad": "bold $error", "wait": "$warning", "rate": "bold $primary", "": "$foreground 75%"}


class StatusLine(Widget):
    """As many facts as fit. The first is the state and has a dot before it."""

    facts: reactive[tuple[Fact, ...]] = reactive(())

    def render(self) -> Content:
        room = self.size.width - len(_MARK)
        gap = _WIDE_GAP
        facts = fit_facts(list(self.facts), room, gap)
        if len(facts) < len(self.facts):
            gap = _NARROW_GAP
            facts = fit_facts(list(self.facts), room, gap)
        parts = [Content.styled(fact.text, _TONES[fact.tone]) for fact in facts]
        if parts:
            parts[0] = Content.styled(_MARK, _TONES[facts[0].tone]) + parts[0]
        return Content(" " * gap).join(parts)
