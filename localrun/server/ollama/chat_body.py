"""The body of POST /api/chat, and its messages as chat templates want them.

Does not: know the model, or render the conversation.
"""

from __future__ import annotations

from typing import Any

import msgspec

from localrun.errors import BadRequest
from localrun.server.ollama.bodies import PromptFields, refuse_images
from localrun.server.openai import messages as openai_messages
from localrun.server.prompting.ask import ChatAsk, ChatTools, Choice, Message, choose_tools, tools_of_chat

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a call. Ollama has the arguments as an object; some clients send their JSON text."""

    name: str
    arguments: dict[str, Any] | str | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One of an assistant's `tool_calls`."""

    function: CalledFunction
    id: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One of `messages`. `reasoning_content` is what some editors call `thinking`."""

    role: str
    content: str | None = None
    thinking: str | None = None
    reasoning_content: str | None = None
    images: list[Any] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatBody(PromptFields, frozen=True, kw_only=True):
    """See the module. `tool_choice` is not Ollama's but OpenAI's, in its words."""

    messages: list[ChatMessage] | None = None
    tools: ChatTools | None = None
    tool_choice: Choice | None = None

    def ask(self) -> ChatAsk:
        """The conversation and what is wanted next; an assistant's last message is gone on with. Raises BadRequest."""
        tools, choice = choose_tools(self.tool_choice, tools_of_chat(self.tools or ()))
        messages = [self._message(message, f"messages[{at}]") for at, message in enumerate(self.messages or [])]
        continues = bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        if continues and choice not in ("auto", "none"):
            raise BadRequest(
                "tool_choice: an answer that goes on from an assistant's message cannot be a call; use 'auto'",
                field="tool_choice",
            )
        return ChatAsk(
            messages=messages,
            tools=tools,
            tool_choice=choice,
            response_grammar=self.answer_grammar(),
            think=self.thinking(),
            continue_last=continues,
        )

    def _message(self, message: ChatMessage, where: str) -> Message:
        role = _ROLES.get(message.role)
        if role is None:
            raise BadRequest(
                f"{where}.role: {message.role[:40]!r} is not a role; use {', '.join(_ROLES)}", field=f"{where}.role"
            )
        refuse_images(message.images, f"{where}.images", self.model)
        made: Message = {"role": role, "content": message.content or ""}
        if role == "assistant":
            thinking = message.thinking or message.reasoning_content
            if thinking:
                made["thinking"] = thinking
            if message.tool_calls:
                made["tool_calls"] = [
                    _call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
                ]
        elif role == "tool":
            made["tool_call_id"] = message.tool_call_id or ""
            made["name"] = message.tool_name or ""
        return made


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    arguments = openai_messages.arguments_of(call.function.arguments, f"{where}.function.arguments")
    # Without an id, results are told apart by their names and their order.
    named = {"id": call.id} if call.id else {}
    return named | {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
