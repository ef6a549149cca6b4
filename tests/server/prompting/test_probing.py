"""Templates of no known family: how they write calls is found in what they render. Each is a short one in the style of
a family that came after the code."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest

from localrun.server.prompting.ask import Tool
from localrun.server.prompting.profile import profile_of
from tests.server.parsing.reading_aloud import meaning, read
from tests.server.prompting.test_constraint import accepts
from tests.server.prompting.test_prepare import HELLO, Desk, _call, desk, loop, renderer, text

__all__ = ["desk", "loop", "renderer"]

WEATHER = Tool(
    "get_weather",
    "The weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
TIME = Tool("get_time", "The time", {"type": "object", "properties": {}, "additionalProperties": False})
PARIS = {"city": "Paris, <b>France</b></value:own>, ]~[</city>, <|close|>argument<|sep|>", "days": 3}


@dataclass(frozen=True)
class Style:
    """`call` writes `c`, one of a message's calls. `writes_all` is False of one that writes the first call alone."""

    name: str
    before: str
    call: str
    after: str
    turn_end: str = "<|im_end|>\n"
    between: str = ""
    answer: str = "{{ m.content }}"
    writes_all: bool = True

    @property
    def template(self) -> str:
        calls = "m.tool_calls" if self.writes_all else "m.tool_calls[:1]"
        return (
            "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
            "{% for m in messages %}<|im_start|>{{ m.role }}\n"
            f"{{% if m.role == 'assistant' %}}{self.answer}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
            f"{{% if m.tool_calls %}}{self.before}{{% for c in {calls} %}}{{% set f = c.function %}}{self.call}"
            f"{{% if not loop.last %}}{self.between}{{% endif %}}{{% endfor %}}{self.after}{{% endif %}}"
            f"{self.turn_end}{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
        )


def _listed(argument: str, between: str = "") -> str:
    last = f"{{% if not loop.last %}}{between}{{% endif %}}" if between else ""
    return f"{{% for k, v in f.arguments.items() %}}{argument}{last}{{% endfor %}}"


VALUE = "{{ v if v is string else v | tojson }}"
JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
STYLES = (
    Style(
        "keys and values in tags",
        "<calls:own>\n",
        "<call:own>{{ f.name }}<sep:own>\n"
        + _listed(f"<key:own>{{{{ k }}}}</key:own>\n<value:own>{VALUE}</value:own>\n")
        + "</call:own>\n",
        "</calls:own>",
    ),
    Style(
        "tags named by the keys",
        "]~[<call>\n",
        ']~[<do name="{{ f.name }}">' + _listed(f"]~[<{{{{ k }}}}>{VALUE}]~[</{{{{ k }}}}>") + "]~[</do>\n",
        "]~[</call>",
    ),
    Style(
        "control tokens with attributes, an answer between marks",
        "<|open|>tools<|sep|>",
        '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
        + _listed(
            "<|open|>argument key=\"{{ k }}\" type=\"{{ 'string' if v is string else 'number' }}\"<|sep|>"
            + VALUE
            + "<|close|>argument<|sep|>"
        )
        + "<|close|>call<|sep|>",
        "<|close|>tools<|sep|>",
        turn_end="<|close|>message<|sep|><|end|>",
        answer="<|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>",
    ),
    Style("JSON behind a token", "<|function_call|>", JSON, "", writes_all=False),
    Style("JSON in tags", "", f"\n<do_call>\n{JSON}\n</do_call>", ""),
    Style("a list of JSON", "<calls:json>[", JSON, "]</calls:json>", between=", "),
    Style(
        "an id, the name and JSON",
        "<|calls|>",
        "<|call:begin|>{{ c.id }}<|call:name|>{{ f.name }}<|call:args|>{{ f.arguments | tojson }}<|call:end|>",
        "<|calls:end|>",
    ),
    Style(
        "a role of its own", "<|next|>\n\nfunction call<|role|>\n", JSON, "", turn_end="<|next|>\n\n", writes_all=False
    ),
)
EACH = pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)


@EACH
def test_calls_that_a_template_of_no_known_family_writes_are_read_back(desk: Desk, style: Style):
    template = style.template
    assert profile_of(template).call_format is None
    both = [_call("get_weather", PARIS), _call("get_time", {})]
    for calls in (both[:1], both) if style.writes_all else (both[:1],):
        called = {"role": "assistant", "content": "I look.", "tool_calls": calls}
        prepared = desk(template, messages=[HELLO, called], tools=(WEATHER, TIME), adds_prompt=False)
        reply = text(prepared).rpartition("<|im_start|>assistant\n")[2].removesuffix(style.turn_end)
        expected = [("get_weather", PARIS), ("get_time", {})][: len(calls)]
        for size in (1, 3, 7, len(reply)):
            pieces = read(prepared.new_parser(), (reply[at : at + size] for at in range(0, len(reply), size)))
            said = meaning(pieces)
            assert [value for kind, value in said if kind == "call"] == expected, reply
            assert said[0][0] == "content"
            assert "I look." in said[0][1]


def test_objects_and_lists_may_be_written_as_elements(desk: Desk):
    """As MiniMax M3 does. A text that is marked up stays one."""
    style = next(style for style in STYLES if style.name == "tags named by the keys")
    node = {"type": "object", "properties": {"to": {"type": "string"}, "n": {"type": "integer"}}}
    properties = {"node": {"$ref": "#/$defs/node"}, "legs": {"type": "array", "items": node}, "tags": {"type": "array"}}
    properties["note"] = {"type": "string"}
    book = Tool("book", "Books", {"type": "object", "properties": properties, "$defs": {"node": node}})
    leg = "]~[<to>7]~[</to>]~[<n>7]~[</n>"
    body = (
        f"\n]~[<node>{leg}]~[</node>\n]~[<legs>]~[<item>{leg}]~[</item>]~[<item>{leg}]~[</item>]~[</legs>"
        "]~[<tags>]~[<item>a]~[</item>]~[<item>2]~[</item>]~[</tags>]~[<note><b>x</b>]~[</note>\n"
    )
    reply = f']~[<call>\n]~[<do name="book">{body}]~[</do>\n]~[</call>'
    value = {"to": "7", "n": 7}
    expected = {"node": value, "legs": [value, value], "tags": ["a", 2], "note": "<b>x</b>"}
    prepared = desk(style.template, tools=(book,))
    for size in (1, 5, len(reply)):
        pieces = read(prepared.new_parser(), (reply[at : at + size] for at in range(0, len(reply), size)))
        assert meaning(pieces) == (("call", ("book", expected)),)


@EACH
def test_its_calls_are_forced_as_it_writes_them(desk: Desk, style: Style):
    calls = [{**_call("get_weather", PARIS), "id": "a1b2c3d4e"}]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    past = text(desk(style.template, messages=[HELLO, called], tools=(WEATHER,), adds_prompt=False))
    forced = desk(style.template, tools=(WEATHER, TIME), tool_choice="required")
    assert "# Tools" not in text(forced), "its own description of tools is left to it"
    assert forced.grammar is not None
    begins = (style.before + style.call).strip().rpartition("\n\n")[2][:13]
    own = past[past.rindex(begins) :].removesuffix(style.turn_end)
    assert accepts(forced.grammar, own), own
    assert not accepts(forced.grammar, "Hello.")


def test_thinking_and_an_answer_between_marks_of_their_own(desk: Desk):
    style = next(style for style in STYLES if style.answer != "{{ m.content }}")
    thinks = "{% if m.reasoning_content %}<|open|>think<|sep|>{{ m.reasoning_content }}<|close|>think<|sep|>{% endif %}"
    template = style.template.replace(style.answer, thinks + style.answer)
    template += "{% if add_generation_prompt %}<|open|>think<|sep|>{% endif %}"
    prepared = desk(template, ("<|open|>", "<|close|>", "<|sep|>", "<|end|>"), tools=(TIME,), think=True)
    reply = (
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="get_time" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|>"
    )
    unclosed = reply.replace("<|close|>think<|sep|>", "")
    for said, size in product((reply, unclosed), (1, 5, len(reply))):
        pieces = read(prepared.new_parser(), (said[at : at + size] for at in range(0, len(said), size)))
        assert meaning(pieces) == (("thinking", "Hm."), ("content", "I look."), ("call", ("get_time", {})))


def test_tools_are_described_where_the_template_s_own_calls_cannot_be_told(desk: Desk):
    style = Style("nothing round a name", "", "{{ f.name }} {{ f.arguments | tojson }}", "")
    prepared = desk(style.template, tools=(TIME,))
    assert "# Tools" in text(prepared)
    reply = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    assert meaning(read(prepared.new_parser(), [reply])) == (("call", ("get_time", {})),)
