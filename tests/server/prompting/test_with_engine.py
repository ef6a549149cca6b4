"""A chat on a fake engine: forced calls and structured answers hold, whatever the model would have said."""

from __future__ import annotations

import json

import pytest

from localrun.server import structured
from localrun.server.jobs.job import JobRequest
from localrun.server.parsing import formats
from localrun.server.parsing.parser import CallFormat
from localrun.server.parsing.pieces import Content, Piece
from localrun.server.prompting.ask import ChatRequest, Tool
from localrun.server.prompting.prepare import Prepared, prepare
from localrun.server.prompting.profile import _BY_MARKS, profile_of
from localrun.server.runtime import Runtime
from localrun.wire import Sampling, Submit
from tests.server.conftest import Running
from tests.server.parsing.reading_aloud import meaning

WEATHER = Tool(
    "get_weather",
    "The weather",
    {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
TIME = Tool("get_time", "The time", {"type": "object", "properties": {}, "additionalProperties": False})
BY_MARKS = (*_BY_MARKS, (("<tool_call>",), formats.HERMES), (("[f(a=",), formats.PYTHONIC))
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "What is the weather?"}]


async def reply(runtime: Runtime, ask: ChatRequest) -> list[Piece]:
    pieces: list[Piece] = []
    async with runtime.job(JobRequest(model="alpha", api="test")) as job:
        prepared: Prepared = await prepare(runtime, job, ask)
        parser = prepared.new_parser()
        asked = Submit(
            id=0,
            sampling=Sampling(seed=1),
            n_predict=400,
            stop=prepared.stop,
            grammar=prepared.grammar,
            show_control=prepared.show_control,
        )
        await job.submit(asked, segments=prepared.segments)
        async for delta in job:
            assert delta.error_message is None
            pieces += parser.feed(delta.text)
    return pieces + parser.finish()


async def test_a_named_tool_is_called_with_arguments_of_its_schema(running: Running):
    async with running() as runtime:
        pieces = await reply(
            runtime, ChatRequest(messages=MESSAGES, tools=(WEATHER, TIME), tool_choice=("function", "get_weather"))
        )
    ((kind, (name, arguments)),) = meaning(pieces)
    assert (kind, name) == ("call", "get_weather")
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 9


@pytest.mark.parametrize(("marks", "call_format"), BY_MARKS, ids=lambda known: getattr(known, "name", ""))
async def test_a_call_is_forced_in_every_format(running: Running, marks: tuple[str, ...], call_format: CallFormat):
    template = f"{{{{ messages[0].content }}}}{{{{ tools }}}}{{# {' '.join(marks)} #}}"
    assert profile_of(template).call_format is call_format
    async with running() as runtime:
        for choice in ("required", ("function", "get_weather")):
            ask = ChatRequest(
                messages=MESSAGES,
                tools=(WEATHER, TIME),
                tool_choice=choice,
                template=template,
                parallel_calls=False,
            )
            ((kind, (name, arguments)),) = meaning(await reply(runtime, ask))
            assert kind == "call"
            assert name in ("get_weather", choice[1] if isinstance(choice, tuple) else "get_time")
            assert not arguments if name == "get_time" else arguments["city"] in ("Paris", "Rome")


async def test_a_required_call_is_one_when_calls_are_not_parallel(running: Running):
    async with running() as runtime:
        pieces = await reply(
            runtime,
            ChatRequest(messages=MESSAGES, tools=(TIME,), tool_choice="required", parallel_calls=False),
        )
    assert meaning(pieces) == (("call", ("get_time", {})),)


async def test_a_structured_answer_is_content(running: Running):
    async with running() as runtime:
        pieces = await reply(
            runtime, ChatRequest(messages=MESSAGES, response_grammar=structured.json_schema(SCHEMA, field="format"))
        )
    assert all(isinstance(piece, Content) for piece in pieces)
    assert isinstance(json.loads("".join(piece.text for piece in pieces if isinstance(piece, Content)))["ok"], bool)


async def test_tools_or_a_structured_answer(running: Running):
    async with running() as runtime:
        pieces = await reply(
            runtime,
            ChatRequest(
                messages=MESSAGES, tools=(TIME,), response_grammar=structured.json_schema(SCHEMA, field="format")
            ),
        )
    for kind, value in meaning(pieces):
        assert value[0] == "get_time" if kind == "call" else "ok" in json.loads(value)
