"""The prompt of a chat: the conversation fitted to the model's template, and rendered.

A template that refuses a conversation is offered milder forms of it; one that silently leaves a system message out
gets it as a user message in the same place.

Runs in the daemon's event loop. Does not: look at what the prompt ends with (`ending.py`).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any

from localrun.errors import BadRequest, BadTemplate
from localrun.server.jobs import prompt
from localrun.server.jobs.job import Job
from localrun.server.jobs.prompt import Message
from localrun.server.replies import formats, recognise, thinking_tags, tool_system
from localrun.server.replies import messages as conversation
from localrun.server.replies.chat_ask import ChatAsk
from localrun.server.replies.formats import CallFormat
from localrun.server.runtime import Runtime
from localrun.server.templates.renderer import TemplateOverrunError
from localrun.wire import Segment

_Render = Callable[[Sequence[Message]], Awaitable[tuple[Segment, ...]]]


async def render_chat(
    runtime: Runtime, job: Job, ask: ChatAsk, template: str, call_format: CallFormat | None
) -> tuple[Segment, ...]:
    """The prompt for the next message. Raises BadTemplate and BadRequest as the template does."""
    messages: Sequence[Message] = ask.messages[:-1] if ask.continue_last else ask.messages
    tools = [] if ask.tool_choice == "none" else [tool.for_template() for tool in ask.tools]
    takes_tools = recognise.takes_tools(template)
    if tools and not takes_tools:
        messages = tool_system.with_tools(messages, tools, call_format or formats.HERMES)
    given = tools if tools and takes_tools else None
    is_harmony = call_format is formats.HARMONY
    messages = conversation.spelled_out(messages, template)

    async def render(part: Sequence[Message]) -> tuple[Segment, ...]:
        made = conversation.fitted(part, template, is_harmony=is_harmony)
        variables = _variables(ask, template)
        try:
            return await prompt.render(runtime, job, made, tools=given, variables=variables, template=template)
        except TemplateOverrunError:
            raise
        except BadRequest as refusal:
            # What some templates cannot do without: a list of tools, a description of everything, other arguments.
            described = [tool_system.described(tool) for tool in given or ()]
            other = conversation.with_other_arguments(made)
            for again in (made,) if other is None else (made, other):
                try:
                    return await prompt.render(
                        runtime, job, again, tools=described, variables=variables, template=template
                    )
                except TemplateOverrunError:
                    raise
                except BadRequest:
                    continue
            raise refusal from None

    segments = await _first_accepted(render, messages)
    return await _with_every_system_message(render, messages, segments)


async def _first_accepted(render: _Render, messages: Sequence[Message]) -> tuple[Segment, ...]:
    try:
        return await render(messages)
    except BadTemplate:
        raise  # other messages would not mend it
    except BadRequest as refusal:
        for variant in conversation.milder(messages):
            try:
                return await render(variant)
            except BadRequest:
                continue
        raise refusal from None


async def _with_every_system_message(
    render: _Render, messages: Sequence[Message], segments: tuple[Segment, ...]
) -> tuple[Segment, ...]:
    """`segments`, or the prompt with the system messages that are missing there as user messages."""
    missing = _missing(messages, segments)
    if not missing:
        return segments
    moved = conversation.system_as_user(messages, frozenset(missing))
    try:
        other = await _first_accepted(render, moved)
    except BadRequest:
        return segments
    return other if len(_missing(messages, other)) < len(missing) else segments


def _missing(messages: Sequence[Message], segments: Sequence[Segment]) -> list[str]:
    text = "".join(segment.text for segment in segments)
    return [system for system in conversation.system_texts(messages) if system.strip() not in text]


def _variables(ask: ChatAsk, template: str) -> dict[str, Any]:
    """What the template is told besides the conversation. Only what was asked for: `is defined` must tell."""
    variables: dict[str, Any] = {}
    if ask.documents:
        variables["documents"] = [dict(document) for document in ask.documents]
    if ask.think is not None:
        variables["enable_thinking"] = variables["thinking"] = bool(ask.think)
        if isinstance(ask.think, str):
            variables["reasoning_effort"] = ask.think
        elif not ask.think and thinking_tags.takes_effort(template):
            variables["reasoning_effort"] = thinking_tags.least_effort(template)
    if "+ functions " in template:  # Firefunction's names for the tools and the time
        described = [tool.for_template()["function"] for tool in ask.tools]
        variables["functions"] = json.dumps(described, ensure_ascii=False)
        variables["datetime"] = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    return variables | dict(ask.template_variables)
