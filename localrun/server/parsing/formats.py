"""How each family of models writes tool calls.

A format has the readers for its marks, and what its calls are made of, to which the decoding can be held.
`prompting/profile.py` finds a template's format.

Pure. Does not: know thinking.
"""

from __future__ import annotations

from localrun.server.parsing import json_calls, xml_calls
from localrun.server.parsing.channels import (
    CHANNEL,
    ENDS,
    GLIMMER_CALLS,
    GLIMMER_ENDS,
    MESSAGE,
    PART,
    START,
    read_functionary,
    read_glimmer,
    read_harmony,
)
from localrun.server.parsing.literal_calls import gemma_reader, python_reader, read_python_tag
from localrun.server.parsing.parser import CallFormat
from localrun.server.parsing.written import Listed, Written
from localrun.server.parsing.xml_calls import Tags

NAMED_JSON = '{"name": "NAME", "arguments": '

_QWEN_CODER = Tags("<function=", "</function>", "<parameter=", "</parameter>", ("</tool_call>",))
_SEED = Tags("<function=", "</function>", "<parameter=", "</parameter>", ("</seed:tool_call>",))
_MINIMAX = Tags("<invoke name=", "</invoke>", "<parameter name=", "</parameter>", ("</minimax:tool_call>",))
_MINICPM = Tags("<function name=", "</function>", "<param name=", "</param>", (), has_cdata=True)
_DSML = Tags("<｜DSML｜invoke name=", "</｜DSML｜invoke>", "<｜DSML｜parameter name=", "</｜DSML｜parameter>",
             ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"))  # fmt: skip


def _list_after(mark: str, end: str = "", before: str = NAMED_JSON) -> Written:
    """A JSON list of calls behind a mark."""
    return Written(mark, before, "}", lead="[", separator=", ", closing=f"]{end}")


def _json_list(name: str, mark: str, end: str, before: str = NAMED_JSON) -> CallFormat:
    return CallFormat(name, _list_after(mark, end, before), {mark: json_calls.reader((end,))})


def _tagged(name: str, tags: Tags, *marks: str, parameter: Listed) -> CallFormat:
    """Blocks of calls in tags, of which the first of `marks` opens one."""
    quote = '"' if tags.call.endswith("name=") else ""
    written = Written(
        marks[0], f"{tags.call}{quote}NAME{quote}>\n", f"{tags.call_end}\n", lead="\n", separator="",
        closing=f"</{marks[0][1:]}", arguments=parameter,
    )  # fmt: skip
    readers = {mark: xml_calls.reader(tags) for mark in marks}
    return CallFormat(name, written, {**readers, tags.call: xml_calls.read_one(tags, only_known=True)})


def _gemma(name: str, opening: str, closing: str, quote: str) -> CallFormat:
    arguments = Listed("NAME:", separator=",", quote=quote)
    written = Written(opening, "call:NAME{", f"}}{closing}", separator=opening, arguments=arguments, is_sole=False)
    return CallFormat(name, written, {opening: gemma_reader(opening, closing, quote)})


# Parameters in tags, each on lines of its own, and with its value on a line of its own.
_ON_A_LINE = Listed("<parameter=NAME>", "</parameter>\n")
_ON_LINES = Listed("<parameter=NAME>\n", "\n</parameter>\n")
_NAMED = Listed('<parameter name="NAME">', "</parameter>\n")
_KEYWORDS = Listed("NAME=", separator=", ", quote=None)


HERMES = CallFormat(
    "hermes",
    Written("<tool_call>", NAMED_JSON, "}", lead="\n", separator="\n</tool_call>\n<tool_call>\n",
            closing="\n</tool_call>"),
    {"<tool_call>": json_calls.reader(("</tool_call>",), fences=True)},
    unmarked=(("{", json_calls.read_bare), ("`", json_calls.read_bare)),
)  # fmt: skip
HARMONY = CallFormat(
    "harmony",
    Written("", "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"),
    whole=read_harmony,
    own_marks=(START, CHANNEL, MESSAGE, *ENDS),
    answers=("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"),
    thoughts="<|channel|>analysis<|message|>",
)
GLIMMER = CallFormat(
    "glimmer",
    Written("", f' to=NAME<|message|>{GLIMMER_CALLS}\n<atem:invoke name="NAME">\n',
            f"</atem:invoke>\n</{GLIMMER_CALLS[1:]}", separator="<|eom|><|start|>assistant",
            arguments=Listed('<atem:parameter name="NAME">', "</atem:parameter>\n")),
    whole=read_glimmer,
    own_marks=(START, MESSAGE, *GLIMMER_ENDS),
    answers=(" to=user<|message|>",),
    thoughts=" to=self<|message|>",
)  # fmt: skip
FUNCTIONARY = CallFormat(
    "functionary", Written("", "NAME\n", separator=PART), whole=read_functionary, own_marks=(PART,)
)
FUNCTIONARY_TAGS = CallFormat(
    "functionary-tags",
    Written("<function=", "NAME>", "</function>", separator="\n<function="),
    {"<function=": json_calls.read_tagged, "<|python_tag|>": read_python_tag},
)
LLAMA_JSON = CallFormat(
    "llama-json",
    Written("", '{"name": "NAME", "parameters": ', "}"),
    {"<|python_tag|>": read_python_tag},
    unmarked=(("{", json_calls.read_unmarked),),
)
PYTHONIC = CallFormat(
    "pythonic",
    Written("[", "NAME(", ")", separator=", ", closing="]", arguments=_KEYWORDS, is_sole=False),
    {"<|python_start|>": python_reader(("<|python_end|>",))},
    unmarked=(("[", python_reader((), only_known=True)),),
)
LFM2 = CallFormat(
    "lfm2",
    Written("<|tool_call_start|>", "NAME(", ")", lead="[", separator=", ", closing="]<|tool_call_end|>",
            arguments=_KEYWORDS, is_sole=False),
    {"<|tool_call_start|>": python_reader(("<|tool_call_end|>",))},
)  # fmt: skip
OLMO = CallFormat(
    "olmo",
    Written("<function_calls>", "NAME(", ")", separator="\n", closing="</function_calls>", arguments=_KEYWORDS,
            is_sole=False),
    {"<function_calls>": python_reader(("</function_calls>",), on_lines=True)},
)  # fmt: skip
MISTRAL_NAMED = CallFormat(
    "mistral-named",
    Written("[TOOL_CALLS]", "NAME[ARGS]", separator="[TOOL_CALLS]"),
    {"[TOOL_CALLS]": json_calls.read_mistral},
)
MISTRAL_LIST = CallFormat("mistral-list", _list_after("[TOOL_CALLS]"), {"[TOOL_CALLS]": json_calls.read_mistral})
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_MARKS = {_DEEPSEEK_BEGIN: json_calls.section_reader(
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", (_DEEPSEEK_END,), json_calls.read_deepseek_call
)}  # fmt: skip
DEEPSEEK_R1 = CallFormat(
    "deepseek-r1",
    Written(_DEEPSEEK_BEGIN, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
            "\n```<｜tool▁call▁end｜>", separator="\n", closing=_DEEPSEEK_END),
    _DEEPSEEK_MARKS,
)  # fmt: skip
DEEPSEEK_V31 = CallFormat(
    "deepseek-v3.1",
    Written(_DEEPSEEK_BEGIN, "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>", separator="",
            closing=_DEEPSEEK_END),
    _DEEPSEEK_MARKS,
)  # fmt: skip
KIMI = CallFormat(
    "kimi",
    Written("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
            "<|tool_call_end|>", separator="", closing="<|tool_calls_section_end|>"),
    {mark: json_calls.section_reader(
        "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        ("<|tool_calls_section_end|>", "<|tool_call_section_end|>"), json_calls.read_kimi_call,
        is_begun=mark == "<|tool_call_begin|>",
    ) for mark in ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>")},
)  # fmt: skip
COMMAND_R = CallFormat(
    "command-r",
    Written("Action: ```json\n[", '{"tool_name": "NAME", "parameters": ', "}", separator=", ", closing="]\n```",
            is_sole=False),
    {"Action:": json_calls.reader((), fences=True)},
)  # fmt: skip
COMMAND_R7B = _json_list("command-r7b", "<|START_ACTION|>", "<|END_ACTION|>",
                         '{"tool_call_id": "0", "tool_name": "NAME", "parameters": ')  # fmt: skip
APERTUS = _json_list("apertus", "<|tools_prefix|>", "<|tools_suffix|>", '{"NAME": ')
TOOL_CALLS = _json_list("tool-calls", "<tool_calls>", "</tool_calls>")
NEMOTRON = _json_list("nemotron", "<TOOLCALL>", "</TOOLCALL>")
GRANITE = CallFormat("granite", _list_after("<|tool_call|>"), {"<|tool_call|>": json_calls.reader(("<|/tool_call|>",))})
FIREFUNCTION = CallFormat("firefunction", _list_after("functools"), {"functools[": json_calls.read_opened_list})
GEMMA = _gemma("gemma", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _gemma("function-gemma", "<start_function_call>", "<end_function_call>", "<escape>")
GLM = CallFormat(
    "glm",
    Written("<tool_call>", "NAME\n", "</tool_call>", separator="\n<tool_call>",
            arguments=Listed("<arg_key>NAME</arg_key>\n<arg_value>", "</arg_value>\n"), is_sole=False),
    {"<tool_call>": xml_calls.read_glm},
)  # fmt: skip
QWEN_CODER = CallFormat(
    "qwen-coder",
    Written("<tool_call>", "<function=NAME>\n", "</function>\n", lead="\n",
            separator="</tool_call>\n<tool_call>\n", closing="</tool_call>", arguments=_ON_LINES),
    {"<tool_call>": xml_calls.reader(_QWEN_CODER), "<function=": xml_calls.read_one(_QWEN_CODER)},
)  # fmt: skip
SEED = _tagged("seed", _SEED, "<seed:tool_call>", parameter=_ON_A_LINE)
MINIMAX = _tagged("minimax", _MINIMAX, "<minimax:tool_call>", parameter=_NAMED)
MINICPM = CallFormat(
    "minicpm",
    Written("<function name=", '"NAME">', "</function>", separator="\n<function name=",
            arguments=Listed('<param name="NAME">', "</param>"), is_sole=False),
    {"<function name=": xml_calls.read_one(_MINICPM)},
)  # fmt: skip
_DSML_PARAMETER = Listed('<｜DSML｜parameter name="NAME" string="false">', "</｜DSML｜parameter>\n",
                         before_text='<｜DSML｜parameter name="NAME" string="true">')  # fmt: skip
_DSML_MARKS = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
DEEPSEEK_TAGS = _tagged("deepseek-tags", _DSML, *_DSML_MARKS, parameter=_DSML_PARAMETER)
DEEPSEEK_V4 = _tagged("deepseek-v4", _DSML, *reversed(_DSML_MARKS), parameter=_DSML_PARAMETER)
