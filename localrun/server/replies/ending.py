"""How a prompt ends, and with that how the reply begins: with thinking or without, with a call, or in mid-sentence.

What the prompt needs at its end is added here, and the grammar is chosen to begin where the reply does.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localrun.server.replies import constraint, formats, thinking_tags
from localrun.server.replies.chat_ask import ChatAsk, Tool
from localrun.server.replies.formats import CallFormat
from localrun.server.replies.thinking_tags import ThinkingTags
from localrun.wire import Grammar, Segment

_HARMONY_FINAL = "<|channel|>final<|message|>"
# What a reply comes to when the answer proper begins.
_HARMONY_TRIGGERS = (_HARMONY_FINAL, "<|channel|>final <|constrain|>json<|message|>")
# Enough of a prompt to see what it ends with.
_END_CHARACTERS = 200


@dataclass(frozen=True)
class Ending:
    """`thinking_open` is the tag that the reply begins inside of; `opened` what the prompt already has of the reply."""

    segments: tuple[Segment, ...]
    grammar: Grammar | None
    thinking_open: str | None = None
    opened: str = ""
    calls_are_constrained: bool = False


def ended(
    segments: tuple[Segment, ...],
    ask: ChatAsk,
    tools: Sequence[Tool],
    call_format: CallFormat,
    tags: ThinkingTags | None,
    control_tokens: Sequence[str],
) -> Ending:
    """Raises BadRequest for a schema that no decoding can be held to."""
    end = "".join(segment.text for segment in segments)[-_END_CHARACTERS:]
    is_open = tags is not None and thinking_tags.is_open(end, tags)
    must_call = bool(tools) and ask.tool_choice not in ("auto", "none")
    if ask.continue_last:
        return _continued(segments, ask, tags, is_open=is_open, is_harmony=call_format is formats.HARMONY)
    if tags is not None and is_open and (ask.think is False or (must_call and call_format.written is None)):
        segments, is_open = (*segments, Segment(f"\n{tags.closing}\n\n")), False
    if must_call and call_format.written is None:
        begun = call_format.begun
        if isinstance(ask.tool_choice, tuple):
            begun = call_format.begun_by_name.replace("NAME", ask.tool_choice[1])
        return Ending((*segments, Segment(begun)), None, opened=begun)
    grammar, is_constrained = _grammar(ask, tools, call_format)
    if grammar is not None and not grammar.triggers:
        if call_format is formats.HARMONY and not must_call:
            grammar = Grammar(grammar.kind, grammar.text, _HARMONY_TRIGGERS)
        elif tags is not None:
            may_think = ask.think is not False and not thinking_tags.is_closed(end, tags)
            grammar = constraint.after_thinking(
                grammar, tags, is_open=is_open, may_think=may_think, control_tokens=control_tokens
            )
    return Ending(
        segments,
        grammar,
        thinking_open=tags.opening if tags is not None and is_open else None,
        calls_are_constrained=is_constrained,
    )


def _grammar(ask: ChatAsk, tools: Sequence[Tool], call_format: CallFormat) -> tuple[Grammar | None, bool]:
    """The grammar, and whether every call will be well-formed by it."""
    written = call_format.written
    if not tools or written is None:
        return ask.response_grammar, False
    at_most = None if ask.parallel_calls else 1
    if ask.tool_choice != "auto":
        if isinstance(ask.tool_choice, tuple):
            tools = [tool for tool in tools if tool.name == ask.tool_choice[1]]
            at_most = 1
        return constraint.forced_calls(written, tools, at_most=at_most), True
    if ask.response_grammar is not None:
        if call_format is formats.HARMONY:  # calls and answers have channels of their own
            return ask.response_grammar, False
        return constraint.calls_or_answer(written, tools, ask.response_grammar, at_most=at_most), True
    lazy = constraint.lazy_calls(written, tools, at_most=at_most)
    return lazy, lazy is not None


def _continued(
    segments: tuple[Segment, ...], ask: ChatAsk, tags: ThinkingTags | None, *, is_open: bool, is_harmony: bool
) -> Ending:
    """The last message at the end of the prompt, as text that a client wrote: it opens no turn and no call."""
    last = ask.messages[-1]
    content, thinking = str(last.get("content") or ""), str(last.get("thinking") or "")
    if is_harmony:
        channel = _HARMONY_FINAL if content or not thinking else "<|channel|>analysis<|message|>"
        text = content if content or not thinking else thinking
        return Ending((*segments, Segment(channel), Segment(text, trusted=False)), ask.response_grammar, opened=channel)
    added: list[Segment] = []
    if tags is not None and thinking:
        added += [] if is_open else [Segment(f"{tags.opening}\n")]
        added.append(Segment(thinking, trusted=False))
        is_open = True
    if tags is not None and is_open and (content or not thinking):
        added.append(Segment(f"\n{tags.closing}\n\n"))
        is_open = False
    if content:
        added.append(Segment(content, trusted=False))
    grammar = ask.response_grammar
    if grammar is not None and tags is not None and is_open:
        grammar = constraint.after_thinking(grammar, tags, is_open=True, may_think=True)
    return Ending((*segments, *added), grammar, thinking_open=tags.opening if tags is not None and is_open else None)
