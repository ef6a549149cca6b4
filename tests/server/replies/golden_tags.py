"""Replies of Hermes and Qwen, of the formats in tags, of Llama, and pythonic ones."""

from __future__ import annotations

from localrun.server.replies import formats
from tests.server.replies.golden_case import PARIS, THINK, TIME, Golden, call, content, thinking

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
        thinking_open="<think>",
    ),
    Golden(
        "thinking alone, cut short",
        formats.HERMES,
        "<think>\nI wonder",
        (thinking("I wonder"),),
        tags=THINK,
    ),
    Golden("no thinking at all", None, "a < b and <thin ice", (content("a < b and <thin ice"),), tags=THINK),
    Golden("a closing tag without an opening one", None, "Yes.</think>\nNo.", (content("Yes.\nNo."),), tags=THINK),
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
        "glm",
        formats.GLM,
        "Hm.</think>I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time</tool_call>",
        (thinking("Hm."), content("I look."), call("get_weather", {"city": "Paris", "days": 3}), call(*TIME)),
        tags=THINK,
        thinking_open="<think>",
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
    Golden("any other object", formats.LLAMA_JSON, ' {"a": {"b": 1}}', (content(' {"a": {"b": 1}}'),)),
    Golden(
        "not at the beginning",
        formats.LLAMA_JSON,
        'Use {"name": "get_time", "parameters": {}} then.',
        (content('Use {"name": "get_time", "parameters": {}} then.'),),
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
        "lfm2",
        formats.LFM2,
        'I check. <|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>Checking.',
        (content("I check."), call(*PARIS), content("Checking.")),
        control_tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
)
