"""Which tool-call format a chat template belongs to.

By what the template says and renders: it is the one description of the format that comes with every model. The order
matters, since templates share marks: the more telling ones are asked first.

Pure.
"""

from __future__ import annotations

import re
from functools import lru_cache

from localrun.server.replies import formats
from localrun.server.replies.formats import CallFormat
from localrun.server.replies.thinking_tags import REMEMBERED_TEMPLATES

# All texts of one entry must be in the template.
_BY_MARKS: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    (("<|channel|>", "<|message|>"), formats.HARMONY),
    (("｜DSML｜", "parameter"), formats.DEEPSEEK_TAGS),
    (("<｜tool▁call▁begin｜>", "```json"), formats.DEEPSEEK_R1),
    (("<｜tool▁call▁begin｜>",), formats.DEEPSEEK_V31),
    (("<|tool_calls_section_begin|>",), formats.KIMI),
    (("<minimax:tool_call>",), formats.MINIMAX),
    (("<seed:tool_call>",), formats.SEED),
    (("<|tool_call>", "<tool_call|>"), formats.GEMMA),
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
_KNOWS_TOOLS = re.compile(r"\btools\b|\+ functions ")
_PYTHONIC = re.compile(r"\[\w+\(\w+=")
_LLAMA_NAME = re.compile(r'\{\\?"name\\?":')
_LLAMA_PARAMETERS = re.compile(r'\\?"parameters\\?":')


@lru_cache(maxsize=REMEMBERED_TEMPLATES)
def call_format(template: str) -> CallFormat | None:
    """The format of `template`; None for one that knows no calls, or writes them in a way not known here."""
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


def takes_tools(template: str) -> bool:
    """Whether it describes the tools that it is given, in a format known here; some only write down the calls of the
    past."""
    return _KNOWS_TOOLS.search(template) is not None and call_format(template) is not None
