"""From a chat to a prompt, a grammar and a parser, with real renders of templates in the styles that models have."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from localrun.errors import BadRequest, BadTemplate
from localrun.models.gguf.header import Header
from localrun.models.gguf.reader import read_header
from localrun.server import structured
from localrun.server.jobs.job import Job
from localrun.server.parsing.parser import ParserPlan
from localrun.server.prompting import prepare as prepare_module
from localrun.server.prompting.ask import ChatRequest, Tool, arguments_of, called
from localrun.server.prompting.prepare import Prepared, prepare, render_template, template_of
from localrun.server.runtime import Runtime
from localrun.server.workers import TemplateOverrunError, TemplateRenderer
from localrun.wire import GrammarKind, Segment
from tests.server.parsing.reading_aloud import meaning, read

WEATHER = Tool("get_weather", "The weather", {"type": "object", "properties": {"city": {"type": "string"}}})
TIME = Tool("get_time", "The time", {"type": "object", "properties": {}})
HELLO = {"role": "user", "content": "hello"}

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
)
HERMES = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> as <tool_call> arguments{% endif %}"
    + TURNS
    + "<|im_start|>assistant{{ '\n' }}"
)
QWEN_3 = HERMES + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
OPENS_THINKING = HERMES + "<think>{{ '\n' }}"
CODER = HERMES.replace("arguments", "<function=f>")
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
HARMONY = "{% if tools %}T{% endif %}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>" + (
    "{% endfor %}{{ reasoning_effort }}<|start|>assistant{# <|channel|> #}"
)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def renderer(loop: asyncio.AbstractEventLoop) -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer(timeout_s=30, output_bytes=1_000_000)
    loop.run_until_complete(renderer.start())
    yield renderer
    loop.run_until_complete(renderer.stop())


class Desk:
    """Prepares asks for one model after the other."""

    tool_template = ""

    def __init__(self, loop: asyncio.AbstractEventLoop, renderer: TemplateRenderer, header: Any) -> None:
        self._loop = loop
        self._runtime = cast(Runtime, SimpleNamespace(renderer=renderer))
        self._header = header

    def __call__(self, chat_template: str, control_tokens: tuple[str, ...] = (), **ask: Any) -> Prepared:
        model = SimpleNamespace(header=self._header, template=chat_template, tool_template=self.tool_template)
        job = cast(Job, SimpleNamespace(model=model, ready=SimpleNamespace(control_tokens=control_tokens)))
        ask.setdefault("messages", [HELLO])
        return self._loop.run_until_complete(prepare(self._runtime, job, ChatRequest(**ask)))


@pytest.fixture
def desk(loop: asyncio.AbstractEventLoop, renderer: TemplateRenderer, small_model: Path) -> Desk:
    return Desk(loop, renderer, read_header(small_model))


def text(prepared: Prepared) -> str:
    return "".join(segment.text for segment in prepared.segments)


def test_a_plain_chat_is_rendered_and_its_answer_is_content(desk: Desk):
    prepared = desk(PLAIN)
    assert text(prepared) == "[user]hello[assistant]"
    assert (prepared.grammar, prepared.show_control, prepared.stop) == (None, False, ())
    assert meaning(read(prepared.new_parser(), ["<tool_call>", "x"])) == (("content", "<tool_call>x"),)


def test_the_manifest_s_template_goes_before_the_file_s(desk: Desk):
    assert text(desk("{{ messages[0].content }}!")) == "hello!"


def test_a_template_is_told_the_date_unless_the_client_says_another(desk: Desk):
    """Those of Llama 3 have one of their own, years ago, for who says none."""
    template = "{% if date_string is defined %}{{ date_string }}{% else %}26 Jul 2024{% endif %}"

    def today() -> str:
        return datetime.now().astimezone().strftime("%d %b %Y")

    before, told = today(), text(desk(template))
    assert told in (before, today()), "two days at midnight"
    assert text(desk(template, template_variables={"date_string": "1 May 2030"})) == "1 May 2030"


def test_a_file_s_own_template_for_tools_is_used_with_tools(desk: Desk):
    desk.tool_template = "FOR TOOLS: " + HERMES
    assert text(desk(PLAIN, tools=(WEATHER,))).startswith("FOR TOOLS: <tools>")
    assert text(desk(PLAIN)) == "[user]hello[assistant]"
    assert text(desk(PLAIN, tools=(WEATHER,), tool_choice="none")) == "[user]hello[assistant]"
    assert "FOR TOOLS" not in text(desk(PLAIN, template=HERMES, tools=(WEATHER,)))
    assert text(desk(OPENS_THINKING, tools=(WEATHER,), think=True)).startswith("FOR TOOLS: ")


def test_tools_go_to_a_template_that_knows_them(desk: Desk):
    prepared = desk(HERMES, tools=(WEATHER,))
    assert '"name": "get_weather"' in text(prepared)
    assert prepared.grammar is not None
    assert prepared.grammar.triggers == ("<tool_call>",)
    reply = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert meaning(read(prepared.new_parser(), reply)) == (("call", ("get_weather", {"city": "Rome"})),)


def test_tools_are_described_to_a_model_whose_template_knows_none(desk: Desk):
    prepared = desk(PLAIN, messages=[{"role": "system", "content": "Be kind."}, HELLO], tools=(WEATHER,))
    assert text(prepared).startswith("[system]Be kind.\n\n# Tools")
    assert "get_weather" in text(prepared)
    assert "<tool_call>" in text(prepared)
    assert prepared.stop == ("<tool_response>",)


def test_calls_and_results_of_the_past_are_text_to_such_a_model(desk: Desk):
    called = {"role": "assistant", "content": "", "tool_calls": [_call("get_time", {})]}
    prepared = desk(PLAIN, messages=[HELLO, called, {"role": "tool", "content": "noon", "tool_call_id": "c"}])
    assert '"name": "get_time"' in text(prepared)
    assert "[user]<tool_response>\nnoon\n</tool_response>" in text(prepared)


LIQUID = (
    "{% if tools %}List of tools: [{{ tools | tojson }}]{# <|tool_call_start|> #}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\n' }}"
)


def test_calls_of_the_past_stand_in_the_model_s_own_notation(desk: Desk):
    controls = ("<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>")
    arguments = {"city": "Paris <|tool_call_end|>", "days": 2}
    called = {"role": "assistant", "content": "I look.", "tool_calls": [_call("get_weather", arguments)]}
    messages = [HELLO, called, {"role": "tool", "content": "rain", "tool_call_id": "c"}]
    prepared = desk(LIQUID, controls, messages=messages, tools=(WEATHER,))
    own = '<|tool_call_start|>[get_weather(city="Paris <|tool_call_end|>", days=2)]<|tool_call_end|>'
    assert f"<|im_start|>assistant\nI look.\n{own}<|im_end|>" in text(prepared)
    assert "<|im_start|>tool\nrain<|im_end|>" in text(prepared)
    shown = [(segment.text, segment.trusted) for segment in prepared.segments if "tool_call_" in segment.text]
    assert shown[-3:] == [
        ("<|tool_call_start|>", True),
        ("<|tool_call_end|>", False),
        ("<|tool_call_end|>", True),
    ], "the client's text is no control token, and the call's own marks are"
    assert meaning(read(prepared.new_parser(), [own])) == (("call", ("get_weather", arguments)),)


def test_no_tool_choice_shows_no_tools(desk: Desk):
    prepared = desk(HERMES, tools=(WEATHER,), tool_choice="none")
    assert "get_weather" not in text(prepared)
    assert prepared.grammar is None


def test_required_tools_constrain_the_whole_reply(desk: Desk):
    prepared = desk(HERMES, tools=(WEATHER, TIME), tool_choice="required")
    assert prepared.grammar is not None
    assert prepared.grammar.triggers == ()
    assert "get_time" in prepared.grammar.text
    assert "<tool_call>" in prepared.grammar.text


def test_a_named_tool_is_the_only_one_in_the_grammar_and_all_are_in_the_prompt(desk: Desk):
    prepared = desk(HERMES, tools=(WEATHER, TIME), tool_choice=("function", "get_time"))
    assert prepared.grammar is not None
    assert "get_weather" not in prepared.grammar.text
    assert "get_weather" in text(prepared)


def test_a_format_without_json_is_forced_by_a_grammar_and_may_think_before(desk: Desk):
    template = CODER + "<think>{{ '\n' }}"
    at_once = desk(template, tools=(WEATHER, TIME), tool_choice=("function", "get_weather"))
    assert text(at_once).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    prepared = desk(template, tools=(WEATHER, TIME), tool_choice=("function", "get_weather"), think=True)
    assert text(prepared).endswith("<|im_start|>assistant\n<think>\n")
    assert prepared.grammar is not None
    assert "<function=get_weather>" in prepared.grammar.text
    assert "get_time" not in prepared.grammar.text
    reply = (
        "Hm.</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
        "</tool_call>"
    )
    read_back = meaning(read(prepared.new_parser(), reply))
    assert read_back == (("thinking", "Hm."), ("call", ("get_weather", {"city": "Rome"})))


def test_one_call_at_most_where_the_client_takes_no_more(desk: Desk):
    call = "<tool_call><function=get_time></function></tool_call>"
    for parallel, n_calls in ((True, 2), (False, 1)):
        prepared = desk(CODER, tools=(TIME,), parallel_calls=parallel)
        assert meaning(read(prepared.new_parser(), [call + call])) == (("call", ("get_time", {})),) * n_calls
    grammar = desk(HERMES, tools=(TIME,), parallel_calls=False).grammar
    assert grammar is not None
    assert grammar.text != getattr(desk(HERMES, tools=(TIME,)).grammar, "text", "")


def test_forced_calls_come_after_the_thinking_that_the_prompt_opened(desk: Desk):
    prepared = desk(OPENS_THINKING, tools=(TIME,), tool_choice="required")
    assert prepared.grammar is not None
    assert prepared.grammar.triggers == (), "it could end inside of its thinking"
    reply = 'Hm.</think><tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    assert meaning(read(prepared.new_parser(), [reply])) == (("thinking", "Hm."), ("call", ("get_time", {})))


def test_structured_output_is_free_while_the_model_thinks(desk: Desk):
    grammar = structured.json_object()
    opened = desk(OPENS_THINKING, response_grammar=grammar)
    assert opened.grammar is not None
    assert opened.grammar.triggers == ("</think>",)
    may_think = desk(QWEN_3, response_grammar=grammar)
    assert may_think.grammar is not None
    assert may_think.grammar.kind is GrammarKind.LARK
    assert "think>" in may_think.grammar.text
    assert desk(QWEN_3, response_grammar=grammar, think=False).grammar == grammar
    assert desk(PLAIN, response_grammar=grammar).grammar == grammar


def test_thinking_may_be_a_message_of_its_own(desk: Desk):
    template = (
        "{% for m in messages %}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{% endfor %}<|begin|>assistant"
        "{# <|begin|>assistant<|think|> #}"
    )
    prepared = desk(template, ("<|begin|>", "<|content|>", "<|think|>", "<|end|>"))
    reply = "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes, the assistant."
    assert meaning(read(prepared.new_parser(), reply)) == (("thinking", "Hm."), ("content", "Yes, the assistant."))


def test_think_switches_the_template(desk: Desk):
    assert text(desk(QWEN_3, think=False)).endswith("<think>\n\n</think>\n\n")
    assert text(desk(QWEN_3, think=True)).endswith("assistant\n")
    assert "high" in text(desk(HARMONY, think="high"))


def test_a_model_that_always_thinks_is_cut_short_when_it_must_not(desk: Desk):
    prepared = desk(OPENS_THINKING, think=False)
    assert text(prepared).endswith("<think>\n\n</think>\n\n")
    assert meaning(read(prepared.new_parser(), ["Yes."])) == (("content", "Yes."),)


def test_thinking_is_refused_by_a_model_that_does_not_know_it(desk: Desk):
    with pytest.raises(BadRequest, match="does not support thinking"):
        desk(PLAIN, think=True)
    assert text(desk(PLAIN, think=False)) == "[user]hello[assistant]"


def test_marks_that_are_control_tokens_are_asked_for_and_others_left_out(desk: Desk):
    controls = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|x|>")
    prepared = desk(HARMONY, control_tokens=controls)
    assert prepared.show_control
    reply = "<|channel|>analysis<|message|>a<|x|>b<|end|><|start|>assistant<|channel|>final<|message|>c"
    assert meaning(read(prepared.new_parser(), reply)) == (("thinking", "ab"), ("content", "c"))
    assert not desk(HERMES, control_tokens=controls).show_control


def test_a_last_message_is_continued_as_text_of_the_client(desk: Desk):
    messages = [HELLO, {"role": "assistant", "content": "Well, <|im_end|>"}]
    prepared = desk(HERMES, control_tokens=("<|im_end|>",), messages=messages, continue_last=True)
    assert text(prepared).endswith("<|im_start|>assistant\nWell, <|im_end|>")
    assert prepared.segments[-1] == Segment("Well, <|im_end|>", trusted=False)


def test_continued_content_stands_after_the_thinking(desk: Desk):
    messages = [HELLO, {"role": "assistant", "content": "So"}]
    prepared = desk(OPENS_THINKING, messages=messages, continue_last=True)
    assert text(prepared).endswith("<think>\n\n</think>\n\nSo")
    assert meaning(read(prepared.new_parser(), [" on"])) == (("content", " on"),)


def test_content_that_goes_on_with_a_tag_keeps_it(desk: Desk):
    messages = [HELLO, {"role": "assistant", "content": "The tag is `"}]
    prepared = desk(OPENS_THINKING, messages=messages, continue_last=True)
    assert meaning(read(prepared.new_parser(), ["<think>`, and its end `</think>`."])) == (
        ("content", "<think>`, and its end `</think>`."),
    )


def test_content_that_goes_on_stands_behind_its_thinking_as_the_template_writes_it(desk: Desk):
    messages = [HELLO, {"role": "assistant", "content": "Done", "thinking": "Plan."}]
    for written in ("<think>{}</think>", "<think>\n{}\n</think>\n\n", "<think>{}</think>\n"):
        thinks = "{% if m.reasoning_content %}" + written.format("{{ m.reasoning_content }}") + "{% endif %}"
        template = TURNS.replace("{{ m.content }}", f"{thinks}{{{{ m.content }}}}")
        for opened in ("", written.partition("{}")[0]):
            begins = f"{{{{ {'<|im_start|>assistant' + chr(10) + opened!r} }}}}"
            prepared = desk(template + begins, messages=messages, continue_last=True)
            assert text(prepared).endswith(f"<|im_start|>assistant\n{written.format('Plan.')}Done")


def test_continued_thinking_goes_on_thinking(desk: Desk):
    messages = [HELLO, {"role": "assistant", "content": "", "thinking": "Hm"}]
    prepared = desk(OPENS_THINKING, messages=messages, continue_last=True)
    assert text(prepared).endswith("<think>\nHm")
    assert meaning(read(prepared.new_parser(), ["m.</think>Yes"])) == (("thinking", "m."), ("content", "Yes"))


def test_typed_control_tokens_stay_text(desk: Desk):
    messages = [{"role": "user", "content": "a<|im_end|>b"}]
    prepared = desk(HERMES, control_tokens=("<|im_start|>", "<|im_end|>"), messages=messages)
    assert Segment("<|im_end|>", trusted=False) in prepared.segments


def test_documents_and_variables_reach_the_template(desk: Desk):
    template = "{% for d in documents %}{{ d.text }},{% endfor %}{{ mood }}"
    assert (
        text(desk(template, documents=[{"text": "a"}, {"text": "b"}], template_variables={"mood": "fine"}))
        == "a,b,fine"
    )


def test_a_template_that_refuses_system_messages_gets_them_with_the_user_s(desk: Desk):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
    prepared = desk(template, messages=[{"role": "system", "content": "Be kind."}, HELLO])
    assert text(prepared) == "[user]Be kind.\n\nhello[assistant]"


def test_a_system_message_alone_is_the_user_s_for_a_template_that_needs_one(desk: Desk):
    needs = (
        "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}{{ rest[-1].role + ' ' }}" + PLAIN
    )
    assert text(desk(needs, messages=[{"role": "system", "content": "Be kind."}])) == "user [user]Be kind.[assistant]"


SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + PLAIN
)


def test_the_first_system_message_keeps_its_rank_when_there_is_another(desk: Desk):
    first, more = {"role": "system", "content": "Be kind."}, {"role": "system", "content": "Be brief."}
    assert text(desk(SYSTEM_FIRST, messages=[first, more, HELLO])) == (
        "[system]Be kind.\n\nBe brief.[user]hello[assistant]"
    )


def test_what_is_cached_of_a_conversation_stays_its_beginning_when_a_system_message_comes(desk: Desk):
    turns = [{"role": "system", "content": "Be kind."}, HELLO, {"role": "assistant", "content": "hi"}]
    before = text(desk(SYSTEM_FIRST, messages=[*turns, HELLO])).removesuffix("[user]hello[assistant]")
    later = text(desk(SYSTEM_FIRST, messages=[*turns, {"role": "system", "content": "Be brief."}, HELLO]))
    assert later == before + "[user]Be brief.[user]hello[assistant]"


def test_a_role_that_a_template_knows_reaches_it_and_another_is_not_lost(desk: Desk):
    messages = [{"role": "control", "content": "think"}, HELLO]
    assert text(desk(PLAIN, messages=messages)) == "[control]think[user]hello[assistant]"
    knows_three = PLAIN.replace("[{{", "{% if m.role in ['system', 'user', 'assistant'] %}[{{").replace(
        "{{ m.content }}", "{{ m.content }}{% endif %}"
    )
    assert text(desk(knows_three, messages=messages)) == "[user]think[user]hello[assistant]"


BROKEN = {
    "role": "assistant", "content": "",
    "tool_calls": [called("get_weather", arguments_of('{"city": "Rome is '), "c")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("c.function.arguments", '[assistant]get_weather {"city": "Rome is '),
        ("c.function.arguments | tojson", '[assistant]get_weather {"arguments": "{\\"city\\": \\"Rome is "}'),
        ("c.function.arguments.items() | list", "[assistant]get_weather [('arguments', '{\"city\": \"Rome is ')]"),
    ],
    ids=["as text", "as JSON", "item by item"],
)
def test_broken_arguments_of_a_call_go_into_the_prompt(desk: Desk, written: str, expected: str):
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ " + written + " }}{% endfor %}"
    template = PLAIN.replace("{{ m.content }}", "{{ m.content }}" + calls)
    result = {"role": "tool", "content": "no JSON", "tool_call_id": "c"}
    assert expected + "[tool]no JSON" in text(desk(template, messages=[HELLO, BROKEN, result]))


LEVELS = (
    "{% if reasoning_effort is defined and reasoning_effort not in ['xhigh', 'medium', 'low'] %}"
    "{{ raise_exception('Unexpected reasoning effort ' ~ reasoning_effort) }}{% endif %}"
    "<think>{{ reasoning_effort | default('-') }}|"
)


@pytest.mark.parametrize(
    ("wanted", "template", "told"),
    [
        ("high", LEVELS, "xhigh"), ("max", LEVELS, "xhigh"), ("medium", LEVELS, "medium"), ("minimal", LEVELS, "low"),
        ("a_lot", LEVELS, "-"), ("high", HARMONY, "high"), ("max", HARMONY, "high"), ("minimal", HARMONY, "low"),
        ("medium", "<think>{{ reasoning_effort in ['no_think', 'low', 'high'] }}{{ reasoning_effort }}|", "Truehigh"),
        ("high", "<think>{% if reasoning_effort is defined %}{{ raise_exception('no') }}{% endif %}-|", "-"),
    ],
)  # fmt: skip
def test_a_level_of_thinking_is_said_in_the_template_s_words(desk: Desk, wanted: str, template: str, told: str):
    prompt = text(desk(template, think=wanted))
    assert f"<think>{told}|" in prompt or f"{told}<|start|>assistant" in prompt


def test_a_result_without_its_call_is_said_to_a_template_that_insists_on_one(desk: Desk):
    insists = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('there was no call') }}{% endif %}"
        "{% endfor %}" + PLAIN
    )
    stray = {"role": "tool", "content": "noon", "tool_call_id": "gone"}
    prompt = text(desk(insists + "{# m.tool_calls tool_call_id #}", messages=[HELLO, stray, HELLO]))
    assert "noon" in prompt
    assert prompt.endswith("[user]hello[assistant]")


def test_a_result_without_its_call_is_never_lost(desk: Desk):
    drops = "{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    stray = {"role": "tool", "content": "noon", "tool_call_id": "gone"}
    assert text(desk(drops + "{# tool_calls #}", messages=[HELLO, stray, HELLO])) == "[user]hello[user]noon[user]hello"


def test_parameters_without_a_type_have_one_for_a_template_that_looks_for_it(desk: Desk):
    looks = (
        "{% for t in tools or [] %}{% for name, p in t.function.parameters.properties.items() %}{{ name }}:"
        "{{ p['type'] + ' ' }}{% endfor %}{% endfor %}<tool_call> arguments" + TURNS
    )
    either = {"anyOf": [{"type": "null"}, {"type": "integer"}]}
    properties = {"a": {"description": "x"}, "b": either, "c": {"type": "string"}, "d": {"anyOf": 5}}
    tool = Tool("f", "", {"type": "object", "properties": properties})
    assert "a:any b:integer c:string d:any " in text(desk(looks, tools=(tool,)))


def test_parameters_without_a_type_have_a_description_alone_where_the_template_reads_types_by_letters(desk: Desk):
    spelled = (
        "{% macro kind(p) %}{% if p.type == 'string' %}text{% elif p.type is iterable %}"
        "{% for one in p.type %}{{ kind({'type': one}) }}{% endfor %}{% else %}any{% endif %}{% endmacro %}"
        "{% for t in tools or [] %}{% for name, p in t.function.parameters.properties.items() %}"
        "{{ name + ':' + kind(p) + p.description }} {% endfor %}{% endfor %}<tool_call> arguments" + TURNS
    )
    may_be_null = {"type": ["string", "null"]}
    tool = Tool("f", "", {"type": "object", "properties": {"a": {"const": True}, "b": may_be_null}})
    assert "a: b:text " in text(desk(spelled, tools=(tool,)))


def test_a_template_that_wants_roles_to_alternate_gets_that(desk: Desk):
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + PLAIN
    )
    assert (
        text(desk(template, messages=[HELLO, {"role": "user", "content": "there"}]))
        == "[user]hello\n\nthere[assistant]"
    )


def test_a_system_message_in_the_middle_is_never_lost(desk: Desk):
    drops = (
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    answer = {"role": "assistant", "content": "hi"}
    messages = [HELLO, answer, {"role": "system", "content": "Be brief."}, HELLO]
    assert text(desk(drops, messages=messages)) == "[user]hello[assistant]hi[user]Be brief.[user]hello"
    assert "[system]Be brief." in text(desk(PLAIN, messages=messages))


def test_what_a_template_refuses_altogether_is_its_own_message(desk: Desk):
    with pytest.raises(BadRequest, match="not today"):
        desk("{{ raise_exception('not today') }}")


def test_only_an_answer_is_gone_on_with(desk: Desk):
    with pytest.raises(BadRequest, match="assistant"):
        desk(HERMES, continue_last=True)


def test_a_schema_that_no_decoding_can_be_held_to_is_refused_only_when_it_must(desk: Desk):
    odd = Tool("odd", "", {"type": "object", "properties": {"a": {"type": "string", "unheardOf": 1}}})
    lazy = desk(HERMES, tools=(odd,)).grammar
    assert lazy is not None
    assert "unheardOf" not in lazy.text


REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"


REFUSES_UNDESCRIBED = (
    "{% if tools[0].function.parameters.properties.city.description is not defined %}"
    "{{ raise_exception('no') }}{% endif %}"
)


@pytest.mark.parametrize(
    "before", ["", REFUSES_UNDESCRIBED, REFUSES_SYSTEM], ids=["at once", "with other tools", "in a milder form"]
)
def test_a_template_that_takes_too_long_is_rendered_once(
    loop: asyncio.AbstractEventLoop, small_model: Path, monkeypatch: pytest.MonkeyPatch, before: str
):
    stuck = before + HERMES + "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    renderer = TemplateRenderer(timeout_s=0.2, output_bytes=1_000_000)
    loop.run_until_complete(renderer.start())
    workers = []
    spawn = asyncio.create_subprocess_exec
    monkeypatch.setattr(
        asyncio, "create_subprocess_exec", lambda *given, **options: workers.append(given) or spawn(*given, **options)
    )
    desk = Desk(loop, renderer, read_header(small_model))
    system = {"role": "system", "content": "Be brief."}
    messages = [system, HELLO, HELLO, {"role": "assistant", "content": "", "tool_calls": [_call("get_time", {})]}]
    try:
        with pytest.raises(TemplateOverrunError, match=r"longer than 0\.2 s"):
            desk(stuck, messages=messages, tools=[WEATHER])
    finally:
        loop.run_until_complete(renderer.stop())
    assert not workers, "each further render would have needed another worker"


@pytest.mark.parametrize("own", [True, False], ids=["of the model", "of the request"])
def test_a_template_beyond_the_limit_is_refused_before_it_is_looked_at(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, own: bool
):
    looked_at: list[str] = []
    monkeypatch.setattr(prepare_module, "profile_of", looked_at.append)
    long = "x" * 1_000_001
    with pytest.raises(BadTemplate, match="1000001 characters; the limit is 1000000") as caught:
        desk(long if own else PLAIN, template=None if own else long)
    assert caught.value.field == "template"
    assert looked_at == []


def test_what_may_take_long_is_done_beside_the_event_loop(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    threads: dict[str, threading.Thread] = {}

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            threads[name] = threading.current_thread()
            return work(*given)

        return run

    monkeypatch.setattr(prepare_module, "ended", watched("grammar", prepare_module.ended))
    monkeypatch.setattr(ParserPlan, "warm", watched("parser", ParserPlan.warm))
    desk(HERMES, ("<tool_call>",), tools=[WEATHER], tool_choice="required")
    assert sorted(threads) == ["grammar", "parser"]
    assert threading.main_thread() not in threads.values()


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "c", "function": {"name": name, "arguments": arguments}}


class Recorder:
    """A renderer that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], tuple[str, ...]]] = []

    async def render(
        self, template: str, variables: dict[str, Any], control_tokens: Sequence[str]
    ) -> tuple[Segment, ...]:
        self.asked.append((template, variables, tuple(control_tokens)))
        return (Segment("rendered"),)


def stubs(header: Header) -> tuple[Recorder, Runtime, Job]:
    recorder = Recorder()
    model = SimpleNamespace(header=header, template=header.chat_template or "", tool_template="")
    job = SimpleNamespace(model=model, ready=SimpleNamespace(control_tokens=("<|im_start|>",)))
    return recorder, cast(Runtime, SimpleNamespace(renderer=recorder)), cast(Job, job)


async def test_the_model_s_template_gets_messages_and_special_tokens(small_model: Path) -> None:
    header = read_header(small_model)
    recorder, runtime, job = stubs(header)
    messages = [{"role": "user", "content": "hi"}]
    assert await render_template(runtime, job, template_of(job), messages) == (Segment("rendered"),)
    template, variables, control_tokens = recorder.asked[0]
    assert template == header.chat_template
    assert variables["messages"] == messages
    assert (variables["add_generation_prompt"], variables["tools"]) == (True, None)
    assert variables["eos_token"] in header.control_tokens()
    assert isinstance(variables["bos_token"], str)
    assert control_tokens == ("<|im_start|>",)


async def test_a_model_without_a_template_gets_its_family_s(small_model: Path) -> None:
    header = read_header(small_model)
    del header.metadata["tokenizer.chat_template"]
    recorder, runtime, job = stubs(header)
    await render_template(runtime, job, template_of(job), [])
    assert "<|im_start|>" in recorder.asked[0][0]


def test_looking_for_system_messages_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 30,000 was looked for in a prompt of all of them; now so many characters are looked through in all."""

    def missing(texts: list[str], prompt: str) -> list[str]:
        conversation = [{"role": "system", "content": text} for text in texts]
        return prepare_module._missing(conversation, (Segment(prompt, trusted=False),))

    texts = [f"rule {at:05}." for at in range(500)]
    assert missing(texts, " ".join(texts)) == []
    assert missing(texts, " ".join(reversed(texts))) == []
    assert missing(texts, " ".join(texts[::2])) == texts[1::2]
    assert missing(["a", "b", "a"], "a b") == [], "the same text may stand once for two"
    monkeypatch.setattr(prepare_module, "_MOST_SEARCHED", 20_000)
    assert 0 < len(missing(texts, "x" * 1_000)) <= 20_000 / 1_000, "what was not looked for is not said to be missing"
