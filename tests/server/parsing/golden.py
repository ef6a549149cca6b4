"""One reply as a model writes it and what it means, and what the tables of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localrun.server.parsing import formats
from localrun.server.parsing.parser import CallFormat, ThinkingTags

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "wind": {"type": "boolean"}},
        "required": ["city"],
    },
    "get_time": {"type": "object", "properties": {}},
    "save": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "tags": {"type": "array"}, "to": {"type": ["string", "null"]}},
    },
}

THINK = ThinkingTags("<think>", "</think>")
BRACKETS = ThinkingTags("[THINK]", "[/THINK]")
COHERE = ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>")
APRIEL = ThinkingTags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")
GEMMA_CHANNEL = ThinkingTags("<|channel>thought", "<channel|>")

Call = tuple[str, dict[str, Any]]
PARIS: Call = ("get_weather", {"city": "Paris"})
TIME: Call = ("get_time", {})


@dataclass(frozen=True)
class Golden:
    """`expects` has ("content", text), ("thinking", text) and ("call", (name, arguments))."""

    name: str
    format: CallFormat | None
    text: str
    expects: tuple[tuple[str, Any], ...]
    tags: ThinkingTags | None = None
    is_thinking: bool = False
    opened: str = ""
    control_tokens: tuple[str, ...] = ()


def content(text: str) -> tuple[str, Any]:
    return "content", text


def thinking(text: str) -> tuple[str, Any]:
    return "thinking", text


def call(name: str, arguments: dict[str, Any]) -> tuple[str, Any]:
    return "call", (name, arguments)


_V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
_KIMI = "<|tool_calls_section_begin|>"

MARKED: tuple[Golden, ...] = (
    # --- Mistral --------------------------------------------------------------------------------------------------
    Golden(
        "a list",
        formats.MISTRAL_LIST,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}, '
        '{"name": "get_time", "arguments": {}}]',
        (call(*PARIS), call(*TIME)),
        control_tokens=("[TOOL_CALLS]", "[INST]"),
    ),
    Golden(
        "by name",
        formats.MISTRAL_NAMED,
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[CALL_ID]abc[ARGS]{}',
        (call(*PARIS), call(*TIME)),
        control_tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    Golden(
        "magistral thinks",
        formats.MISTRAL_NAMED,
        "[THINK]So.[/THINK]Right.[TOOL_CALLS]get_time[ARGS]{}",
        (thinking("So."), content("Right."), call(*TIME)),
        tags=BRACKETS,
        control_tokens=("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
    ),
    Golden(
        "a call in the middle of the thinking",
        formats.MISTRAL_NAMED,
        "[THINK]So[TOOL_CALLS]get_time[ARGS]{}",
        (thinking("So"), call(*TIME)),
        tags=BRACKETS,
        control_tokens=("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
    ),
    Golden(
        "no arguments come back",
        formats.MISTRAL_NAMED,
        "[TOOL_CALLS]get_weather in Paris",
        (content("[TOOL_CALLS]get_weather in Paris"),),
    ),
    # --- DeepSeek, Kimi -------------------------------------------------------------------------------------------
    Golden(
        "r1",
        formats.DEEPSEEK_R1,
        "So.</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (thinking("So."), call(*PARIS), call(*TIME)),
        tags=THINK,
        is_thinking=True,
    ),
    Golden(
        "v3.1",
        formats.DEEPSEEK_V31,
        f'Look.{_V31}{{"city": "Paris"}}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{{}}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (content("Look."), call(*PARIS), call(*TIME)),
        control_tokens=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    ),
    Golden("v3.1, cut short", formats.DEEPSEEK_V31, f'{_V31}{{"ci', (content(f'{_V31}{{"ci'),)),
    Golden(
        "kimi",
        formats.KIMI,
        f"I look.{_KIMI}<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        (content("I look."), call(*PARIS), call(*TIME)),
    ),
    # --- Command-R, Granite and others with lists -----------------------------------------------------------------
    Golden(
        "command-r7b",
        formats.COMMAND_R7B,
        "<|START_THINKING|>I will look.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}\n]<|END_ACTION|>',
        (thinking("I will look."), call(*PARIS)),
        tags=COHERE,
        control_tokens=("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    Golden(
        "command-r, a control token left out",
        formats.COMMAND_R7B,
        "Fine.<|END_OF_TURN_TOKEN|>",
        (content("Fine."),),
        control_tokens=("<|START_ACTION|>", "<|END_OF_TURN_TOKEN|>"),
    ),
    Golden(
        "command-r-plus",
        formats.COMMAND_R,
        'Action: ```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": {"city": "Paris"}\n    }'
        "\n]\n```",
        (call(*PARIS),),
    ),
    Golden(
        "command-r-plus has nothing to call",
        formats.COMMAND_R,
        'Action: ```json\n[{"tool_name": "directly_answer", "parameters": {}}]\n```',
        (),
    ),
    Golden(
        "granite",
        formats.GRANITE,
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        (call(*PARIS),),
        control_tokens=("<|tool_call|>",),
    ),
    Golden(
        "nemotron", formats.NEMOTRON, '<TOOLCALL>[{"name": "get_time", "arguments": {}}]</TOOLCALL>', (call(*TIME),)
    ),
    Golden(
        "minimax-m1, a call on each line",
        formats.TOOL_CALLS,
        '<tool_calls>\n{"name": "get_time", "arguments": {}}\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        "</tool_calls>",
        (call(*TIME), call(*PARIS)),
    ),
    Golden("firefunction", formats.FIREFUNCTION, 'functools[{"name": "get_time", "arguments": {}}]', (call(*TIME),)),
    Golden(
        "apertus",
        formats.APERTUS,
        '<|tools_prefix|>[{"get_weather": {"city": "Paris"}}]<|tools_suffix|>',
        (call(*PARIS),),
    ),
    # --- Functionary ----------------------------------------------------------------------------------------------
    Golden(
        "v3.1",
        formats.FUNCTIONARY_TAGS,
        'Look: <function=get_weather>{"city": "Paris"}</function>\n<function=get_time>{}</function>',
        (content("Look:"), call(*PARIS), call(*TIME)),
    ),
    Golden("v3.2, a call", formats.FUNCTIONARY, 'get_weather\n{"city": "Paris"}', (call(*PARIS),)),
    Golden(
        "v3.2, content with its own brackets and a call",
        formats.FUNCTIONARY,
        "all\nIn Python: >>> 1>>>get_time\n{}",
        (content("In Python: >>> 1"), call(*TIME)),
    ),
    Golden("v3.2, no recipient", formats.FUNCTIONARY, "Well, hello.", (content("Well, hello."),)),
    # --- gpt-oss --------------------------------------------------------------------------------------------------
    Golden(
        "analysis and final",
        formats.HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        (thinking("Hm."), content("Yes.")),
    ),
    Golden(
        "analysis, preamble, call",
        formats.HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'
        "<|call|>",
        (thinking("Hm."), content("I look."), call(*PARIS)),
    ),
    Golden(
        "the recipient before the channel",
        formats.HARMONY,
        " to=functions.get_time<|channel|>commentary json<|message|>{}",
        (call(*TIME),),
    ),
    Golden(
        "a final answer goes on",
        formats.HARMONY,
        " there.",
        (content(" there."),),
        opened="<|channel|>final<|message|>",
    ),
    Golden("no header at all", formats.HARMONY, "Hello.", (content("Hello."),)),
    Golden(
        "broken arguments come back",
        formats.HARMONY,
        "<|channel|>commentary to=functions.get_time<|message|>now<|call|>",
        (content("now"),),
    ),
    # --- Gemma ----------------------------------------------------------------------------------------------------
    Golden(
        "gemma",
        formats.GEMMA,
        '<|channel>thought\nHm.<channel|>Look.<|tool_call>call:get_weather{city:<|"|>Pa"ris, {x}<|"|>,days:3,wind:true}'
        '<tool_call|><|tool_call>call:save{tags:[<|"|>a<|"|>,1,{k:null}],text:<|"|><|"|>}<tool_call|>',
        (
            thinking("Hm."),
            content("Look."),
            call("get_weather", {"city": 'Pa"ris, {x}', "days": 3, "wind": True}),
            call("save", {"tags": ["a", 1, {"k": None}], "text": ""}),
        ),
        tags=GEMMA_CHANNEL,
        control_tokens=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    Golden(
        "gemma, a quote that is not closed",
        formats.GEMMA,
        '<|tool_call>call:save{tags:[1],text:<|"|>ls {x}}<tool_call|>',
        (call("save", {"tags": [1], "text": "ls {x}"}),),
    ),
    Golden(
        "gemma, other quotes",
        formats.GEMMA,
        "<|tool_call>call:save{text:'it's, well',tags:[\"a\"],to:null}<tool_call|>",
        (call("save", {"text": "it's, well", "tags": ["a"], "to": None}),),
    ),
    Golden(
        "gemma, a bare text",
        formats.GEMMA,
        "<|tool_call>call:save{text:hello, you: 3 {x},to:Ann}<tool_call|>",
        (call("save", {"text": "hello", "you": "3 {x}", "to": "Ann"}),),
    ),
    Golden(
        "gemma, a comma left out",
        formats.GEMMA,
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>days:3}<tool_call|>',
        (call("get_weather", {"city": "Paris", "days": 3}),),
    ),
    Golden(
        "gemma, brackets as Python has them",
        formats.GEMMA,
        '<|tool_call>call:get_weather(city=<|"|>a=b, c:d<|"|>, wind=true)<tool_call|>',
        (call("get_weather", {"city": "a=b, c:d", "wind": True}),),
    ),
    Golden(
        "gemma, more or less before the name",
        formats.GEMMA,
        "<|tool_call>call:google:mcp:get_time{}<tool_call|><|tool_call>:get_time{}<tool_call|>",
        (call(*TIME), call(*TIME)),
    ),
    Golden(
        "gemma, without the closing mark",
        formats.GEMMA,
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<|tool_call>call:get_time{}',
        (call(*PARIS), call(*TIME)),
    ),
    Golden(
        "function-gemma",
        formats.FUNCTION_GEMMA,
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>",
        (call("get_weather", {"city": "Paris", "days": 2}),),
        control_tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    Golden(
        "kimi, a section that begins with its call and ends as another one",
        formats.KIMI,
        "I look.<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_call_section_end|>",
        (content("I look."), call(*TIME)),
    ),
    Golden(
        "kimi, one call's section",
        formats.KIMI,
        "<|tool_call_section_begin|><|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_call_section_end|>",
        (call(*TIME),),
    ),
    Golden(
        "apriel",
        formats.TOOL_CALLS,
        'Hm.\n[BEGIN FINAL RESPONSE]\nI look.\n<tool_calls>[{"name": "get_time", "arguments": {}}]</tool_calls>',
        (thinking("Hm."), content("I look."), call(*TIME)),
        tags=APRIEL,
        is_thinking=True,
    ),
    Golden(
        "olmo, a call on each line",
        formats.OLMO,
        '<function_calls>get_weather(city="Paris")\nget_time()</function_calls>',
        (call(*PARIS), call(*TIME)),
    ),
    Golden(
        "glimmer",
        formats.GLIMMER,
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=get_weather<|message|><atem:function_calls>\n"
        '<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls><|eom|><|start|>assistant to=user<|message|>Done.<|eot|>",
        (thinking("Hm."), call(*PARIS), content("Done.")),
        control_tokens=("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    ),
    Golden("glimmer answers", formats.GLIMMER, " to=user<|message|>Hello", (content("Hello"),)),
    Golden(
        "gemma, broken",
        formats.GEMMA,
        "<|tool_call>call:get_weather{city<tool_call|>",
        (content("<|tool_call>call:get_weather{city<tool_call|>"),),
    ),
)


_HERMES_PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
_DSML_CALL = '<｜DSML｜invoke name="save">\n<｜DSML｜parameter name="text" string="true">1</｜DSML｜parameter>\n'

TAGGED: tuple[Golden, ...] = (
    # --- Hermes, Qwen ---------------------------------------------------------------------------------------------
    Golden("one call", formats.HERMES, _HERMES_PARIS, (call(*PARIS),)),
    Golden(
        "content before a call",
        formats.HERMES,
        f"I will look.\n\n{_HERMES_PARIS}",
        (content("I will look."), call(*PARIS)),
    ),
    Golden(
        "thinking, content, two calls",
        formats.HERMES,
        f"<think>\nParis < Rome?\n</think>\n\nTwo:\n{_HERMES_PARIS}\n"
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        (thinking("Paris < Rome?"), content("Two:"), call(*PARIS), call(*TIME)),
        tags=THINK,
    ),
    Golden(
        "the prompt opened the thinking",
        formats.HERMES,
        f"Hm.\n</think>\n\n{_HERMES_PARIS}",
        (thinking("Hm."), call(*PARIS)),
        tags=THINK,
        is_thinking=True,
    ),
    Golden(
        "thinking alone, cut short",
        formats.HERMES,
        "<think>\nI wonder",
        (thinking("I wonder"),),
        tags=THINK,
    ),
    Golden("no thinking at all", None, "a < b and <thin ice", (content("a < b and <thin ice"),), tags=THINK),
    Golden("a closing tag before any content", None, "\n</think>\n\nYes.", (content("Yes."),), tags=THINK),
    Golden(
        "an opening tag that the prompt already has",
        None,
        "<think>\n<think>Hm.</think>Yes.",
        (thinking("Hm."), content("Yes.")),
        tags=THINK,
        is_thinking=True,
    ),
    Golden(
        "thinking again behind a call",
        formats.HERMES,
        f"<think>Hm.</think>I look.{_HERMES_PARIS}\n<think>So.</think>\nRain.",
        (thinking("Hm."), content("I look."), call(*PARIS), thinking("So."), content("\nRain.")),
        tags=THINK,
    ),
    Golden(
        "thinking on a line of its own, between control tokens",
        formats.MISTRAL_NAMED,
        "First.\n[THINK]So.[/THINK]Then.\n[/THINK]\nLast.",
        (content("First."), thinking("So."), content("Then.\n\nLast.")),
        tags=BRACKETS,
        control_tokens=("[THINK]", "[/THINK]"),
    ),
    Golden(
        "the arguments come first",
        formats.HERMES,
        '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>',
        (call(*PARIS),),
    ),
    Golden(
        "arguments as JSON text",
        formats.HERMES,
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        (call(*PARIS),),
    ),
    Golden(
        "an empty text for no arguments",
        formats.HERMES,
        '<tool_call>{"name": "get_time", "arguments": ""}</tool_call>',
        (call(*TIME),),
    ),
    Golden(
        "braces, quotes and marks inside of a text",
        formats.HERMES,
        '<tool_call>\n{"name": "save", "arguments": {"text": "a } \\" </tool_call> \\\\", "tags": [{"x": [1]}]}}\n'
        "</tool_call>",
        (call("save", {"text": 'a } " </tool_call> \\', "tags": [{"x": [1]}]}),),
    ),
    Golden(
        "a line break inside of a text",
        formats.HERMES,
        '<tool_call>{"name": "save", "arguments": {"text": "a\nb"}}</tool_call>',
        (call("save", {"text": "a\nb"}),),
    ),
    Golden(
        "a code block inside of the tags",
        formats.HERMES,
        '<tool_call>\n```json\n{"name": "get_time", "arguments": {}}\n```\n</tool_call>',
        (call(*TIME),),
    ),
    Golden(
        "content after a call",
        formats.HERMES,
        f"{_HERMES_PARIS}\nDone.",
        (call(*PARIS), content("Done.")),
    ),
    Golden(
        "content on both sides of calls",
        formats.HERMES,
        f"I look.\n\n{_HERMES_PARIS}\n{_HERMES_PARIS}\n\nThen I tell you.",
        (content("I look."), call(*PARIS), call(*PARIS), content("\n\nThen I tell you.")),
    ),
    Golden(
        "without its closing tag",
        formats.HERMES,
        '<tool_call>\n{"name": "get_time", "arguments": {}}',
        (call(*TIME),),
    ),
    Golden(
        "broken JSON comes back",
        formats.HERMES,
        'So <tool_call>\n{"name": "get_time", arguments: }\n</tool_call> it is.',
        (content('So <tool_call>\n{"name": "get_time", arguments: }\n</tool_call> it is.'),),
    ),
    Golden(
        "cut short comes back",
        formats.HERMES,
        'So\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa',
        (content('So\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa'),),
    ),
    Golden(
        "a broken call before a good one",
        formats.HERMES,
        f"<tool_call>nothing</tool_call>{_HERMES_PARIS}",
        (content("<tool_call>nothing</tool_call>"), call(*PARIS)),
    ),
    Golden(
        "the mark as a word of the text",
        formats.HERMES,
        "Write <tool_call> and </tool_call>.",
        (content("Write <tool_call> and </tool_call>."),),
    ),
    Golden(
        "a mark in the middle of the thinking that opens no call",
        formats.QWEN_CODER,
        "Shall I write <tool_call> hmm, or <function=get_time>?</think>No.",
        (thinking("Shall I write <tool_call> hmm, or <function=get_time>?"), content("No.")),
        tags=THINK,
        is_thinking=True,
    ),
    Golden(
        "an unknown tool in the middle of the thinking",
        formats.QWEN_CODER,
        "As in <function=f></function>\n.</think>\n<function=f></function>",
        (thinking("As in <function=f></function>\n."), call("f", {})),
        tags=THINK,
        is_thinking=True,
    ),
    Golden(
        "a call that would go beyond the thinking",
        formats.QWEN_CODER,
        "Like <function=get_weather><parameter=city>.</think>It rains.<function=get_time></function>",
        (
            thinking("Like <function=get_weather><parameter=city>."),
            content("It rains."),
            call(*TIME),
        ),
        tags=THINK,
        is_thinking=True,
    ),
    Golden(
        "what follows a call in the middle of the thinking",
        formats.GLM,
        "Hm.<tool_call>get_time</tool_call>\n</think>\nDone.",
        (thinking("Hm."), call(*TIME), content("Done.")),
        tags=THINK,
        is_thinking=True,
    ),
    # --- Qwen3-Coder, Seed, MiniMax, DeepSeek 3.2, GLM -------------------------------------------------------------
    Golden(
        "typed by the schema",
        formats.QWEN_CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n007\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=wind>\nTrue\n</parameter>\n</function>\n</tool_call>",
        (call("get_weather", {"city": "007", "days": 3, "wind": True}),),
    ),
    Golden(
        "lines of code as they are",
        formats.QWEN_CODER,
        '<tool_call>\n<function=save>\n<parameter=text>\nif a < b:\n    print("</p>")\n\n</parameter>\n'
        '<parameter=tags>\n["x", 1]\n</parameter>\n<parameter=to>\nnull\n</parameter>\n</function>\n</tool_call>',
        (call("save", {"text": 'if a < b:\n    print("</p>")\n', "tags": ["x", 1], "to": None}),),
    ),
    Golden(
        "without the outer tag, after content",
        formats.QWEN_CODER,
        "Let me.\n<function=get_time>\n</function>\n</tool_call>",
        (content("Let me."), call(*TIME)),
    ),
    Golden(
        "two calls",
        formats.QWEN_CODER,
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        (call(*TIME), call(*PARIS)),
    ),
    Golden(
        "begun by the prompt",
        formats.QWEN_CODER,
        "\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        (call(*PARIS),),
        opened="<tool_call>\n<function=get_weather>",
    ),
    Golden(
        "cut short comes back",
        formats.QWEN_CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPa",
        (content("<tool_call>\n<function=get_weather>\n<parameter=city>\nPa"),),
    ),
    Golden(
        "seed",
        formats.SEED,
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        (call(*PARIS),),
    ),
    Golden(
        "minimax, two calls in one block",
        formats.MINIMAX,
        'Look:\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
        (content("Look:"), call("get_weather", {"city": "Paris", "days": 2}), call(*TIME)),
    ),
    Golden(
        "the tags say which are texts",
        formats.DEEPSEEK_TAGS,
        f"<｜DSML｜function_calls>\n{_DSML_CALL}"
        '<｜DSML｜parameter name="tags" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        (call("save", {"text": "1", "tags": [1]}),),
    ),
    Golden(
        "the same in the block of its successor",
        formats.DEEPSEEK_V4,
        f"<｜DSML｜tool_calls>\n{_DSML_CALL}</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        (call("save", {"text": "1"}),),
    ),
    Golden(
        "calls without the opening of their block, and what is none",
        formats.DEEPSEEK_TAGS,
        'It is <｜DSML｜invoke name=x>.\n<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        (content("It is <｜DSML｜invoke name=x>."), call(*TIME)),
    ),
    Golden(
        "a call without the opening of its block",
        formats.MINIMAX,
        'I look.\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        (content("I look."), call(*PARIS)),
    ),
    Golden(
        "glm",
        formats.GLM,
        "Hm.</think>I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time</tool_call>",
        (thinking("Hm."), content("I look."), call("get_weather", {"city": "Paris", "days": 3}), call(*TIME)),
        tags=THINK,
        is_thinking=True,
    ),
    Golden(
        "glm, a value that is not closed",
        formats.GLM,
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris<arg_key>days</arg_key>\n<arg_value>3\n"
        "</tool_call>",
        (call("get_weather", {"city": "Paris", "days": 3}),),
    ),
    Golden(
        "glm, a value or a key that is not opened",
        formats.GLM,
        "<tool_call>get_weather\n<arg_key>city</arg_key>Paris</arg_value>\n<arg_key>days<arg_value>3</arg_value>"
        "</tool_call>",
        (call("get_weather", {"city": "Paris", "days": 3}),),
    ),
    Golden(
        "glm, a key's tags twice",
        formats.GLM,
        "<tool_call>get_weather<arg_key>city</arg_key></arg_key><arg_value>Paris</arg_value>"
        "<arg_key><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        (call("get_weather", {"city": "Paris", "days": 3}),),
    ),
    Golden(
        "glm, JSON",
        formats.GLM,
        '<tool_call>get_weather\n{"city": "Paris"}</tool_call>\n'
        '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
        (call(*PARIS), call(*TIME)),
    ),
    Golden(
        "qwen-coder, without the function's closing tag",
        formats.QWEN_CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call>",
        (call(*PARIS),),
    ),
    Golden(
        "glm, broken",
        formats.GLM,
        "<tool_call>two words<arg_key>a</arg_key></tool_call>",
        (content("<tool_call>two words<arg_key>a</arg_key></tool_call>"),),
    ),
    Golden(
        "minicpm",
        formats.MINICPM,
        '<function name="get_weather"><param name="city">Paris</param></function>',
        (call(*PARIS),),
    ),
    Golden(
        "minicpm, a text with tags of its own",
        formats.MINICPM,
        '<function name="get_weather"><param name="city"><![CDATA[<b>P</b></param>]]></param>'
        '<param name="days">3</param></function>',
        (call("get_weather", {"city": "<b>P</b></param>", "days": 3}),),
    ),
    # --- Llama, pythonic ------------------------------------------------------------------------------------------
    Golden("llama", formats.LLAMA_JSON, '{"name": "get_weather", "parameters": {"city": "Paris"}}', (call(*PARIS),)),
    Golden(
        "llama, two with a semicolon",
        formats.LLAMA_JSON,
        '{"name": "get_time", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Paris"}}',
        (call(*TIME), call(*PARIS)),
    ),
    Golden(
        "an answer in JSON is no call",
        formats.LLAMA_JSON,
        '{"name": "Ada", "parameters": {}} is an object.',
        (content('{"name": "Ada", "parameters": {}} is an object.'),),
    ),
    Golden(
        "an answer in JSON that names no tool",
        formats.LLAMA_JSON,
        '{"id": 7, "name": "Ada"}',
        (content('{"id": 7, "name": "Ada"}'),),
    ),
    Golden("any other object", formats.LLAMA_JSON, ' {"a": {"b": 1}}', (content(' {"a": {"b": 1}}'),)),
    Golden(
        "not at the beginning",
        formats.LLAMA_JSON,
        'Use {"name": "get_time", "parameters": {}} then.',
        (content('Use {"name": "get_time", "parameters": {}} then.'),),
    ),
    Golden(
        "behind content and what is left out",
        formats.LLAMA_JSON,
        'Use<|eom_id|><|eom_id|>{"name": "get_time", "parameters": {}}',
        (content('Use{"name": "get_time", "parameters": {}}'),),
        control_tokens=("<|python_tag|>", "<|eom_id|>"),
    ),
    Golden(
        "behind the mark",
        formats.LLAMA_JSON,
        '<|python_tag|>{"name": "get_time", "parameters": {}}',
        (call(*TIME),),
        control_tokens=("<|python_tag|>", "<|eom_id|>"),
    ),
    Golden(
        "a built-in tool",
        formats.LLAMA_JSON,
        '<|python_tag|>brave_search.call(query="who")',
        (call("brave_search", {"query": "who"}),),
    ),
    Golden(
        "pythonic",
        formats.PYTHONIC,
        '[get_weather(city="Paris", days=-2, wind=False), get_time()]',
        (call("get_weather", {"city": "Paris", "days": -2, "wind": False}), call(*TIME)),
    ),
    Golden(
        "pythonic, nested values",
        formats.PYTHONIC,
        "<|python_start|>[save(text='a) \\'b', tags=[1, {'k': None}], to=null)]<|python_end|>",
        (call("save", {"text": "a) 'b", "tags": [1, {"k": None}], "to": None}),),
    ),
    Golden(
        "arguments without names",
        formats.PYTHONIC,
        '[get_weather("Paris", 3)]',
        (call("get_weather", {"city": "Paris", "days": 3}),),
    ),
    Golden("a list is no call", formats.PYTHONIC, "[1, 2] is a list", (content("[1, 2] is a list"),)),
    Golden("a link is no call", formats.PYTHONIC, "[docs](http://x/(a))", (content("[docs](http://x/(a))"),)),
    Golden(
        "nothing is evaluated",
        formats.PYTHONIC,
        "[save(text=open('/etc/passwd'))]",
        (content("[save(text=open('/etc/passwd'))]"),),
    ),
    Golden(
        "JSON without a mark",
        formats.HERMES,
        'Hm.</think>\n\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n{"name": "get_time", "arguments": {}}',
        (thinking("Hm."), call(*PARIS), call(*TIME)),
        tags=THINK,
        is_thinking=True,
    ),
    Golden(
        "an answer with a tool's name",
        formats.HERMES,
        '{"name": "get_time", "version": "1.0"}',
        (content('{"name": "get_time", "version": "1.0"}'),),
    ),
    Golden(
        "a code block without a mark",
        formats.HERMES,
        '```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```',
        (call(*PARIS),),
    ),
    Golden(
        "a code block that is no call",
        formats.HERMES,
        '```json\n{"name": "Paris", "arguments": {}}\n```\n',
        (content('```json\n{"name": "Paris", "arguments": {}}\n```\n'),),
    ),
    Golden(
        "names that Python does not take",
        formats.LFM2,
        "<|tool_call_start|>[mcp__mail-box.send(from='a', dry-run=True, $top = -1), get_time()]<|tool_call_end|>",
        (call("mcp__mail-box.send", {"from": "a", "dry-run": True, "$top": -1}), call(*TIME)),
    ),
    Golden(
        "texts that Python does not take",
        formats.LFM2,
        "<|tool_call_start|>[save(text='one \\\n  --two=\"f(x)\"\n', to='C:\\Users\\d\\t.')]<|tool_call_end|>",
        (call("save", {"text": 'one \\\n  --two="f(x)"\n', "to": "C:\\Users\\d\t."}),),
    ),
    Golden(
        "lfm2, told to write JSON",
        formats.LFM2,
        '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|tool_call_end|>Checking.',
        (call(*PARIS), content("Checking.")),
    ),
    Golden(
        "lfm2",
        formats.LFM2,
        'I check. <|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>Checking.',
        (content("I check."), call(*PARIS), content(" Checking.")),
        control_tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
)


GOLDEN: tuple[Golden, ...] = TAGGED + MARKED
