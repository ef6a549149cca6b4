"""How each family of models writes tool calls.

A format has the readers for its marks and, where its calls are JSON between fixed texts, what the decoding can be held
to. `prompting/profile.py` finds a template's format.

Pure. Does not: know thinking.
"""

from __future__ import annotations

from localrun.server.parsing import gemma_calls, json_calls, named_calls, python_calls, xml_calls
from localrun.server.parsing.channels import CHANNEL, ENDS, MESSAGE, PART, START, read_functionary, read_harmony
from localrun.server.parsing.parser import CallFormat, Written
from localrun.server.parsing.python_calls import read_python_tag
from localrun.server.parsing.xml_calls import Tags

NAMED_JSON = '{"name": "NAME", "arguments": '

_QWEN_CODER = Tags("<function=", "</function>", "<parameter=", "</parameter>", ("</tool_call>",))
_SEED = Tags("<function=", "</function>", "<parameter=", "</parameter>", ("</seed:tool_call>",))
_MINIMAX = Tags("<invoke name=", "</invoke>", "<parameter name=", "</parameter>", ("</minimax:tool_call>",))
_MINICPM = Tags("<function name=", "</function>", "<param name=", "</param>", ())
_DSML = Tags(
    "<｜DSML｜invoke name=",
    "</｜DSML｜invoke>",
    "<｜DSML｜parameter name=",
    "</｜DSML｜parameter>",
    ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
)


def _list_after(mark: str, end: str = "", before: str = NAMED_JSON) -> Written:
    """A JSON list of calls behind a mark."""
    return Written(mark, before, "}", lead="[", separator=", ", closing=f"]{end}", triggers=(mark,))


def _json_list(name: str, mark: str, end: str) -> CallFormat:
    return CallFormat(name, {mark: json_calls.reader((end,))}, written=_list_after(mark, end))


def _tagged(name: str, tags: Tags, *marks: str) -> CallFormat:
    begun = f"{marks[0]}\n{tags.call}"
    quote = '"' if tags.call.endswith("name=") else ""
    return CallFormat(
        name,
        {mark: xml_calls.reader(tags) for mark in marks},
        begun=begun + quote,
        begun_by_name=f"{begun}{quote}NAME{quote}>",
    )


HERMES = CallFormat(
    "hermes",
    {"<tool_call>": json_calls.reader(("</tool_call>",), fences=True)},
    written=Written(
        "<tool_call>",
        NAMED_JSON,
        "}",
        lead="\n",
        separator="\n</tool_call>\n<tool_call>\n",
        closing="\n</tool_call>",
        triggers=("<tool_call>",),
    ),
)
HARMONY = CallFormat(
    "harmony",
    written=Written(
        "",
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    ),
    whole=read_harmony,
    own_marks=(START, CHANNEL, MESSAGE, *ENDS),
)
FUNCTIONARY = CallFormat(
    "functionary",
    written=Written("", "NAME\n", separator=PART),
    whole=read_functionary,
    own_marks=(PART,),
)
FUNCTIONARY_TAGS = CallFormat(
    "functionary-tags",
    {"<function=": named_calls.read_tagged, "<|python_tag|>": read_python_tag},
    written=Written("<function=", "NAME>", "</function>", separator="\n<function=", triggers=("<function=",)),
)
LLAMA_JSON = CallFormat(
    "llama-json",
    {"<|python_tag|>": read_python_tag},
    unmarked=(("{", json_calls.read_unmarked),),
    written=Written("", '{"name": "NAME", "parameters": ', "}"),
)
PYTHONIC = CallFormat(
    "pythonic",
    {"<|python_start|>": python_calls.reader(("<|python_end|>",))},
    unmarked=(("[", python_calls.reader((), only_known=True)),),
    begun="[",
    begun_by_name="[NAME(",
)
LFM2 = CallFormat(
    "lfm2",
    {"<|tool_call_start|>": python_calls.reader(("<|tool_call_end|>",))},
    begun="<|tool_call_start|>[",
    begun_by_name="<|tool_call_start|>[NAME(",
)
MISTRAL_NAMED = CallFormat(
    "mistral-named",
    {"[TOOL_CALLS]": named_calls.read_mistral},
    written=Written("[TOOL_CALLS]", "NAME[ARGS]", separator="[TOOL_CALLS]", triggers=("[TOOL_CALLS]",)),
)
MISTRAL_LIST = CallFormat(
    "mistral-list", {"[TOOL_CALLS]": named_calls.read_mistral}, written=_list_after("[TOOL_CALLS]")
)
DEEPSEEK_R1 = CallFormat(
    "deepseek-r1",
    {"<｜tool▁calls▁begin｜>": named_calls.read_deepseek},
    written=Written(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        separator="\n",
        closing="<｜tool▁calls▁end｜>",
        triggers=("<｜tool▁calls▁begin｜>",),
    ),
)
DEEPSEEK_V31 = CallFormat(
    "deepseek-v3.1",
    {"<｜tool▁calls▁begin｜>": named_calls.read_deepseek},
    written=Written(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        separator="",
        closing="<｜tool▁calls▁end｜>",
        triggers=("<｜tool▁calls▁begin｜>",),
    ),
)
KIMI = CallFormat(
    "kimi",
    {"<|tool_calls_section_begin|>": named_calls.read_kimi},
    written=Written(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        separator="",
        closing="<|tool_calls_section_end|>",
        triggers=("<|tool_calls_section_begin|>",),
    ),
)
COMMAND_R7B = CallFormat(
    "command-r7b",
    {"<|START_ACTION|>": json_calls.reader(("<|END_ACTION|>",))},
    written=_list_after(
        "<|START_ACTION|>", "<|END_ACTION|>", '{"tool_call_id": "0", "tool_name": "NAME", "parameters": '
    ),
)
COMMAND_R = CallFormat(
    "command-r",
    {"Action:": json_calls.reader((), fences=True)},
    written=Written(
        "Action: ```json\n[",
        '{"tool_name": "NAME", "parameters": ',
        "}",
        separator=", ",
        closing="]\n```",
    ),
)
GRANITE = CallFormat(
    "granite",
    {"<|tool_call|>": json_calls.reader(("<|/tool_call|>",))},
    written=_list_after("<|tool_call|>"),
)
APERTUS = CallFormat(
    "apertus",
    {"<|tools_prefix|>": json_calls.reader(("<|tools_suffix|>",))},
    written=_list_after("<|tools_prefix|>", "<|tools_suffix|>", '{"NAME": '),
)
GEMMA = CallFormat(
    "gemma",
    {"<|tool_call>": gemma_calls.read_gemma},
    begun="<|tool_call>call:",
    begun_by_name="<|tool_call>call:NAME{",
)
GLM = CallFormat("glm", {"<tool_call>": xml_calls.read_glm}, begun="<tool_call>", begun_by_name="<tool_call>NAME\n")
QWEN_CODER = CallFormat(
    "qwen-coder",
    {"<tool_call>": xml_calls.reader(_QWEN_CODER), "<function=": xml_calls.read_one(_QWEN_CODER)},
    begun="<tool_call>\n<function=",
    begun_by_name="<tool_call>\n<function=NAME>",
)
SEED = _tagged("seed", _SEED, "<seed:tool_call>")
MINIMAX = _tagged("minimax", _MINIMAX, "<minimax:tool_call>")
MINICPM = CallFormat(
    "minicpm",
    {"<function name=": xml_calls.read_one(_MINICPM)},
    begun='<function name="',
    begun_by_name='<function name="NAME">',
)
DEEPSEEK_TAGS = _tagged("deepseek-tags", _DSML, "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
TOOL_CALLS = CallFormat(
    "tool-calls",
    {"<tool_calls>": json_calls.reader(("</tool_calls>",))},
    written=_list_after("<tool_calls>", "</tool_calls>"),
)
NEMOTRON = _json_list("nemotron", "<TOOLCALL>", "</TOOLCALL>")
FIREFUNCTION = CallFormat("firefunction", {"functools[": json_calls.read_opened_list}, written=_list_after("functools"))
