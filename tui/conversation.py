"""A conversation with one model: what was asked and answered, as the API wants it. Pure.

Lives in memory and ends with the app.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Turn:
    """One question and as much of its answer as came."""

    question: str
    answer: str = ""


@dataclass
class Conversation:
    """Turns, oldest first. Only the last one can be unanswered, while its answer is being read."""

    model: str
    turns: list[Turn] = field(default_factory=list)

    def ask(self, question: str) -> Turn:
        """Begins a turn."""
        turn = Turn(question)
        self.turns.append(turn)
        return turn

    def drop_unanswered(self) -> Turn | None:
        """Forgets the last turn if nothing came back, so that the model does not see the question twice."""
        if self.turns and not self.turns[-1].answer:
            return self.turns.pop()
        return None

    def messages(self) -> list[dict[str, str]]:
        """All turns in the shape of `/api/chat`. A stopped answer counts as the answer."""
        found = []
        for turn in self.turns:
            found.append({"role": "user", "content": turn.question})
            if turn.answer:
                found.append({"role": "assistant", "content": turn.answer})
        return found

    def last_answer(self) -> str | None:
        """The newest text that a model wrote."""
        return next((turn.answer for turn in reversed(self.turns) if turn.answer), None)
