"""What a chat template says of its model: how it writes tool calls, marks its thinking, and takes messages.

By what the template says and renders: it is the one description of these that comes with every model. A template is
looked at once, and what was found is remembered (`profile`).

Templates come from anywhere, so every pattern must take time in proportion to their length: two repetitions of the same
characters never stand side by side, unless the first is possessive.
Pure, but for the file that `capabilities` reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal
from weakref import WeakKeyDictionary

from localrun.errors import BadModelFile
from localrun.models.gguf.header import RANK, Header
from localrun.models.storage.model import Model
from localrun.server.parsing import formats
from localrun.server.parsing.parser import CallFormat, ThinkingTags
from localrun.server.prompting.segments import fim_tokens

# Opening and closing tag. The first pair of which a template knows either is its own.
_TAGS: tuple[tuple[str, str], ...] = (
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|think|>", "<|/think|>"),
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
)
# Marks round the answer proper, which are no part of it.
_ANSWER_MARKS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>", "[END FINAL RESPONSE]")
_ANSWER_TAGS = "<response></response>"
# Few models are loaded at a time, and a client may send templates of a megabyte.
REMEMBERED_TEMPLATES = 8


# All texts of one entry must be in the template.
_BY_MARKS: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    (("<|channel|>", "<|message|>"), formats.HARMONY),
    (("<atem:function_calls>", "<|message|>"), formats.GLIMMER),
    (("｜DSML｜", "parameter", "tool_calls>"), formats.DEEPSEEK_V4),
    (("｜DSML｜", "parameter"), formats.DEEPSEEK_TAGS),
    (("<｜tool▁call▁begin｜>", "```json"), formats.DEEPSEEK_R1),
    (("<｜tool▁call▁begin｜>",), formats.DEEPSEEK_V31),
    (("<|tool_calls_section_begin|>",), formats.KIMI),
    (("<minimax:tool_call>",), formats.MINIMAX),
    (("<seed:tool_call>",), formats.SEED),
    (("<|tool_call>", "<tool_call|>"), formats.GEMMA),
    (("<start_function_call>", "<escape>"), formats.FUNCTION_GEMMA),
    (("<function_calls>",), formats.OLMO),
    (("<tool_call>", "<arg_key>"), formats.GLM),
    (("<tool_call>", "<function="), formats.QWEN_CODER),
    ((">>>", "<|start_header_id|>", "all"), formats.FUNCTIONARY),
    (("<function=",), formats.FUNCTIONARY_TAGS),
    (("<function name=", "<param name="), formats.MINICPM),
    (("<|tools_prefix|>",), formats.APERTUS),
    (("<|tool_call_start|>",), formats.LFM2),
    (("[TOOL_CALLS]", "[ARGS]"), formats.MISTRAL_NAMED),
    (("[TOOL_CALLS]",), formats.MISTRAL_LIST),
    (("<|START_ACTION|>",), formats.COMMAND_R7B),
    (("Action:", "tool_name", "parameters"), formats.COMMAND_R),
    (("<|tool_call|>",), formats.GRANITE),
    (("<TOOLCALL>",), formats.NEMOTRON),
    (("<tool_calls>",), formats.TOOL_CALLS),
    (("functools", "[{"), formats.FIREFUNCTION),
    (("List of tools: [",), formats.LFM2),
    (("<|tool_list_start|>",), formats.LFM2),
    (("<|python_start|>",), formats.PYTHONIC),
)
# What is told by marks that other templates may have as well.
_BY_FEW_MARKS = (None, formats.HERMES, formats.LLAMA_JSON, formats.PYTHONIC)
_KNOWS_TOOLS = re.compile(r"\btools\b|\+ functions ")
_PYTHONIC = re.compile(r"\[\w+\(\w+=")
_LLAMA_NAME = re.compile(r'\{\\?"name\\?":')
_LLAMA_PARAMETERS = re.compile(r'\\?"parameters\\?":')


# Of how it takes messages.
_TAKES_OBJECTS = re.compile(
    r"arguments['\"\]]*+\s*+(?:\)\s*+)?(?:\|\s*(?:tojson|items|dictsort)|\.items\(|is (?:not )?(?:mapping|string))"
    r"|(?:function|tool_calls|tool_call|call)['\"\]]*\s*\|\s*tojson"
    r"|_args\.items\(|args\s*\|\s*tojson|for \w+, ?\w+ in \w*\.?arguments"
)
_CONTENT = r"message[.\[]['\"]?content['\"\]]*"
_CALLS_HAVE_NO_CONTENT = re.compile(rf"assistant['\"]\s+and\s+(?:{_CONTENT} is none|not {_CONTENT})")
_ITERATES_CONTENT = re.compile(r"for \w+ in message(?:\.content|\[['\"]content['\"]\])")
_FIRST_CALL = re.compile(r"tool_calls['\"\]]*\[0\]")
_THINKING_PART = re.compile(r"type['\"\]]*\s*+==\s*+['\"]thinking['\"]")
_WRITES_ROLE = re.compile(r"(?:\{\{-?|\+)\s*+\(?message(?:\.role|\[['\"]role['\"]\])")
_NINE_CHARACTERS = re.compile(r"id\s*\|\s*length\s*(?:!=|==)\s*9|\|length != 9")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What one template says.

    - `call_format` is None for one that knows no calls, or writes them in a way not known here
    - `takes_tools`: whether it describes the tools that it is given; some only write down the calls of the past, and
      `knows_calls` says whether it does that
    - `is_format_certain`, `are_tags_certain`: whether they were told by marks that no other template has, or there is
      nothing to find; else renders tell (`probing.py`)
    - `tags` is None for one that marks no thinking; channels of gpt-oss are a format of their own
    - `takes_effort`: whether it knows levels of thinking; `efforts` are its words for them, from the least to the most
    - `takes_any_role`: whether it writes the role of a message down, or knows that of tools
    - `answer_marks` stand round an answer, whose reader does not want them
    - `call_ids`: whether it refuses ids that are not nine letters and digits (Mistral), or counts the calls (Kimi)
    - `takes_text_arguments`, `takes_parts`: arguments as text instead of objects, content as a list of parts;
      `takes_thinking_parts`: the thinking as one of these (Ministral)
    - `takes_one_call`: it writes the first call of a message alone
    - `calls_without_content`: it shows either the content of a message or its calls (R1)
    - `names_functions`: it has Firefunction's names for the tools and the time
    - `thinks`: whether its model can think; `marks_replies`: whether replies hold more than content and calls
    """

    call_format: CallFormat | None
    takes_tools: bool
    knows_calls: bool
    is_format_certain: bool
    are_tags_certain: bool
    tags: ThinkingTags | None
    takes_effort: bool
    efforts: tuple[str, ...]
    takes_any_role: bool
    answer_marks: frozenset[str]
    call_ids: Literal["nine characters", "counted"] | None
    takes_text_arguments: bool
    takes_parts: bool
    calls_without_content: bool
    names_functions: bool
    takes_one_call: bool
    takes_thinking_parts: bool
    thinks: bool
    marks_replies: bool

    def effort(self, wanted: str) -> str | None:
        """The template's word for a level of thinking that a client asks for: the same, or the nearest one, the higher
        of two. None for a word that nobody knows."""
        if wanted not in _SCALE:
            return None
        at = _SCALE.index(wanted)
        return min(self.efforts, key=lambda word: (abs(_SCALE.index(word) - at), -_SCALE.index(word)))


@lru_cache(maxsize=REMEMBERED_TEMPLATES)
def profile_of(template: str) -> Profile:
    call_format = _call_format(template)
    has_headers = call_format is not None and bool(call_format.thoughts)
    takes_effort = "reasoning_effort" in template
    tags = _tags(template)
    knows_calls = "tool_calls" in template
    shows_thinking = "reasoning_content" in template
    answer_marks = {mark for mark in _ANSWER_MARKS if mark in template}
    if _ANSWER_TAGS in template:
        answer_marks |= {"<response>", "</response>"}
    return Profile(
        call_format=call_format,
        takes_tools=(call_format is not None or knows_calls) and _KNOWS_TOOLS.search(template) is not None,
        knows_calls=knows_calls,
        is_format_certain=not knows_calls or call_format not in _BY_FEW_MARKS,
        are_tags_certain=tags is not None or has_headers or not shows_thinking,
        tags=tags,
        takes_effort=takes_effort,
        efforts=_efforts(template),
        takes_any_role="'tool'" in template or '"tool"' in template or _WRITES_ROLE.search(template) is not None,
        answer_marks=frozenset(answer_marks),
        call_ids=_call_ids(template),
        takes_text_arguments=_TAKES_OBJECTS.search(template) is None,
        takes_parts=_ITERATES_CONTENT.search(template) is not None and "is string" not in template,
        calls_without_content=_CALLS_HAVE_NO_CONTENT.search(template) is not None,
        names_functions="+ functions " in template,
        takes_one_call=call_format is formats.HARMONY or _FIRST_CALL.search(template) is not None,
        takes_thinking_parts=_THINKING_PART.search(template) is not None,
        thinks=tags is not None or has_headers or takes_effort or shows_thinking,
        marks_replies=tags is not None or bool(answer_marks) or (call_format is not None and bool(call_format.whole)),
    )


def _tags(template: str) -> ThinkingTags | None:
    if "<|begin|>assistant<|think|>" in template:  # Solar's thinking is a message of its own
        return ThinkingTags("<|think|>", "<|end|><|begin|>assistant")
    return next((ThinkingTags(*pair) for pair in _TAGS if pair[0] in template or pair[1] in template), None)


def _call_format(template: str) -> CallFormat | None:
    for marks, known in _BY_MARKS:
        if all(mark in template for mark in marks):
            return known
    if "<tool_call>" in template:
        return formats.HERMES
    if not _KNOWS_TOOLS.search(template):
        return None
    if _PYTHONIC.search(template):
        return formats.PYTHONIC
    name = _LLAMA_NAME.search(template)
    return formats.LLAMA_JSON if name and _LLAMA_PARAMETERS.search(template, name.end()) else None


def _call_ids(template: str) -> Literal["nine characters", "counted"] | None:
    if _NINE_CHARACTERS.search(template):
        return "nine characters"
    return "counted" if "<|tool_call_begin|>" in template else None


# Levels of thinking, by all words that clients and templates have for them.
_SCALE = ("no_think", "none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
_EFFORT = re.compile(r"reasoning_effort")
# How far from there a template lists the words that it takes.
_NEAR = 200


def _efforts(template: str) -> tuple[str, ...]:
    """The words that stand near the variable. A template that has none or one of them, which is its default, writes
    down whatever it is given, and its model knows three. gpt-oss has no word for none, and thinks little."""
    near = "".join(template[max(0, at.start() - _NEAR) : at.end() + _NEAR] for at in _EFFORT.finditer(template))
    found = tuple(word for word in _SCALE if f"'{word}'" in near or f'"{word}"' in near)
    return found if len(found) > 1 else ("low", "medium", "high")


def capabilities(model: Model) -> tuple[str, ...]:
    """Of "completion", "tools", "thinking", "insert", "embedding", "rerank", "vision" and "audio", those that apply.

    "tools" is for models whose own template knows them; others can be given tools all the same.
    """
    templates = model.template, model.tool_template or model.template
    known = _known.setdefault(model.header, {})
    if templates not in known:
        known[templates] = _capabilities(model.header, *templates)
    own = known[templates]
    return own if model.header.pooling == RANK else (*own, *model.media)


_known: WeakKeyDictionary[Header, dict[tuple[str, str], tuple[str, ...]]] = WeakKeyDictionary()


def _capabilities(header: Header, template: str, tool_template: str) -> tuple[str, ...]:
    if not header.generates:
        return ("rerank" if header.pooling == RANK else "embedding",)
    result = ["completion"]
    if profile_of(tool_template).takes_tools:
        result.append("tools")
    if profile_of(template).thinks:
        result.append("thinking")
    try:
        if fim_tokens(header) is not None:
            result.append("insert")
    except BadModelFile:
        pass  # a file that went away while it was listed
    return tuple(result)
