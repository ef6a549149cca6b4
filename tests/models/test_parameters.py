"""Parameters that a model brings: names and kinds of values."""

from __future__ import annotations

from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.models import parameters


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("temperature", "0.5", 0.5), ("num_ctx", "4096.0", 4096), ("top_k", "40", 40), ("use_mmap", "True", True),
     ("stop", "<|x|>", "<|x|>"), ("seed", "-1", -1)],
)  # fmt: skip
def test_values(name: str, text: str, value: Any) -> None:
    assert parameters.value_of(name, text) == value
    assert type(parameters.value_of(name, text)) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [("temperature", "hot"), ("use_mmap", "maybe"), ("num_ctx", "inf"), ("top_k", "nan"), ("heat", "1")],
)
def test_what_is_no_value(name: str, text: str) -> None:
    with pytest.raises(BadRequest, match=name):
        parameters.value_of(name, text)


def test_parameters_are_kept_in_one_form() -> None:
    given = {"temperature": 1, "stop": "a", "top_k": "40", "num_ctx": 2048.0, "use_mmap": False, "tfs_z": 1.0}
    assert parameters.normalized(given) == {
        "temperature": 1.0, "stop": ["a"], "top_k": 40, "num_ctx": 2048, "use_mmap": False,
    }  # fmt: skip
    for wrong in ({"heat": 1}, {"temperature": True}, {"temperature": None}, {"stop": 1.5j}, {"use_mmap": [1]}):
        with pytest.raises(BadRequest):
            parameters.normalized(wrong)
