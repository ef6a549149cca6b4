"""Replies of the formats behind marks of their own: Mistral, DeepSeek, Kimi, lists of calls, gpt-oss, Gemma."""

from __future__ import annotations

from localrun.server.replies import formats
from tests.server.replies.golden_case import (
    BRACKETS,
    COHERE,
    GEMMA_CHANNEL,
    PARIS,
    THINK,
    TIME,
    Golden,
    call,
    content,
    thinking,
)

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
        thinking_open="<think>",
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
        "gemma, broken",
        formats.GEMMA,
        "<|tool_call>call:get_weather{city<tool_call|>",
        (content("<|tool_call>call:get_weather{city<tool_call|>"),),
    ),
)
