"""Options typed by name."""

from __future__ import annotations

import pytest

from localrun.cli.model_options import parse_options
from localrun.errors import BadRequest


def test_values_get_the_types_that_the_api_takes():
    options = parse_options(["temperature=0", "top_k=40", "stop=a=b", "stop= c"])
    assert options == {"temperature": 0.0, "top_k": 40, "stop": ["a=b", " c"]}
    assert isinstance(options["temperature"], float)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [("temperature", "NAME=VALUE"), ("warmth=1", "the options are temperature"), ("top_k=1.5", "whole number")],
)
def test_wrong_ones_are_explained(assignment, words):
    with pytest.raises(BadRequest, match=words):
        parse_options([assignment])
