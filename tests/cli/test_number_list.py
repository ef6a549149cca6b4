"""Lists of numbers on the command line."""

from __future__ import annotations

import click
import pytest

from localrun.cli.number_list import NumberList


def test_numbers_separated_by_commas() -> None:
    assert NumberList().convert("1,4, 8", None, None) == (1, 4, 8)
    assert NumberList().convert((2, 3), None, None) == (2, 3)


@pytest.mark.parametrize("text", ["", "1,x", "0", "1,,2", "-1", "1.5", "²"])
def test_what_is_no_such_list_is_said(text: str) -> None:
    with pytest.raises(click.BadParameter, match="1,4,8"):
        NumberList().convert(text, None, None)
