"""The daemon looks at templates in its event loop, so no text may take it more than in proportion to its length."""

from __future__ import annotations

import time

import pytest

from localrun.models import creation
from localrun.server.replies import messages, recognise, thinking_tags

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
        recognise.call_format.cache_clear()
        thinking_tags.thinking_tags.cache_clear()
        began_s = time.process_time()
        creation.refuse_go(template)
        recognise.takes_tools(template)
        thinking_tags.thinking_tags(template)
        messages.fitted(messages.spelled_out([], template), template, is_harmony=False)
        times_s.append(time.process_time() - began_s)
    return min(times_s)


@pytest.mark.parametrize("before", ["", "arguments", "call", "id", '{"name":', "["])
def test_time_grows_with_the_length_of_a_template_and_no_faster(before: str) -> None:
    for piece in HOSTILE:
        n_times = 20_000 // len(piece)
        once = _looked_at(KNOWS_TOOLS + before + piece * n_times)
        eightfold = _looked_at(KNOWS_TOOLS + before + piece * (n_times * 8))
        assert eightfold < once * 32 + 0.001, (before, piece)
