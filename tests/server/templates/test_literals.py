"""One pattern for many texts finds what trying each of them would find."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from localrun.server.templates import literals

texts = st.sets(st.text("<|ab", min_size=1, max_size=6), min_size=1, max_size=12)


@given(known=texts, text=st.text("<|ab", max_size=20))
def test_it_finds_the_longest_at_every_place(known: set[str], text: str) -> None:
    pattern = re.compile(literals.alternatives(literals.tree(known)))
    for at in range(len(text)):
        found = pattern.match(text, at)
        longest = max((one for one in known if text.startswith(one, at)), key=len, default=None)
        assert (found and found.group()) == longest


def test_a_very_long_text_is_no_problem() -> None:
    pattern = re.compile(literals.alternatives(literals.tree(["a" * 50_000, "b"])))
    assert pattern.fullmatch("a" * 50_000)
