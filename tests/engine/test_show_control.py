"""Control tokens in a reply's text: left out, unless they were asked for."""

from __future__ import annotations

import pytest

from localrun.wire import Grammar, GrammarKind
from tests.engine.harness import Harness

MARKED = Grammar(GrammarKind.LARK, 'start: "a" literal_0 "b"\nliteral_0: "<|im_start|>"\n')


@pytest.mark.parametrize(("show_control", "text"), [(False, "ab"), (True, "a<|im_start|>b")])
def test_the_name_of_a_control_token_is_text_when_it_is_asked_for(show_control: bool, text: str):
    harness = Harness()
    harness.submit(1, "prompt", grammar=MARKED, show_control=show_control)
    harness.run()
    assert harness.texts[1] == text
    assert len(harness.tokens[1]) == 3


@pytest.mark.parametrize("show_control", [False, True])
def test_a_stop_string_may_be_a_control_token(show_control: bool):
    harness = Harness()
    harness.submit(1, "prompt", grammar=MARKED, show_control=show_control, stop=("<|im_start|>",))
    harness.run()
    assert (harness.texts[1], harness.finals[1].stop_text) == ("a", "<|im_start|>")
