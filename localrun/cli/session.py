"""A conversation in the REPL: its messages and settings, and the slash commands that change them.

Pure. Does not: read, print or connect.
"""

from __future__ import annotations

from typing import Any

import msgspec

from localrun.cli.answer import Stats
from localrun.cli.model_options import set_option
from localrun.errors import BadRequest

HELP = """\
/set parameter NAME VALUE   set an option, such as temperature or num_predict
/set system TEXT            set the system message
/set verbose                print a table of counts and times after each answer
/set quiet                  print nothing about speed
/set brief                  print one line about speed (the default)
/show info                  what is known about the model
/show parameters            the options set here, and the model's own
/show system                the system message
/show template              the model's chat template
/clear                      forget the conversation
/bye                        leave (also Ctrl-D)
/? or /help                 this text
\"\"\" starts and ends a message of several lines. Ctrl-C stops an answer."""


class Session(msgspec.Struct, kw_only=True):
    """`history` holds the turns so far, without the system message."""

    model: str
    system: str = ""
    options: dict[str, Any] = {}
    stats: Stats = Stats.BRIEF
    history: list[dict[str, Any]] = []

    def messages(self, prompt: str) -> list[dict[str, Any]]:
        """The conversation to send for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.history, {"role": "user", "content": prompt}]

    def remember(self, prompt: str, answer: str) -> None:
        """Add a turn. One whose answer was stopped before its first word is not part of the conversation."""
        if answer:
            self.history += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    def set(self, arguments: str) -> str:
        """Do `/set ARGUMENTS`; what to tell the user. Raises BadRequest."""
        what, _, rest = arguments.partition(" ")
        rest = rest.strip()
        if what in tuple(Stats):
            self.stats = Stats(what)
            return f"stats are {what}"
        if what == "system" and rest:
            self.system = rest
            return "the system message is set"
        if what == "parameter":
            name, _, text = rest.partition(" ")
            if name and text.strip():
                set_option(self.options, name, text.strip())
                return f"{name} is {self.options[name]}"
        raise BadRequest("write /set parameter NAME VALUE, /set system TEXT, /set verbose, /set brief or /set quiet")

    def clear(self) -> str:
        """Do `/clear`; what to tell the user."""
        self.history.clear()
        return "the conversation is forgotten"
