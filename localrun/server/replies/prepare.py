"""From what a client asks to what the engine is given, and to the parser of what it answers.

Runs in the daemon's event loop; the template itself runs in its worker process. One pass: recognise the model's formats
by its template, fit the conversation to it, render, look at how the prompt ends, choose the grammar and the parser.

Does not: tokenize (the engine does), shorten, or know an API's bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from localrun.errors import BadRequest
from localrun.server.jobs.job import Job
from localrun.server.jobs.prompt import template_of
from localrun.server.replies import formats, recognise, thinking_tags, tool_system
from localrun.server.replies.chat_ask import ChatAsk, Tool, ToolChoice
from localrun.server.replies.chat_prompt import render_chat
from localrun.server.replies.ending import ended
from localrun.server.replies.parser_plan import ParserPlan
from localrun.server.replies.pieces import ReplyParser
from localrun.server.runtime import Runtime
from localrun.server.templates.frames import check_length
from localrun.wire import Grammar, Segment

__all__ = ["ChatAsk", "Prepared", "Tool", "ToolChoice", "prepare"]


class Prepared(msgspec.Struct, frozen=True):
    """What to submit, and a fresh parser for each reply to it. `stop` is besides what the client wants to stop at."""

    segments: tuple[Segment, ...]
    grammar: Grammar | None
    show_control: bool
    stop: tuple[str, ...]
    new_parser: Callable[[], ReplyParser]


async def prepare(runtime: Runtime, job: Job, ask: ChatAsk) -> Prepared:
    """Raises BadTemplate, and BadRequest for a conversation that the template refuses, for tools that contradict each
    other or the tool choice, and for thinking that the model does not know."""
    template = ask.template or template_of(job)
    check_length(template)
    known = recognise.call_format(template)
    tags = thinking_tags.thinking_tags(template)
    _check(ask, knows_thinking=tags is not None or known is formats.HARMONY or thinking_tags.takes_effort(template))
    tools = () if ask.tool_choice == "none" else ask.tools
    call_format = known or formats.HERMES
    segments = await render_chat(runtime, job, ask, template, call_format if tools else known)
    if tools:  # whose grammar may take a while
        ending = await asyncio.to_thread(ended, segments, ask, tools, call_format, tags, job.control_tokens)
    else:
        ending = ended(segments, ask, tools, call_format, tags, job.control_tokens)
    plan = ParserPlan(
        call_format=call_format if tools or call_format.whole is not None else None,
        tags=tags,
        answer_marks=thinking_tags.answer_marks(template),
        control_tokens=job.control_tokens,
        triggers=ending.grammar.triggers if ending.grammar is not None else (),
        calls_are_constrained=ending.calls_are_constrained,
        most_calls=None if ask.parallel_calls else 1,
    )
    if plan.shows_control:
        await asyncio.to_thread(plan.warm)
    schemas: dict[str, dict[str, Any]] = {tool.name: tool.parameters for tool in tools}
    return Prepared(
        segments=ending.segments,
        grammar=ending.grammar,
        show_control=plan.shows_control,
        stop=tool_system.STOP_AT_RESULT if tools and not recognise.takes_tools(template) else (),
        new_parser=lambda: plan.parser(schemas, opened=ending.opened, thinking_open=ending.thinking_open),
    )


def _check(ask: ChatAsk, *, knows_thinking: bool) -> None:
    names = [tool.name for tool in ask.tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRequest(f"tools: {twice!r} is there twice; every tool needs a name of its own", field="tools")
    if isinstance(ask.tool_choice, tuple) and ask.tool_choice[1] not in names:
        raise BadRequest(f"tool_choice: {ask.tool_choice[1]!r} is not one of the tools", field="tool_choice")
    if ask.tool_choice == "required" and not names:
        raise BadRequest("tool_choice: there are no tools to choose from; send tools as well", field="tool_choice")
    if ask.think and not knows_thinking:
        raise BadRequest("think: this model does not support thinking; leave it out, or use false", field="think")
    if ask.continue_last and (not ask.messages or ask.messages[-1]["role"] != "assistant"):
        raise BadRequest("messages: only a last message of the assistant can be continued", field="messages")
