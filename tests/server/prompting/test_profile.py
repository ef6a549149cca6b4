"""What a model file says that it can do."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from localrun.models import creation
from localrun.models.gguf.reader import read_header
from localrun.models.storage.model import Model
from localrun.server.prompting.profile import capabilities, profile_of


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", ("completion",)),
        ("{{ tools }}<tool_call>", ("completion", "tools")),
        ("{{ tools }} in a way that nobody knows", ("completion",)),
        ("{{ tools }}{{ message.tool_calls }} in a way that its renders tell", ("completion", "tools")),
        ("{{ message.reasoning_content }} likewise", ("completion", "thinking")),
        ("{{ tools }}<atem:function_calls><|message|>", ("completion", "tools", "thinking")),
        ("{% if enable_thinking %}<think>{% endif %}", ("completion", "thinking")),
        ("{{ tools }}<|channel|><|message|>", ("completion", "tools", "thinking")),
    ],
)
def test_by_the_template(small_model: Path, template: str, expected: tuple[str, ...]):
    assert capabilities(_model(small_model, template)) == expected


def test_a_template_for_tools_counts_for_tools(small_model: Path):
    model = _model(small_model, "{{ messages }}")
    model.header.metadata["tokenizer.chat_template.tool_use"] = "{{ tools }}<tool_call>"
    assert capabilities(model) == ("completion", "tools")


def test_encoders_give_vectors_alone(small_model: Path):
    assert capabilities(_model(small_model, "", architecture="bert")) == ("embedding",)
    assert capabilities(_model(small_model, "", pooling=1)) == ("embedding",)


def test_rerankers_rank_alone(small_model: Path):
    assert capabilities(_model(small_model, "", pooling=4)) == ("rerank",)


def _model(path: Path, template: str, *, architecture: str = "", pooling: int = 0) -> Model:
    header: Any = read_header(path)
    if architecture:
        object.__setattr__(header, "architecture", architecture)
    if pooling:
        header.metadata[f"{header.architecture}.pooling_type"] = pooling
    header.metadata["tokenizer.chat_template"] = template
    return Model("m", path, header.size_bytes, datetime.now(UTC), header)


KNOWS_TOOLS = "tools "
HOSTILE = (
    "arguments" + " " * 8,
    "arguments) ",
    "arguments'\"]",
    " ",
    "\n",
    "call ",
    "tool_calls | ",
    "id | ",
    "for a in a, ",
    "for a, b in a",
    "assistant' and ",
    '{"name":',
    '{\\"name\\": ',
    '"parameters"',
    "[a(",
    "[aaaaaaaa",
    "{{ ",
    "{{- ",
)


def _looked_at(template: str) -> float:
    """The processor time that it takes, the best of three."""
    times_s = []
    for _ in range(3):
        profile_of.cache_clear()
        began_s = time.process_time()
        creation.is_go(template)
        profile_of(template)
        times_s.append(time.process_time() - began_s)
    return min(times_s)


@pytest.mark.parametrize("before", ["", "arguments", "call", "id", '{"name":', "["])
def test_time_grows_with_the_length_of_a_template_and_no_faster(before: str) -> None:
    for piece in HOSTILE:
        n_times = 20_000 // len(piece)
        once = _looked_at(KNOWS_TOOLS + before + piece * n_times)
        eightfold = _looked_at(KNOWS_TOOLS + before + piece * (n_times * 8))
        assert eightfold < once * 32 + 0.001, (before, piece)
