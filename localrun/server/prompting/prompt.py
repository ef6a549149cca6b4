"""The prompt of a chat: the conversation fitted to the model's template, and rendered.

A template that refuses a conversation is offered milder forms of it; one that silently leaves a system message out
gets it as a user message in the same place.
Runs in the daemon's event loop; the template itself runs in its worker process.
Does not: tokenize (the engine does), shorten, or look at what the prompt ends with (`prepare.py`).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

from localrun.errors import BadRequest, BadTemplate
from localrun.models.header import Header
from localrun.models.token_text import special_token_text
from localrun.server.jobs.job import Job
from localrun.server.parsing import formats
from localrun.server.prompting import conversation
from localrun.server.prompting.ask import ChatAsk, Message
from localrun.server.prompting.profile import Profile
from localrun.server.runtime import Runtime
from localrun.server.templates.fallback import fallback_template
from localrun.server.templates.renderer import TemplateOverrunError
from localrun.wire import Segment


def template_of(job: Job) -> str:
    """The model's chat template: its manifest's, else its file's, else the one of its family."""
    header = job.model.header
    return job.model.template or fallback_template(header.architecture, job.control_tokens)


async def render_template(
    runtime: Runtime,
    job: Job,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    template: str | None = None,
) -> tuple[Segment, ...]:
    """The prompt that asks the model for the next message. `variables` are the template's besides; `template` is one to
    use instead of the model's own.

    Raises BadTemplate, and BadRequest when the template refuses the order or the roles of the messages.
    """
    bos_token, eos_token = _special_tokens(job.model.header)
    given = {
        **(variables or {}),
        "messages": list(messages),
        "add_generation_prompt": True,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "tools": None if tools is None else list(tools),
    }
    return await runtime.renderer.render(template or template_of(job), given, job.control_tokens)


# A header lives as long as the store remembers its file; finding its tokens is a walk through the vocabulary.
_known: WeakKeyDictionary[Header, tuple[str, str]] = WeakKeyDictionary()


def _special_tokens(header: Header) -> tuple[str, str]:
    tokens = _known.get(header)
    if tokens is None:
        tokens = (
            special_token_text(header, "tokenizer.ggml.bos_token_id"),
            special_token_text(header, "tokenizer.ggml.eos_token_id"),
        )
        _known[header] = tokens
    return tokens


_Render = Callable[[Sequence[Message]], Awaitable[tuple[Segment, ...]]]


async def render_chat(runtime: Runtime, job: Job, ask: ChatAsk, template: str, profile: Profile) -> tuple[Segment, ...]:
    """The prompt for the next message. Raises BadTemplate and BadRequest as the template does."""
    messages: Sequence[Message] = ask.messages[:-1] if ask.continue_last else ask.messages
    tools = [] if ask.tool_choice == "none" else [tool.for_template() for tool in ask.tools]
    if tools and not profile.takes_tools:
        messages = conversation.with_tools(messages, tools, profile.call_format or formats.HERMES)
    given = tools if tools and profile.takes_tools else None
    messages = conversation.spelled_out(messages, profile)
    variables = _variables(ask, profile)

    async def render(part: Sequence[Message]) -> tuple[Segment, ...]:
        made = conversation.fitted(part, profile)
        try:
            return await render_template(runtime, job, made, tools=given, variables=variables, template=template)
        except TemplateOverrunError:
            raise
        except BadRequest as refusal:
            # What some templates cannot do without: a list of tools, a description of everything, other arguments.
            described = [conversation.described(tool) for tool in given or ()]
            other = conversation.with_other_arguments(made)
            for again in (made,) if other is None else (made, other):
                try:
                    return await render_template(
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


def _variables(ask: ChatAsk, profile: Profile) -> dict[str, Any]:
    """What the template is told besides the conversation. Only what was asked for: `is defined` must tell."""
    variables: dict[str, Any] = {}
    if ask.documents:
        variables["documents"] = [dict(document) for document in ask.documents]
    if ask.think is not None:
        variables["enable_thinking"] = variables["thinking"] = bool(ask.think)
        if isinstance(ask.think, str):
            variables["reasoning_effort"] = ask.think
        elif not ask.think and profile.takes_effort:
            variables["reasoning_effort"] = profile.least_effort
    if profile.names_functions:
        described = [tool.for_template()["function"] for tool in ask.tools]
        variables["functions"] = json.dumps(described, ensure_ascii=False)
        variables["datetime"] = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    return variables | dict(ask.template_variables)
