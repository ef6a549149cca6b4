"""From what a client asks to what the engine is given, and to the parser of what it answers.

Runs in the daemon's event loop; the template itself runs in its worker process. One pass: look up what the template
says, fit the conversation to it, render, look at how the prompt ends, and with that how the reply begins (with thinking
or without, with a call, or in mid-sentence), choose the grammar and the parser, put pictures and sound in their places.

A template that refuses a conversation is offered milder forms of it; one that silently leaves out a system message, or
one of a role that it does not know, gets it as a user message in the same place.
Does not: tokenize (the engine does), shorten, or know an API's bodies.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from localrun.errors import BadRequest, BadTemplate
from localrun.models.gguf.header import Header, special_token_text
from localrun.models.storage.model import fallback_template
from localrun.server import notices
from localrun.server.http.exchange import THREAD_BYTES, apart
from localrun.server.jobs.job import Job
from localrun.server.parsing import formats
from localrun.server.parsing.parser import CallFormat, ParserPlan, ThinkingTags
from localrun.server.parsing.pieces import PlainParser, ReplyParser
from localrun.server.parsing.written import Written
from localrun.server.prompting import constraint, conversation, probing
from localrun.server.prompting.ask import ChatRequest, Message, Tool
from localrun.server.prompting.conversation import STOP_AT_RESULT
from localrun.server.prompting.profile import REMEMBERED_TEMPLATES, Profile, profile_of
from localrun.server.prompting.segments import placed
from localrun.server.runtime import Runtime
from localrun.server.templates.marks import any_of
from localrun.server.workers import TemplateOverrunError, check_length
from localrun.wire import Grammar, Segment

# Enough of a prompt to see what it ends with.
_END_CHARACTERS = 200


class Prepared(msgspec.Struct, frozen=True):
    """What to submit, and a fresh parser for each reply to it. `stop` is besides what the client wants to stop at."""

    segments: tuple[Segment, ...]
    grammar: Grammar | None
    show_control: bool
    stop: tuple[str, ...]
    new_parser: Callable[[], ReplyParser]


async def prepare(runtime: Runtime, job: Job, ask: ChatRequest) -> Prepared:
    """Raises BadTemplate, and BadRequest for a conversation that the template refuses, for thinking that the model does
    not know, and for media that it does not take or that cannot be decoded."""
    tools = () if ask.tool_choice == "none" else ask.tools
    template = template_of(job, ask.template, with_tools=bool(tools))
    is_long = len(template) >= THREAD_BYTES  # a model's own, perhaps, whatever the body is
    profile = await asyncio.to_thread(profile_of, template) if is_long else profile_of(template)
    thinks = profile.thinks or profile_of(template_of(job, ask.template)).thinks
    _check(ask, thinks=thinks)
    if ask.think and not thinks:
        notices.note(f"{ask.passed_over}: this model does not support thinking")
        ask = msgspec.structs.replace(ask, think=None)
    elif ask.thinking_limit and ask.think is not False and thinks:
        notices.note(f"{ask.thinking_limit}: thinking has no limit of its own; the model ends it by itself")
    if not profile.are_tags_certain or (tools and not profile.is_format_certain):
        profile = await _probed(runtime, job, template, profile)
    media = await runtime.media.attach(job, ask.media) if ask.media else {}
    call_format, tags = profile.call_format or formats.HERMES, profile.tags
    segments = await render_chat(runtime, job, ask, template, profile)
    if ask.continue_last and tags is not None and ask.messages[-1].get("thinking"):
        texts = await probing.texts_round_thinking(_rendering(runtime, job, template, profile), tags)
        ending = ended(segments, ask, tools, call_format, tags, job.ready.control_tokens, texts)
    elif tools:  # whose grammar may take a while
        ending = await asyncio.to_thread(ended, segments, ask, tools, call_format, tags, job.ready.control_tokens)
    else:
        ending = await apart(ended, segments, ask, tools, call_format, tags, job.ready.control_tokens)
    if ask.media:
        ending = replace(ending, segments=placed(ending.segments, ask.media, media, ask.messages))
    if not tools and not profile.marks_replies:
        return Prepared(ending.segments, ending.grammar, show_control=False, stop=(), new_parser=PlainParser)
    plan = ParserPlan(
        call_format=call_format if tools or call_format.whole is not None else None,
        tags=tags,
        answer_marks=profile.answer_marks,
        control_tokens=job.ready.control_tokens,
        calls_are_constrained=ending.calls_are_constrained,
        most_calls=None if ask.parallel_calls else 1,
        must_call=_must_call(ask),
    )
    if plan.shows_control:
        await asyncio.to_thread(plan.warm)
    schemas: dict[str, dict[str, Any]] = {tool.name: tool.parameters for tool in tools}
    return Prepared(
        segments=ending.segments,
        grammar=ending.grammar,
        show_control=plan.shows_control,
        stop=STOP_AT_RESULT if tools and not profile.takes_tools else (),
        new_parser=lambda: plan.parser(
            schemas, opened=ending.opened, is_thinking=ending.is_thinking, has_content=ending.has_content
        ),
    )


def thinks_by_default(job: Job, ask: ChatRequest) -> ChatRequest:
    """As Ollama and llama-server have it: a model that can think does, unless it is told not to. Templates that would
    not by themselves are told so. Where a call must come, that is the template's to say."""
    if ask.think is not None or ask.template is not None or ask.tool_choice not in ("auto", "none"):
        return ask
    return msgspec.structs.replace(ask, think=True) if profile_of(template_of(job)).thinks else ask


def _must_call(ask: ChatRequest) -> bool:
    return bool(ask.tools) and ask.tool_choice not in ("auto", "none")


def _check(ask: ChatRequest, *, thinks: bool) -> None:
    if ask.think and not thinks and not ask.passed_over:
        raise BadRequest.of("think", "this model does not support thinking; leave it out, or use false")
    if ask.continue_last and (not ask.messages or ask.messages[-1]["role"] != "assistant"):
        raise BadRequest.of("messages", "only a last message of the assistant can be continued")


def template_of(job: Job, instead: str | None = None, *, with_tools: bool = False) -> str:
    """The chat template: `instead`, else the manifest's, the file's (its own one `with_tools`, where it has one), or
    the one of the model's family. Raises BadTemplate for one that is too long to be looked at."""
    model = job.model
    template = instead or (model.tool_template if with_tools else "") or model.template
    template = template or fallback_template(model.header.architecture, job.ready.control_tokens)
    check_length(template)
    return template


# The same as of what is found in their texts.
_probed_profiles: OrderedDict[str, Profile] = OrderedDict()


async def _probed(runtime: Runtime, job: Job, template: str, profile: Profile) -> Profile:
    """The profile with what the template's renders say, which are remembered. Raises BadTemplate."""
    known = _probed_profiles.get(template)
    if known is not None:
        _probed_profiles.move_to_end(template)
        return known
    render = _rendering(runtime, job, template, profile, probing.TOOLS if profile.takes_tools else ())
    known = _probed_profiles[template] = probing.with_found(profile, await probing.probe(render, profile))
    if len(_probed_profiles) > REMEMBERED_TEMPLATES:
        _probed_profiles.popitem(last=False)
    return known


def _rendering(
    runtime: Runtime, job: Job, template: str, profile: Profile, tools: Sequence[Tool] = ()
) -> probing.Render:
    """What renders the conversations that a template is looked at with."""

    async def render(messages: Sequence[Message]) -> str:
        made = conversation.fitted(conversation.with_names(messages), profile)
        given = [tool.for_template() for tool in tools] or None
        for way in filter(None, (made, conversation.with_other_arguments(made))):
            try:
                segments = await render_template(runtime, job, template, way, tools=given, adds_prompt=False)
            except TemplateOverrunError:
                raise
            except BadRequest:
                continue
            return "".join(segment.text for segment in segments)
        return ""

    return render


async def render_template(
    runtime: Runtime,
    job: Job,
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    adds_prompt: bool = True,
) -> tuple[Segment, ...]:
    """The prompt that asks the model for the next message, if it `adds_prompt`. `variables` are the template's besides.

    Raises BadTemplate, and BadRequest when the template refuses the order or the roles of the messages.
    """
    bos_token, eos_token = _special_tokens(job.model.header)
    given = {
        **(variables or {}),
        "messages": list(messages),
        "add_generation_prompt": adds_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "tools": None if tools is None else list(tools),
    }
    return await runtime.renderer.render(template, given, job.ready.control_tokens)


# A header lives as long as the store remembers its file; finding its tokens is a walk through the vocabulary.
_known_tokens: WeakKeyDictionary[Header, tuple[str, str]] = WeakKeyDictionary()


def _special_tokens(header: Header) -> tuple[str, str]:
    tokens = _known_tokens.get(header)
    if tokens is None:
        tokens = (
            special_token_text(header, "tokenizer.ggml.bos_token_id"),
            special_token_text(header, "tokenizer.ggml.eos_token_id"),
        )
        _known_tokens[header] = tokens
    return tokens


_Render = Callable[[Sequence[Message]], Awaitable[tuple[Segment, ...]]]


async def render_chat(
    runtime: Runtime, job: Job, ask: ChatRequest, template: str, profile: Profile
) -> tuple[Segment, ...]:
    """The prompt for the next message. Raises BadTemplate and BadRequest as the template does."""
    messages: Sequence[Message] = ask.messages[:-1] if ask.continue_last else ask.messages
    tools = [] if ask.tool_choice == "none" else [tool.for_template() for tool in ask.tools]
    if tools and not profile.takes_tools:
        call_format = profile.call_format or formats.HERMES
        messages = await asyncio.to_thread(conversation.with_tools, messages, tools, call_format)
    given = tools if tools and profile.takes_tools else None
    marks: dict[str, str] = {}
    if not profile.knows_calls and await apart(conversation.has_calls, messages):
        written, marks = _marked((profile.call_format or formats.HERMES).written, job.ready.control_tokens)
        messages = await apart(conversation.spelled_out, messages, profile, written)
    else:
        messages = await apart(conversation.spelled_out, messages, profile)
    variables, adds_prompt = variables_of(ask, profile), ask.adds_prompt

    async def render(part: Sequence[Message]) -> tuple[Segment, ...]:
        made = await apart(conversation.fitted, part, profile)
        try:
            return await render_template(
                runtime, job, template, made, tools=given, variables=variables, adds_prompt=adds_prompt
            )
        except TemplateOverrunError:
            raise
        except BadRequest as refusal:
            # What some templates cannot do without: a list of tools, a description of everything, other arguments.
            other = await apart(conversation.with_other_arguments, made)
            ways = product((True, False) if given else (True,), (made,) if other is None else (made, other))
            for has_types, again in ways:
                described = [conversation.described(tool, has_types=has_types) for tool in given or ()]
                try:
                    return await render_template(
                        runtime, job, template, again, tools=described, variables=variables, adds_prompt=adds_prompt
                    )
                except TemplateOverrunError:
                    raise
                except BadRequest:
                    continue
            raise refusal from None

    try:
        segments = await _first_accepted(render, messages)
    except BadTemplate:
        raise
    except BadRequest:
        if variables.pop("reasoning_effort", None) is None:
            raise
        segments = await _first_accepted(render, messages)
        notices.note("the level of thinking, which the model's template does not know")
    segments = await _with_every_message(render, messages, segments)
    return await apart(_unmarked, segments, marks) if marks else segments


def _marked(written: Written, control_tokens: Sequence[str]) -> tuple[Written, dict[str, str]]:
    """The same with a mark in the place of each control token, and what the marks stand for: in a message, the names
    of control tokens are taken for a client's text."""
    pattern, nonce = any_of(tuple(control_tokens)), secrets.token_hex(16)
    marks: dict[str, str] = {}

    def mark(found: re.Match[str]) -> str:
        made = f"mark{nonce}n{len(marks):02d}"
        marks[made] = found.group()
        return made

    return (written if pattern is None else written.with_texts(lambda text: pattern.sub(mark, text))), marks


def _unmarked(segments: Sequence[Segment], marks: Mapping[str, str]) -> tuple[Segment, ...]:
    """The segments with control tokens in the places of marks."""
    pattern = re.compile(f"({'|'.join(marks)})")
    parts = ((segment, part) for segment in segments for part in pattern.split(segment.text) if part)
    return tuple(Segment(marks[part]) if part in marks else Segment(part, segment.trusted) for segment, part in parts)


async def _first_accepted(render: _Render, messages: Sequence[Message]) -> tuple[Segment, ...]:
    try:
        return await render(messages)
    except TemplateOverrunError:
        raise
    except BadRequest as refusal:
        for variant in await apart(list, conversation.milder(messages)):
            try:
                return await render(variant)
            except TemplateOverrunError:
                raise
            except BadRequest:
                continue
        raise refusal from None


async def _with_every_message(
    render: _Render, messages: Sequence[Message], segments: tuple[Segment, ...]
) -> tuple[Segment, ...]:
    """`segments`, or the prompt with the messages that are missing there as user messages."""
    missing = await apart(_missing, messages, segments)
    if not missing:
        return segments
    moved = await apart(conversation.as_user, messages, frozenset(missing))
    try:
        other = await _first_accepted(render, moved)
    except BadRequest:
        return segments
    return other if len(await apart(_missing, messages, other)) < len(missing) else segments


_MOST_SEARCHED = 16_000_000


def _missing(messages: Sequence[Message], segments: Sequence[Segment]) -> list[str]:
    """Most stand in order, so each is looked for behind the one before, and only then from the beginning. So many
    characters are looked through in all; who sends more messages than that allows is not told which are missing."""
    text = "".join(segment.text for segment in segments)
    missing: list[str] = []
    behind, left = 0, _MOST_SEARCHED
    for said in conversation.texts_to_find(messages):
        wanted = said.strip()
        at = text.find(wanted, behind)
        left -= (at if at >= 0 else len(text)) - behind
        if at < 0 and left > 0:
            at = text.find(wanted, 0, behind + len(wanted))
            left -= behind if at < 0 else at
        if left <= 0:
            break
        if at < 0:
            missing.append(said)
        else:
            behind = at + len(wanted)
    return missing


def variables_of(ask: ChatRequest, profile: Profile) -> dict[str, Any]:
    """What the template is told besides the conversation: today's date (Llama 3's templates have another one for those
    who do not say), and only what was asked for, because `is defined` must tell."""
    now = datetime.now().astimezone()
    variables: dict[str, Any] = {"date_string": now.strftime("%d %b %Y")}
    if ask.documents:
        variables["documents"] = [dict(document) for document in ask.documents]
    if ask.think is not None:
        variables["enable_thinking"] = variables["thinking"] = bool(ask.think)
        wanted = ask.think if isinstance(ask.think, str) else "none" if profile.takes_effort and not ask.think else ""
        word = profile.effort(wanted)
        if word is not None:
            variables["reasoning_effort"] = word
        elif wanted:
            notices.note(f"{ask.passed_over or 'think'}: no level has the name {wanted[:40]}")
    if profile.names_functions:
        described = [tool.for_template()["function"] for tool in ask.tools]
        variables["functions"] = json.dumps(described, ensure_ascii=False)
        variables["datetime"] = now.strftime("%Y-%m-%d %H:%M:%S %Z")
    return variables | dict(ask.template_variables)


@dataclass(frozen=True)
class Ending:
    """`opened` is what the prompt already has of the reply for the parser to read; `is_thinking` says that the reply
    begins inside of thinking, `has_content` that it goes on from content."""

    segments: tuple[Segment, ...]
    grammar: Grammar | None
    is_thinking: bool = False
    has_content: bool = False
    opened: str = ""
    calls_are_constrained: bool = False


def ended(
    segments: tuple[Segment, ...],
    ask: ChatRequest,
    tools: Sequence[Tool],
    call_format: CallFormat,
    tags: ThinkingTags | None,
    control_tokens: Sequence[str],
    thinking_texts: tuple[str, str] | None = None,
) -> Ending:
    """`thinking_texts` are those that the template writes before thinking and behind it. Raises BadRequest for a schema
    that no decoding can be held to."""
    end = "".join(segment.text for segment in segments)[-_END_CHARACTERS:]
    is_open = tags is not None and tags.is_open(end)
    must_call = _must_call(ask)
    if ask.continue_last:
        return _continued(segments, ask, call_format, tags, thinking_texts, is_open=is_open)
    # Models that list arguments are those that think long: there a call that must come does so at once, unless thinking
    # was asked for.
    thinks = bool(ask.think) or (ask.think is None and not (must_call and call_format.written.arguments is not None))
    if tags is not None and is_open and not thinks:
        segments, is_open = (*segments, Segment(f"\n{tags.closing}\n\n")), False
    grammar, is_constrained = _grammar(ask, tools, call_format, control_tokens)
    if grammar is not None and not grammar.triggers:
        if call_format.answers and not must_call:
            grammar = Grammar(grammar.kind, grammar.text, call_format.answers)
        elif tags is not None:
            grammar = constraint.after_thinking(
                grammar,
                tags,
                is_open=is_open,
                may_think=thinks and not tags.is_closed(end),
                must_come=must_call,
                control_tokens=control_tokens,
            )
    return Ending(segments, grammar, is_thinking=is_open, calls_are_constrained=is_constrained)


def _grammar(
    ask: ChatRequest, tools: Sequence[Tool], call_format: CallFormat, control_tokens: Sequence[str]
) -> tuple[Grammar | None, bool]:
    """The grammar, and whether every call will be well-formed by it."""
    written = call_format.written
    if not tools:
        return ask.response_grammar, False
    is_one = not ask.parallel_calls
    if ask.tool_choice != "auto":
        if isinstance(ask.tool_choice, tuple):
            tools = [tool for tool in tools if tool.name == ask.tool_choice[1]]
            is_one = True
        return constraint.forced_calls(written, tools, is_one=is_one, control_tokens=control_tokens), True
    if ask.response_grammar is not None:
        if call_format.answers:  # calls and answers have headers of their own
            return ask.response_grammar, False
        answer = ask.response_grammar
        return constraint.calls_or_answer(written, tools, answer, is_one=is_one, control_tokens=control_tokens), True
    lazy = constraint.lazy_calls(written, tools, is_one=is_one, control_tokens=control_tokens)
    return lazy, lazy is not None


def _continued(
    segments: tuple[Segment, ...],
    ask: ChatRequest,
    call_format: CallFormat,
    tags: ThinkingTags | None,
    thinking_texts: tuple[str, str] | None,
    *,
    is_open: bool,
) -> Ending:
    """The last message at the end of the prompt, as text that a client wrote: it opens no turn and no call."""
    last = ask.messages[-1]
    content, thinking = str(last.get("content") or ""), str(last.get("thinking") or "")
    grammar = ask.response_grammar
    if grammar is not None and content.strip():
        grammar = msgspec.structs.replace(grammar, begun=content)
    if call_format.answers:
        channel = call_format.answers[0] if content or not thinking else call_format.thoughts
        text = content if content or not thinking else thinking
        return Ending((*segments, Segment(channel), Segment(text, trusted=False)), grammar, opened=channel)
    added: list[Segment] = []
    closing = "" if tags is None else f"\n{tags.closing}\n\n"
    if tags is not None and thinking:
        opening, closing = thinking_texts or (f"{tags.opening}\n", closing)
        added += [] if is_open else [Segment(opening)]
        added.append(Segment(thinking, trusted=False))
        is_open = True
    if tags is not None and is_open and (content or not thinking):
        added.append(Segment(closing))
        is_open = False
    if content:
        added.append(Segment(content, trusted=False))
    if grammar is not None and tags is not None and is_open:
        grammar = constraint.after_thinking(grammar, tags, is_open=True, may_think=True)
    return Ending((*segments, *added), grammar, is_thinking=is_open, has_content=bool(content.strip()))
