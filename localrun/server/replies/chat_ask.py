"""What is asked of a model in a chat, whatever API it came by.

Pure data. Does not: know an API's bodies, or a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from localrun.server.jobs.prompt import Message
from localrun.wire import Grammar


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call. `parameters` is a JSON schema of an object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


ToolChoice = Literal["auto", "none", "required"] | tuple[Literal["function"], str]


class ChatAsk(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation and what is wanted of the next message.

    `messages` as in `messages.py`. `think` None leaves it to the template; a text is an effort ("low", "medium",
    "high"). With `continue_last` the last message is an assistant's, and the reply goes on where it ends.
    `response_grammar` is what the content must match; thinking before it is free. `template` is one to use instead of
    the model's own.
    """

    messages: Sequence[Message]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_calls: bool = True
    response_grammar: Grammar | None = None
    think: bool | str | None = None
    documents: Sequence[Mapping[str, Any]] = ()
    template_variables: Mapping[str, Any] = {}
    continue_last: bool = False
    template: str | None = None
