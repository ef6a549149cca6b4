"""What a model file says that it can do."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from localrun.models.gguf import read_header
from localrun.models.store import Model
from localrun.server.replies.capabilities import capabilities


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", ("completion",)),
        ("{{ tools }}<tool_call>", ("completion", "tools")),
        ("{{ tools }} in a way that nobody knows", ("completion",)),
        ("{% if enable_thinking %}<think>{% endif %}", ("completion", "thinking")),
        ("{{ tools }}<|channel|><|message|>", ("completion", "tools", "thinking")),
    ],
)
def test_by_the_template(small_model: Path, template: str, expected: tuple[str, ...]):
    assert capabilities(_model(small_model, template)) == expected


def test_encoders_give_vectors_alone(small_model: Path):
    assert capabilities(_model(small_model, "", architecture="bert")) == ("embedding",)
    assert capabilities(_model(small_model, "", pooling=1)) == ("embedding",)


def _model(path: Path, template: str, *, architecture: str = "", pooling: int = 0) -> Model:
    header: Any = read_header(path)
    if architecture:
        object.__setattr__(header, "architecture", architecture)
    if pooling:
        header.metadata[f"{header.architecture}.pooling_type"] = pooling
    header.metadata["tokenizer.chat_template"] = template
    return Model("m", path, header.size_bytes, datetime.now(UTC), header)
