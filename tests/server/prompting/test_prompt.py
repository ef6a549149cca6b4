"""What the chat template is given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from localrun.models.gguf import read_header
from localrun.models.header import Header
from localrun.server.jobs.job import Job
from localrun.server.prompting import prompt
from localrun.server.runtime import Runtime
from localrun.wire import Segment


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
    model = SimpleNamespace(header=header, template=header.chat_template or "")
    job = SimpleNamespace(model=model, control_tokens=("<|im_start|>",))
    return recorder, cast(Runtime, SimpleNamespace(renderer=recorder)), cast(Job, job)


async def test_the_model_s_template_gets_messages_and_special_tokens(small_model: Path) -> None:
    header = read_header(small_model)
    recorder, runtime, job = stubs(header)
    messages = [{"role": "user", "content": "hi"}]
    assert await prompt.render_template(runtime, job, messages) == (Segment("rendered"),)
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
    await prompt.render_template(runtime, job, [])
    assert "<|im_start|>" in recorder.asked[0][0]


async def test_a_template_in_place_of_the_model_s(small_model: Path) -> None:
    recorder, runtime, job = stubs(read_header(small_model))
    await prompt.render_template(runtime, job, [], template="{{ messages }}")
    assert recorder.asked[0][0] == "{{ messages }}"
